#!/usr/bin/env bash
# A four-layer Qwen3-MoE of eight experts learns to carry, as tiny_arithmetic.sh does.
#
#   bash recipes/tiny_moe_bf16.sh [HYDRA_OVERRIDE ...]
#
# The variables that it reads are listed in recipes/tiny_arithmetic/recipe.sh.
source "$(dirname "${BASH_SOURCE[0]}")/tiny_arithmetic/recipe.sh"
tiny_moe bf16 "$@"
