#!/usr/bin/env bash
# tiny_moe_bf16.sh on a base that is frozen in INT4 (W4A16, groups of 32), experts included.
#
#   bash recipes/tiny_moe_int4.sh [HYDRA_OVERRIDE ...]
#
# The variables that it reads are listed in recipes/tiny_arithmetic/recipe.sh.
source "$(dirname "${BASH_SOURCE[0]}")/tiny_arithmetic/recipe.sh"
tiny_moe int4 "$@"
