# Sourced by recipes/tiny_*.sh: one recipe for every frozen base.
#
# MODEL_PATH, TRAIN_FILES, VAL_FILES  local paths; made under runs/cache when unset. Another model is used as it is stored
# OUTPUT_DIR                          metrics.jsonl, checkpoints; runs/<name of the recipe> when unset
# SEED                                of the base, the order of prompts and the server's sampling; 0 when unset
# DRY_RUN=1                           print the configuration that Hydra composes, and exit
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

# tiny_arithmetic PRECISION OVERRIDE...: a dense base.
tiny_arithmetic() {
    local precision="$1" name=tiny_arithmetic
    shift
    if [[ "$precision" != bf16 ]]; then name+="_$precision"; fi
    arithmetic "$name" tiny_arithmetic "$precision" "" "$@"
}

# tiny_moe PRECISION OVERRIDE...: eight experts in every layer, two for each token.
tiny_moe() {
    local precision="$1"
    shift
    arithmetic "tiny_moe_$precision" tiny_moe "$precision" "--num-experts 8" "$@"
}

# tiny_mla_moe PRECISION OVERRIDE...: Kimi-K2 in small. Only the routed experts are quantised, and every linear is adapted.
tiny_mla_moe() {
    local precision="$1"
    shift
    QUANTIZE_OPTIONS=(--experts-only)
    arithmetic "tiny_mla_moe_$precision" tiny_mla_moe "$precision" "--num-experts 8 --latent-attention" \
        "orbit.adapter.target_modules=[q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj,gate_proj,up_proj,down_proj]" \
        "$@"
}

# arithmetic NAME BASE PRECISION BASE_OPTIONS OVERRIDE...
#
# 64 prompts x 4 samples a step in two optimiser steps; lr 1e-4, since 3e-4 oscillates and 1e-3 collapses.
# Two sequences at a time make generation the bottleneck, as long answers do: versions change under running requests.
arithmetic() {
    local name="$1" base="$2" precision="$3" base_options seed="${SEED:-0}" prepared
    read -ra base_options <<<"$4"
    shift 4
    prepared="$ROOT/runs/cache/${base}_seed$seed"
    OUTPUT_DIR="${OUTPUT_DIR:-$ROOT/runs/$name}"
    input MODEL_PATH "$(model_folder "$prepared" "$precision")"
    input TRAIN_FILES "$prepared/train.parquet"
    input VAL_FILES "$prepared/val.parquet"
    prepare_once "$prepared" "$PYTHON" -m recipes.tiny_arithmetic.prepare --out "$prepared" --seed "$seed" \
        "${base_options[@]}"
    quantize_once "$prepared" "$precision"

    run_recipe "${ONE_SMALL_MACHINE[@]}" \
        trainer.v1.separate_async.parameter_sync_step=2 \
        trainer.experiment_name="${name}_seed$seed" \
        trainer.total_epochs=1 \
        trainer.total_training_steps=24 \
        trainer.val_before_train=true \
        trainer.test_freq=8 \
        trainer.save_freq=24 \
        data.seed="$seed" \
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
        +actor_rollout_ref.rollout.engine_kwargs.sglang.random_seed="$seed" \
        "$@"
}
