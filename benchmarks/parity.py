"""This script measures how far the policy trained is from the policy served.

    python -m benchmarks.parity --model DIR --prompts FILE.parquet [--num-prompts N] [--num-tokens N]

It compares a BF16 trainer with the same bits on both sides. For each format, a real SGLang server samples answers from
the quantised checkpoint with an adapter in its active slot. The trainer's engine, with the same adapter, then computes
the log-probs of the same tokens over (a) the BF16 checkpoint and (b) the quantised one. The script prints a Markdown
table of |log-prob sampled with - log-prob trained on|, in nats.
"""

import argparse
import dataclasses
import logging
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pandas as pd
import torch
import torch.distributed as dist
from tensordict import TensorDict
from transformers import AutoTokenizer
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.workers.config import HFModelConfig, McoreOptimizerConfig

from benchmarks.sglang_server import serve
from orbit_cli.quantize import quantize_checkpoint
from orbit_kernels.contract.client import SlotClient
from orbit_verl.config.keys import AdapterSettings
from orbit_verl.worker.engine import OrbitEngine
from orbit_verl.worker.engine_config import OrbitEngineConfig

# Block or group by format, None for the format's own; 64 divides the fused parts of both small models.
FORMATS = {"fp8": 64, "int4": 32, "nvfp4": None, "mxfp4": None}
BLOCK_SIZE = 32
# Standard deviation of the random adapter: rotations far enough from the identity to change what is sampled.
ADAPTER_SCALE = 0.05


@dataclasses.dataclass(frozen=True)
class Sample:
    """A ``Sample`` is one answer of the server.

    Attributes:
        tokens: prompt and answer.
        log_probs_R: of the answer's tokens, as sampled.
    """

    tokens: torch.Tensor
    log_probs_R: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Difference:
    """A ``Difference`` is |log-prob sampled with - log-prob trained on| over the tokens of all answers, in nats."""

    mean: float
    p99: float
    max: float

    @classmethod
    def of(cls, samples: Sequence[Sample], log_probs: Sequence[torch.Tensor]) -> "Difference":
        """Compares the server's log-probs with others of the same tokens."""
        pairs = zip(samples, log_probs, strict=True)
        difference_T = torch.cat([(ours_R - sample.log_probs_R).abs() for sample, ours_R in pairs])
        return cls(difference_T.mean().item(), difference_T.quantile(0.99).item(), difference_T.max().item())

    def __str__(self) -> str:
        return f"{self.mean:.1e} / {self.p99:.1e} / {self.max:.1e}"


class Trainer:
    """A ``Trainer`` is the trainer's engine over one checkpoint.

    It has a random adapter that is the same for every checkpoint.
    """

    def __init__(self, model: Path):
        config = HFModelConfig(path=str(model))
        settings = AdapterSettings(block_size=BLOCK_SIZE, dtype="bf16")
        engine_config = OrbitEngineConfig(adapter=settings, use_remove_padding=False, use_dynamic_bsz=False)
        optimizer_config = McoreOptimizerConfig(lr=1e-4, total_training_steps=1)
        self.engine = OrbitEngine(config, engine_config, optimizer_config, CheckpointConfig())
        self.engine.initialize()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.engine.adapter.named_parameters().values():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * ADAPTER_SCALE)

    def log_probs(self, samples: Sequence[Sample]) -> list[torch.Tensor]:
        """Returns the log-probs [R] that the engine gives the answers' tokens."""
        with self.engine.eval_mode():
            output = self.engine.infer_batch(_batch(samples))
        # Position p holds the log-prob of token p + 1; the last one has no successor.
        rows = output["model_output"]["log_probs"].unbind()
        return [row[-len(sample.log_probs_R) - 1 : -1] for row, sample in zip(rows, samples, strict=True)]


def _batch(samples: Sequence[Sample]) -> TensorDict:
    def nested(tensors) -> torch.Tensor:
        return torch.nested.as_nested_tensor(list(tensors), layout=torch.jagged)

    batch = TensorDict(
        {
            "input_ids": nested(sample.tokens for sample in samples),
            "loss_mask": nested(torch.ones(len(sample.log_probs_R), dtype=torch.long) for sample in samples),
            "position_ids": nested(torch.arange(len(sample.tokens)) for sample in samples),
            "temperature": torch.ones(len(samples)),
        },
        batch_size=[len(samples)],
    )
    tu.assign_non_tensor(
        batch,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=math.gcd(len(samples), 16),
        pad_mode=DatasetPadMode.NO_PADDING,
        use_fused_kernels=False,
    )
    return batch


def sample(address: str, prompts: Sequence[list[int]], num_tokens: int) -> list[Sample]:
    """Samples answers at temperature 1."""
    body = {
        "input_ids": list(prompts),
        "sampling_params": {"temperature": 1.0, "max_new_tokens": num_tokens},
        "return_logprob": True,
    }
    response = httpx.post(f"http://{address}/generate", json=body, timeout=3600, trust_env=False)
    response.raise_for_status()
    return [
        Sample(
            torch.tensor(prompt + answer["output_ids"]),
            torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]),
        )
        for prompt, answer in zip(prompts, response.json(), strict=True)
    ]


def publish(address: str, trainer: Trainer) -> None:
    """Stages and activates the trainer's adapter as version 1."""
    adapter, server = trainer.engine.export_adapter(), SlotClient(f"http://{address}", timeout_s=120)
    assert server.stage(1, adapter.encode()).digest == adapter.digest()
    server.activate(1)


def read_prompts(file: Path, model: Path, number: int) -> list[list[int]]:
    """Returns the first prompts of a verl data set, rendered with the model's chat template."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = pd.read_parquet(file)["prompt"][:number]
    return [
        tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
        for messages in rows
    ]


def measure(model: Path, prompts: Sequence[list[int]], num_tokens: int, folder: Path) -> Iterator[str]:
    """Yields one row of the table for BF16 and for each format."""
    bf16 = Trainer(model)
    for name in ("bf16", *FORMATS):
        served, same_bits = model, bf16
        if name != "bf16":
            served = folder / name
            quantize_checkpoint(model, served, format_name=name, group_size=FORMATS[name])
            same_bits = Trainer(served)
        with serve(served, folder / f"{name}.log", "--orbit-block-size", str(BLOCK_SIZE)) as address:
            publish(address, same_bits)
            samples = sample(address, prompts, num_tokens)
        a = Difference.of(samples, bf16.log_probs(samples))
        b = Difference.of(samples, same_bits.log_probs(samples))
        num_sampled = sum(len(answer.log_probs_R) for answer in samples)
        yield f"| {name} | {num_sampled} | {a} | {b} | {a.mean / b.mean:.3g} |"


@contextmanager
def _process_group(folder: Path) -> Iterator[None]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description="Log-prob difference of a BF16 trainer and of one with the served bits."
    )
    parser.add_argument("--model", type=Path, required=True, help="BF16 checkpoint")
    parser.add_argument("--prompts", type=Path, required=True, help="parquet file of a verl data set")
    parser.add_argument("--num-prompts", type=int, default=128)
    parser.add_argument("--num-tokens", type=int, default=32, help="longest answer")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, _process_group(Path(name)):
        prompts = read_prompts(arguments.prompts, arguments.model, arguments.num_prompts)
        print("| base | tokens | (a) BF16 trainer: mean / p99 / max | (b) same bits: mean / p99 / max | (a) / (b) |")
        print("|---|---|---|---|---|")
        for row in measure(arguments.model, prompts, arguments.num_tokens, Path(name)):
            print(row, flush=True)


if __name__ == "__main__":
    main()
