#!/usr/bin/env bash
# A four-layer Qwen3, trained from scratch here, learns to carry: GRPO through OFT slots, two cores, a few minutes.
#
#   bash recipes/tiny_arithmetic.sh [HYDRA_OVERRIDE ...]
#
# MODEL_PATH, TRAIN_FILES, VAL_FILES  made under runs/cache when unset
# OUTPUT_DIR                          metrics.jsonl, checkpoints; runs/tiny_arithmetic when unset
# SEED                                of the base, the order of prompts and the server's sampling; 0 when unset
# DRY_RUN=1                           print the resolved configuration and exit
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

SEED="${SEED:-0}"
OUTPUT_DIR="${OUTPUT_DIR:-$ROOT/runs/tiny_arithmetic}"
PREPARED="$ROOT/runs/cache/tiny_arithmetic_seed$SEED"
input MODEL_PATH "$PREPARED/model"
input TRAIN_FILES "$PREPARED/train.parquet"
input VAL_FILES "$PREPARED/val.parquet"
prepare_once "$PREPARED" "$PYTHON" -m recipes.tiny_arithmetic.prepare --out "$PREPARED" --seed "$SEED"

# 64 prompts x 4 samples a step in two optimiser steps; lr 1e-4, since 3e-4 oscillates and 1e-3 collapses.
# Two sequences at a time make generation the bottleneck, as long answers do: versions change under running requests.
run_recipe "${ONE_SMALL_MACHINE[@]}" \
    trainer.v1.separate_async.parameter_sync_step=2 \
    trainer.experiment_name="tiny_arithmetic_seed$SEED" \
    trainer.total_epochs=1 \
    trainer.total_training_steps=24 \
    trainer.val_before_train=true \
    trainer.test_freq=8 \
    trainer.save_freq=24 \
    data.seed="$SEED" \
    data.train_batch_size=64 \
    data.max_prompt_length=16 \
    data.max_response_length=6 \
    reward.custom_reward_function.path="$ROOT/recipes/tiny_arithmetic/reward.py" \
    actor_rollout_ref.actor.optim.lr=1e-4 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=128 \
    actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.rollout.max_num_seqs=2 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=128 \
    +actor_rollout_ref.rollout.engine_kwargs.sglang.random_seed="$SEED" \
    "$@"
