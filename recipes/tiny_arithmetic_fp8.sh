#!/usr/bin/env bash
# tiny_arithmetic.sh on a base that is frozen in FP8 (E4M3 with a scale for each 128x128 block).
#
#   bash recipes/tiny_arithmetic_fp8.sh [HYDRA_OVERRIDE ...]
source "$(dirname "${BASH_SOURCE[0]}")/tiny_arithmetic/recipe.sh"
tiny_arithmetic fp8 "$@"
