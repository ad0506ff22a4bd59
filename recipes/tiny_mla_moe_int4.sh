#!/usr/bin/env bash
# A four-layer Kimi-K2 in small, routed experts frozen in INT4 (W4A16, groups of 32), learns to carry, as tiny_arithmetic.sh does.
#
#   bash recipes/tiny_mla_moe_int4.sh [HYDRA_OVERRIDE ...]
#
# The variables that it reads are listed in recipes/tiny_arithmetic/recipe.sh.
source "$(dirname "${BASH_SOURCE[0]}")/tiny_arithmetic/recipe.sh"
tiny_mla_moe int4 "$@"
