"""Engines, batches and references that the trainer's tests share."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from peft import PeftModel
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, PreTrainedModel
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.workers.config import HFModelConfig, McoreOptimizerConfig

from orbit_kernels.linears.fusing import FUSED_PARTS
from orbit_verl.config.keys import AdapterSettings, BaseSettings
from orbit_verl.worker.engine import OrbitEngine
from orbit_verl.worker.engine_config import OrbitEngineConfig
from tests.support.tiny_models import TRAINED_SIZES

VOCAB = TRAINED_SIZES["vocab_size"]
LENGTHS = (30, 17, 40, 24)


@dataclasses.dataclass
class Tokenizer:
    """The only thing that verl's engine asks of a tokenizer."""

    pad_token_id: int = 0


def make_engine(
    path: Path,
    *,
    packed: bool = True,
    contents: tuple[str, ...] = ("model", "optimizer", "extra"),
    optim: dict | None = None,
    engine: dict | None = None,
    base: BaseSettings | None = None,
    **adapter,
) -> OrbitEngine:
    """An initialised engine over the checkpoint at ``path``."""
    model_config = HFModelConfig(path=str(path), load_tokenizer=False)
    model_config.tokenizer = Tokenizer()
    settings = AdapterSettings(**{"block_size": 16, "dtype": "fp32"} | adapter)
    engine_config = OrbitEngineConfig(
        adapter=settings,
        base=base or BaseSettings(),
        use_remove_padding=packed,
        use_dynamic_bsz=False,
        **(engine or {}),
    )
    optim_config = McoreOptimizerConfig(
        **{"lr": 1e-2, "total_training_steps": 100, "lr_decay_style": "constant"} | (optim or {})
    )
    orbit = OrbitEngine(model_config, engine_config, optim_config, CheckpointConfig(load_contents=list(contents)))
    orbit.initialize()
    return orbit


def randomise(engine: OrbitEngine, scale: float = 0.1, seed: int = 5) -> None:
    """Replace the adapter by a random, non-zero one, in the optimiser's masters too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in engine.adapter.named_parameters().values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    engine.optimizer.reset()


def sequences(seed: int = 3) -> list[torch.Tensor]:
    """Token sequences of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in LENGTHS]


def response_mask(tokens: torch.Tensor) -> torch.Tensor:
    """1 at the positions that predict a token of the response, the second half of the sequence."""
    positions = torch.arange(len(tokens))
    return ((positions >= len(tokens) // 2 - 1) & (positions < len(tokens) - 1)).long()


def make_batch(
    tokens: list[torch.Tensor],
    *,
    micro_batch: int = 2,
    temperature: float = 1.0,
    records: list[torch.Tensor] | None = None,
    **non_tensor,
) -> TensorDict:
    """A batch as verl's trainer hands it to an engine; with the experts that are to be replayed for each sequence."""

    def nested(items):
        return torch.nested.as_nested_tensor(list(items), layout=torch.jagged)

    data = TensorDict(
        {
            "input_ids": nested(tokens),
            "loss_mask": nested(response_mask(t) for t in tokens),
            "position_ids": nested(torch.arange(len(t)) for t in tokens),
            "temperature": torch.full((len(tokens),), temperature),
        },
        batch_size=[len(tokens)],
    )
    if records is not None:
        data["routed_experts"] = nested(records)
    defaults = {
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": micro_batch,
        "pad_mode": DatasetPadMode.NO_PADDING,
        "use_fused_kernels": False,
        "enable_routing_replay": records is not None,
    }
    tu.assign_non_tensor(data, **defaults | non_tensor)
    return data


def log_probs(engine: OrbitEngine, tokens: list[torch.Tensor], **batch) -> list[torch.Tensor]:
    """Log-probs that the engine gives each next token, [length - 1] for each sequence."""
    with engine.eval_mode():
        output = engine.infer_batch(make_batch(tokens, **batch))
    return [sequence[:-1] for sequence in output["model_output"]["log_probs"].unbind()]


def nll(model_output, data, dp_group=None):
    """Mean negative log-likelihood of the responses over the global batch."""
    mask = data["loss_mask"].values().float()
    loss = -(model_output["log_probs"].values() * mask).sum() / data["batch_num_tokens"] * data["dp_size"]
    return loss, {}


def reference_nll(model: PreTrainedModel | PeftModel, tokens: list[torch.Tensor]) -> torch.Tensor:
    """The same loss from a transformers or peft model."""
    rows = reference_log_probs(model, tokens)
    masks = [response_mask(sequence)[:-1] for sequence in tokens]
    return -sum((row * mask).sum() for row, mask in zip(rows, masks, strict=True)) / sum(mask.sum() for mask in masks)


def reference_gradients(model: PeftModel, tokens: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of the same loss by peft's names."""
    reference_nll(model, tokens).backward()
    return {name.replace(".default", ""): p.grad for name, p in model.named_parameters() if p.requires_grad}


def tensors_that_share(name: str, fused: str) -> list[str]:
    """peft's tensors whose gradients add up to that of one trained tensor."""
    for group in FUSED_PARTS if fused == "tied" and "lora_B" not in name else ():
        if f".{group[0]}." in name:
            return [name.replace(group[0], part) for part in group]
    return [name]


def train_step(engine: OrbitEngine, tokens: list[torch.Tensor], loss: Callable = nll) -> tuple[float, float]:
    """One optimiser and scheduler step; loss over the batch and gradient norm."""
    with engine.train_mode():
        output = engine.train_batch(make_batch(tokens), loss)
    engine.lr_scheduler_step()
    return sum(output["loss"]), output["metrics"]["grad_norm"]


def load_reference(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The same checkpoint in transformers."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def reference_log_probs(model: PreTrainedModel | PeftModel, tokens: list[torch.Tensor]) -> list[torch.Tensor]:
    """Log-probs of each next token from a transformers or peft model, in fp32."""
    rows = []
    for sequence in tokens:
        logits = model(sequence[None]).logits[0, :-1].float()
        rows.append(logits.log_softmax(-1).gather(-1, sequence[1:, None])[:, 0])
    return rows


def max_difference(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    """Largest absolute difference over all tokens."""
    return max((a - b).abs().max().item() for a, b in zip(left, right, strict=True))
