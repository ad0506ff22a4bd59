#!/usr/bin/env bash
# SmolLM2-135M-Instruct in BF16 learns to answer small sums with the bare number: GRPO through OFT slots.
#
#   bash recipes/smollm2_135m_bf16.sh [HYDRA_OVERRIDE ...]
#
# MODEL_PATH, TRAIN_FILES, VAL_FILES  made under runs/cache when unset
# OUTPUT_DIR                          metrics.jsonl, checkpoints; runs/smollm2_135m_bf16 when unset
# SEED                                of the order of prompts and the server's sampling; 0 when unset
# DRY_RUN=1                           print the resolved configuration and exit
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

SEED="${SEED:-0}"
OUTPUT_DIR="${OUTPUT_DIR:-$ROOT/runs/smollm2_135m_bf16}"
PREPARED="$ROOT/runs/cache/smollm2_135m_bf16"
input MODEL_PATH "$PREPARED/model"
input TRAIN_FILES "$PREPARED/train.parquet"
input VAL_FILES "$PREPARED/val.parquet"
prepare_once "$PREPARED" "$PYTHON" -m recipes.smollm2_135m.prepare --out "$PREPARED"

run_recipe "${ONE_SMALL_MACHINE[@]}" \
    trainer.v1.separate_async.parameter_sync_step=1 \
    trainer.experiment_name="smollm2_135m_bf16_seed$SEED" \
    trainer.total_epochs=100 \
    trainer.total_training_steps=20 \
    trainer.val_before_train=true \
    trainer.test_freq=10 \
    trainer.save_freq=20 \
    data.seed="$SEED" \
    data.train_batch_size=8 \
    data.max_prompt_length=128 \
    data.max_response_length=6 \
    reward.custom_reward_function.path="$ROOT/recipes/tiny_arithmetic/reward.py" \
    actor_rollout_ref.actor.optim.lr=1e-5 \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.max_num_seqs=64 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 \
    +actor_rollout_ref.rollout.engine_kwargs.sglang.random_seed="$SEED" \
    "$@"
