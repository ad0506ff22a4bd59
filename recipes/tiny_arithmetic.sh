#!/usr/bin/env bash
# A four-layer Qwen3, trained from scratch here, learns to carry: GRPO through OFT slots, two cores, a few minutes.
#
#   bash recipes/tiny_arithmetic.sh [HYDRA_OVERRIDE ...]
#
# The variables that it reads are listed in recipes/tiny_arithmetic/recipe.sh.
source "$(dirname "${BASH_SOURCE[0]}")/tiny_arithmetic/recipe.sh"
tiny_arithmetic bf16 "$@"
