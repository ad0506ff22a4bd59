"""Whole runs of stock verl with a real SGLang server, on models that are random but real."""

import dataclasses
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from orbit_cli.processes import run_to_end
from recipes.tiny_arithmetic.data import TaskConfig, split_problems, write_parquet
from recipes.tiny_arithmetic.tokenizer import build_tokenizer
from tests.support import tiny_models

# What the processes of a run have imported when they are forked, in place of importing it one after the other.
IMPORTED = (
    "peft",
    "verl.trainer.ppo.v1",
    "orbit_verl.driver.trainer",
    "orbit_verl.worker.actor",
    "orbit_verl.rollout.replica",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
)
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
}

# Pays for digits: a random model gets a reward with a spread from the first step on.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return sum(character.isdigit() for character in solution_str) / 6
"""

OVERRIDES = """
trainer.strategy=orbit trainer.nnodes=1 trainer.n_gpus_per_node=1 trainer.logger=[console,file] trainer.total_epochs=10
trainer.val_before_train=false trainer.test_freq=-1 trainer.resume_mode=disable algorithm.adv_estimator=grpo
data.train_batch_size=8 data.max_prompt_length=16 data.max_response_length=6 data.dataloader_num_workers=0 data.seed=0
reward.custom_reward_function.name=compute_score reward.num_workers=1
actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16
actor_rollout_ref.actor.optim.lr=1e-3 actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32
actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.agent.num_workers=1 actor_rollout_ref.rollout.max_num_seqs=32
actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 actor_rollout_ref.rollout.gpu_memory_utilization=0.1
+actor_rollout_ref.rollout.engine_kwargs.sglang.max_total_tokens=8192
transfer_queue.backend.SimpleStorage.num_data_storage_units=1
""".split()
SYNC = ("trainer.v1.trainer_mode=sync", "orbit.seed=0")
ASYNC = (
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=1",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "trainer.save_freq=-1",
)

# Measured on several processors: the median 6e-8 to 1e-7 in BF16. One token in thousands differs by 1e-3 to 7e-2, where a
# rounding falls the other way, and is nearly all of the mean of the few hundred that a run samples (docs/parity.md).
MEDIAN, MEAN, LARGEST = 1e-6, 2e-4, 0.1


@dataclasses.dataclass
class Run:
    """One finished run."""

    status: int
    folder: Path

    @property
    def log(self) -> str:
        return (self.folder / "train.log").read_text(errors="replace")

    @property
    def steps(self) -> list[dict[str, float]]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["data"] for line in lines]

    @property
    def adapter(self) -> Path:
        """The adapter at the end, in peft's format."""
        return self.folder / "checkpoints" / "adapter"

    def succeeded(self) -> "Run":
        """The run itself, if it ended well."""
        assert self.status == 0, self.log[-3000:]
        return self

    def check_parity(self, *, median: float = MEDIAN, mean: float = MEAN, largest: float = LARGEST) -> None:
        """Server and trainer agree about every token of the trained version, and of older ones that are audited."""
        kinds = [f"orbit/parity/{kind}" for kind in ("", "audit_")]
        found = [(step, kind) for step in self.steps for kind in kinds if f"{kind}num_tokens" in step]
        assert len(found) >= len(self.steps), "every step has tokens of the trained version, or audited ones"
        means = [step[f"{kind}logprob_abs_diff_mean"] for step, kind in found]
        tokens = [step[f"{kind}num_tokens"] for step, kind in found]
        assert min(tokens) > 0
        assert statistics.median(means) < median, means
        assert sum(a * b for a, b in zip(means, tokens, strict=True)) / sum(tokens) <= mean, means
        assert max(step[f"{kind}logprob_abs_diff_max"] for step, kind in found) <= largest


def save_model(family: str, folder: Path, dtype: torch.dtype, **fields) -> Path:
    """A model of two layers with the tokeniser of the sums, whose vocabulary fits the first of two ranks.

    Its weights are smaller in fp32, where the rounding of every sum shows.
    """
    tokenizer = build_tokenizer(64)
    tokens = {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    weights = {"initializer_range": 0.1 if dtype == torch.float32 else 0.2}
    tiny_models.save(family, folder, dtype, num_hidden_layers=2, **tokens, **weights, **fields)
    tokenizer.save_pretrained(folder)
    return folder


def save_data(folder: Path) -> Path:
    """Prompts, of which every batch has equal ones, and the reward's function."""
    train, _ = split_problems(TaskConfig(num_digits=2, num_held_out=8))
    write_parquet(train[:6] * 11, folder / "train.parquet", split="train")
    (folder / "reward.py").write_text(REWARD)
    return folder


def train(
    python: str,
    environment: dict[str, str],
    data: Path,
    model: Path,
    folder: Path,
    *overrides: str,
    on_poll: Callable[[], None] = lambda: None,
) -> Run:
    """Run ``verl.trainer.main_ppo`` to its end; nothing of it is left when this returns.

    Args:
        python: the executable of all its Python processes.
        environment: besides this process's own and ENVIRONMENT.
        data: made by ``save_data``.
        on_poll: called twice a second.
    """
    command = [python, "-m", "verl.trainer.main_ppo", *OVERRIDES]
    command += [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={data}/train.parquet",
        f"data.val_files={data}/train.parquet",
        f"reward.custom_reward_function.path={data}/reward.py",
        f"trainer.default_local_dir={folder}/checkpoints",
        f"hydra.run.dir={folder}/hydra",
        *overrides,
    ]
    folder.mkdir(parents=True, exist_ok=True)
    own = {"VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl")}
    status = run_to_end(
        command,
        log=folder / "train.log",
        on_poll=on_poll,
        environment={**os.environ, **ENVIRONMENT, **environment, **own},
        cwd=folder,
    )
    return Run(status, folder)
