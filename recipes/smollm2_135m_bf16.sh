#!/usr/bin/env bash
# SmolLM2-135M-Instruct in BF16 (dequantised from the Q4_1 file of its package) is trained to answer small sums with the bare number: GRPO through OFT slots.
#
#   bash recipes/smollm2_135m_bf16.sh [HYDRA_OVERRIDE ...]
#
# The variables that it reads are listed in recipes/smollm2_135m/recipe.sh.
source "$(dirname "${BASH_SOURCE[0]}")/smollm2_135m/recipe.sh"
smollm2_135m bf16 "$@"
