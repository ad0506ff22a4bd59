#!/usr/bin/env bash
# tiny_arithmetic.sh on a base that is frozen in INT4 (W4A16, groups of 32).
#
#   bash recipes/tiny_arithmetic_int4.sh [HYDRA_OVERRIDE ...]
#
# The variables that it reads are listed in recipes/tiny_arithmetic/recipe.sh.
source "$(dirname "${BASH_SOURCE[0]}")/tiny_arithmetic/recipe.sh"
tiny_arithmetic int4 "$@"
