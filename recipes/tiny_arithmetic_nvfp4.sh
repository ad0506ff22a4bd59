#!/usr/bin/env bash
# tiny_arithmetic.sh on a base that is frozen in NVFP4 (E2M1, groups of 16 with E4M3 scales, W4A4).
#
#   bash recipes/tiny_arithmetic_nvfp4.sh [HYDRA_OVERRIDE ...]
#
# The variables that it reads are listed in recipes/tiny_arithmetic/recipe.sh.
source "$(dirname "${BASH_SOURCE[0]}")/tiny_arithmetic/recipe.sh"
tiny_arithmetic nvfp4 "$@"
