#!/usr/bin/env bash
# SmolLM2-135M-Instruct, frozen in FP8 (E4M3, blocks of 64x64), is trained to answer small sums with the bare number: GRPO through OFT slots.
#
#   bash recipes/smollm2_135m_fp8.sh [HYDRA_OVERRIDE ...]
#
# The variables that it reads are listed in recipes/smollm2_135m/recipe.sh.
source "$(dirname "${BASH_SOURCE[0]}")/smollm2_135m/recipe.sh"
smollm2_135m fp8 "$@"
