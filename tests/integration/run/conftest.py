"""Whole runs of stock verl with a real SGLang server, on a model that is random but real."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from orbit_cli.processes import run_to_end
from recipes.tiny_arithmetic.data import TaskConfig, split_problems, write_parquet
from recipes.tiny_arithmetic.tokenizer import build_tokenizer
from tests.support.fork_server import fork_server

# Pays for digits: a random model gets a reward with a spread from the first step on.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return sum(character.isdigit() for character in solution_str) / 6
"""

OVERRIDES = """
trainer.strategy=orbit trainer.nnodes=1 trainer.n_gpus_per_node=1 trainer.logger=[console,file] trainer.total_epochs=10
trainer.val_before_train=false trainer.test_freq=-1 algorithm.adv_estimator=grpo
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

    def parity(self, value: str) -> list[float]:
        """``value`` of the log-prob difference in every step: of the trained version's tokens, and of audited ones."""
        keys = [f"orbit/parity/{kind}logprob_abs_diff_{value}" for kind in ("", "audit_")]
        return [step[key] for step in self.steps for key in keys if key in step]


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    train, _ = split_problems(TaskConfig(num_digits=2, num_held_out=8))
    write_parquet(train[:64], folder / "train.parquet", split="train")
    (folder / "reward.py").write_text(REWARD)
    return folder


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Callable[[torch.dtype], Path]:
    def build(dtype: torch.dtype) -> Path:
        folder = tmp_path_factory.mktemp("model")
        tokenizer = build_tokenizer(64)
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=64,
            initializer_range=0.2,
            tie_word_embeddings=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        Qwen3ForCausalLM(config).to(dtype).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return build


ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
IMPORTED = (
    "transformers",
    "peft",
    "verl.trainer.ppo.v1",
    "orbit_verl.driver.trainer",
    "orbit_verl.worker.actor",
    "orbit_verl.rollout.replica",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
)


@pytest.fixture(scope="session")
def forked_python(tmp_path_factory):
    with fork_server(IMPORTED, tmp_path_factory.mktemp("fork_server") / "log", ENVIRONMENT) as executable:
        yield executable


@pytest.fixture(scope="session")
def train(data, forked_python) -> Callable[..., Run]:
    """Run ``verl.trainer.main_ppo`` to its end; nothing of it is left when this returns."""

    def run(model: Path, folder: Path, *overrides: str, on_poll: Callable[[], None] = lambda: None) -> Run:
        environment = {**os.environ, **ENVIRONMENT, "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl")}
        command = [str(forked_python), "-m", "verl.trainer.main_ppo", *OVERRIDES]
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
        status = run_to_end(command, log=folder / "train.log", on_poll=on_poll, environment=environment, cwd=folder)
        return Run(status, folder)

    return run
