#!/usr/bin/env bash
# tiny_arithmetic.sh on a base that is frozen in MXFP4 (E2M1, groups of 32 with power-of-two scales).
#
#   bash recipes/tiny_arithmetic_mxfp4.sh [HYDRA_OVERRIDE ...]
#
# The variables that it reads are listed in recipes/tiny_arithmetic/recipe.sh.
source "$(dirname "${BASH_SOURCE[0]}")/tiny_arithmetic/recipe.sh"
tiny_arithmetic mxfp4 "$@"
