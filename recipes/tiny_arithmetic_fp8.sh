#!/usr/bin/env bash
# tiny_arithmetic.sh on a base that is frozen in FP8 (E4M3 with a scale for each block of 64x64; SGLang needs whole blocks in fused linears).
#
#   bash recipes/tiny_arithmetic_fp8.sh [HYDRA_OVERRIDE ...]
#
# The variables that it reads are listed in recipes/tiny_arithmetic/recipe.sh.
source "$(dirname "${BASH_SOURCE[0]}")/tiny_arithmetic/recipe.sh"
tiny_arithmetic fp8 "$@"
