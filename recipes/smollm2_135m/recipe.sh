# Sourced by recipes/smollm2_135m_*.sh: one recipe for every precision of the frozen base.
#
# MODEL_PATH, TRAIN_FILES, VAL_FILES  local paths; made under runs/cache when unset. Another model is used as it is stored
# OUTPUT_DIR                          metrics.jsonl, checkpoints; runs/<name of the recipe> when unset
# SEED                                of the order of prompts and the server's sampling; 0 when unset
# DRY_RUN=1                           print the configuration that Hydra composes, and exit
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

# smollm2_135m PRECISION OVERRIDE...
smollm2_135m() {
    local precision="$1" name seed="${SEED:-0}" prepared="$ROOT/runs/cache/smollm2_135m"
    shift
    name="smollm2_135m_$precision"
    OUTPUT_DIR="${OUTPUT_DIR:-$ROOT/runs/$name}"
    input MODEL_PATH "$(model_folder "$prepared" "$precision")"
    input TRAIN_FILES "$prepared/train.parquet"
    input VAL_FILES "$prepared/val.parquet"
    prepare_once "$prepared" "$PYTHON" -m recipes.smollm2_135m.prepare --out "$prepared"
    quantize_once "$prepared" "$precision"

    run_recipe "${ONE_SMALL_MACHINE[@]}" \
        trainer.v1.separate_async.parameter_sync_step=1 \
        trainer.experiment_name="${name}_seed$seed" \
        trainer.total_epochs=100 \
        trainer.total_training_steps=20 \
        trainer.val_before_train=true \
        trainer.test_freq=10 \
        trainer.save_freq=20 \
        data.seed="$seed" \
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
        +actor_rollout_ref.rollout.engine_kwargs.sglang.random_seed="$seed" \
        "$@"
}
