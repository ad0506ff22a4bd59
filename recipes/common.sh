# Sourced by every recipe. Sets up the environment, then run_recipe starts verl with the overrides it is given.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${ORBIT_PYTHON:-$ROOT/.venv/bin/python}"
if [[ ! -x "$PYTHON" ]]; then
    echo "error: $PYTHON is missing; run make setup, or set ORBIT_PYTHON to the Python that has the stack" >&2
    exit 1
fi
cd "$ROOT"

# One thread for each of the many small processes: trainer, server and Ray's actors share the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 HYDRA_FULL_ERROR=1
# Ray listens on every interface: who has not the token of ~/.ray/auth_token is refused.
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 RAY_DEDUP_LOGS=0 RAY_prestart_worker_first_driver=0
export VERL_LOGGING_LEVEL="${VERL_LOGGING_LEVEL:-INFO}"
# TransferQueue 0.x warns twice a call where there are fewer cores than it would like: nineteen lines of twenty.
export TQ_LOGGING_LEVEL="${TQ_LOGGING_LEVEL:-ERROR}"

# One trainer and one server on a machine with a few cores: GRPO, asynchronous, one worker of each kind.
ONE_SMALL_MACHINE=(
    trainer.v1.trainer_mode=separate_async
    trainer.project_name=orbit
    trainer.logger=[console,file]
    trainer.nnodes=1
    trainer.n_gpus_per_node=1
    trainer.resume_mode=disable
    algorithm.adv_estimator=grpo
    data.dataloader_num_workers=0
    reward.num_workers=1
    actor_rollout_ref.model.use_remove_padding=false
    actor_rollout_ref.model.enable_gradient_checkpointing=false
    actor_rollout_ref.rollout.nnodes=1
    actor_rollout_ref.rollout.n_gpus_per_node=1
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.gpu_memory_utilization=0.2
    actor_rollout_ref.rollout.agent.num_workers=1
    +actor_rollout_ref.rollout.engine_kwargs.sglang.max_total_tokens=16384
    transfer_queue.backend.SimpleStorage.num_data_storage_units=1
    +ray_kwargs.ray_init.object_store_memory=200000000
)

# input VARIABLE DEFAULT: keep the path that the user set, which must exist, or take the default.
input() {
    if [[ -z "${!1:-}" ]]; then
        printf -v "$1" '%s' "$2"
    elif [[ ! -e "${!1}" ]]; then
        echo "error: $1=${!1} does not exist; set $1 to an existing path, or leave it unset" >&2
        exit 1
    fi
}

# prepare_once DIR COMMAND...: run a command that makes DIR, when an input lies there and this is no dry run.
prepare_once() {
    local dir="$1"
    shift
    if [[ "${DRY_RUN:-0}" != 1 && "$MODEL_PATH:$TRAIN_FILES:$VAL_FILES" == *"$dir/"* ]]; then
        "$@" >&2
    fi
}

# model_folder PREPARED PRECISION: where the checkpoint of a precision lies.
model_folder() {
    if [[ "$2" == bf16 ]]; then echo "$1/model"; else echo "$1/model_$2"; fi
}

# quantize_once PREPARED PRECISION: make the checkpoint of a precision from the BF16 one, when it is the run's model.
QUANTIZE_OPTIONS=()
quantize_once() {
    local out options=("${QUANTIZE_OPTIONS[@]}")
    out="$(model_folder "$1" "$2")"
    if [[ "${DRY_RUN:-0}" == 1 || "$2" == bf16 || "$MODEL_PATH" != "$out" || -d "$out" ]]; then
        return
    fi
    # 64 divides the key and value rows of both small models; SGLang needs whole FP8 blocks in fused linears.
    if [[ "$2" == fp8 ]]; then options+=(--group-size 64); fi
    "$(dirname "$PYTHON")/orbit" quantize --model "$1/model" --format "$2" "${options[@]}" --out "$out" >&2
}

# run_recipe OVERRIDE...: replace this shell by the run, or by a print-out of its configuration when DRY_RUN=1.
run_recipe() {
    local show=()
    if [[ "${DRY_RUN:-0}" == 1 ]]; then
        show=(--cfg job --resolve)
    else
        mkdir -p "$OUTPUT_DIR"
    fi
    export VERL_FILE_LOGGER_PATH="$OUTPUT_DIR/metrics.jsonl"
    exec "$PYTHON" -m verl.trainer.main_ppo \
        trainer.strategy=orbit \
        actor_rollout_ref.model.path="$MODEL_PATH" \
        data.train_files="$TRAIN_FILES" \
        data.val_files="$VAL_FILES" \
        trainer.default_local_dir="$OUTPUT_DIR/checkpoints" \
        hydra.run.dir="$OUTPUT_DIR/hydra" \
        "$@" "${show[@]}"
}
