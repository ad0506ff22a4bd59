"""Tiny mixtures of experts that the trainer's tests share, and their gradients through merged weights."""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import safetensors.torch
import torch
from torch.func import functional_call
from transformers import PreTrainedModel

from orbit_kernels.adapters.config import split_name
from orbit_kernels.formats import WeightFormat
from orbit_kernels.linears.fusing import FUSED_PARTS, GATE_UP
from orbit_verl.worker.engine import OrbitEngine
from tests.support.adapters import LINEAR_WEIGHT
from tests.support.engines import response_mask
from tests.support.tiny_models import save_trained

EXPERTS, TOP_K, FFN, LAYERS = 8, 2, 64, 3
LATENT_TARGETS = (
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)


def write_kimi(folder: Path, dtype: torch.dtype) -> Path:
    """A Kimi-K2.5 with a tensor of what sees images."""
    save_trained("kimi_k25", folder, dtype)
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors["vision_tower.patch_embed.proj.weight"] = torch.zeros(2, 2, dtype=dtype)
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    return folder


def random_record(tokens: list[torch.Tensor], layers: int = LAYERS, seed: int = 1) -> list[torch.Tensor]:
    """Experts for every token of each sequence [S, L, K]: any, but for what a server and verl leave out.

    The last token has none; a token in the middle has zeros in every layer, another one expert twice.
    """
    generator = torch.Generator().manual_seed(seed)
    records = []
    for sequence in tokens:
        scores = torch.rand(len(sequence), layers, EXPERTS, generator=generator)
        record = scores.topk(TOP_K).indices.to(torch.int16)
        record[-1] = record[len(sequence) // 3] = 0
        record[len(sequence) // 2] = 3
        records.append(record)
    return records


@contextlib.contextmanager
def routed_by(model: PreTrainedModel, records: list[torch.Tensor]) -> Iterator[dict[int, dict[int, torch.Tensor]]]:
    """In the body, a model of transformers takes the recorded experts of the sequence of that length, its own in gaps.

    Yields:
        The experts that it used [S, K], by length and layer.
    """
    used: dict[int, dict[int, torch.Tensor]] = {}

    def choose(layer: int, own: torch.Tensor) -> torch.Tensor:
        recorded = next((record[:, layer].long() for record in records if len(record) == len(own)), own)
        is_gap = recorded[:, :1].eq(recorded[:, 1:]).all(-1, keepdim=True)
        used.setdefault(len(own), {})[layer] = torch.where(is_gap, own, recorded)
        return used[len(own)][layer]

    def of_qwen3(layer: int, gate, arguments, outputs):
        logits, _, own = outputs
        scores = logits.float().softmax(-1)
        ids = choose(layer, own)
        weights = scores.gather(1, ids)
        return logits, weights / weights.sum(-1, keepdim=True), ids

    def of_deepseek(layer: int, mlp, route, logits):
        ids = choose(layer, route(logits)[0])
        weights = logits.sigmoid().gather(1, ids)
        return ids, weights / weights.sum(-1, keepdim=True) * mlp.routed_scaling_factor

    with contextlib.ExitStack() as stack:
        for index, layer in enumerate(model.model.layers):
            if not hasattr(layer.mlp, "gate"):
                continue
            if hasattr(layer.mlp, "route_tokens_to_experts"):
                route = functools.partial(of_deepseek, index, layer.mlp, layer.mlp.route_tokens_to_experts)
                stack.enter_context(mock.patch.object(layer.mlp, "route_tokens_to_experts", route))
            else:
                hook = layer.mlp.gate.register_forward_hook(functools.partial(of_qwen3, index))
                stack.callback(hook.remove)
        yield used


def leaf_tensors(engine: OrbitEngine) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """Copies of the trained tensors with gradients, by name; and those that each linear uses, by leaf."""
    trained = {name: p.detach().clone().requires_grad_() for name, p in engine.adapter.named_parameters().items()}
    by_module = {}
    for name in engine.export_adapter().untied().tensors:
        module, leaf = split_name(name)
        shared = name
        for first, *others in FUSED_PARTS:
            for other in others:
                shared = shared if shared in trained else name.replace(f".{other}.", f".{first}.")
        by_module.setdefault(module, {})[leaf] = trained[shared]
    return trained, by_module


def merged_nll(reference, weights, engine, tensors, tokens):
    """The engine's loss from transformers on merged weights, a function of the adapter's tensors."""
    method = engine.adapter.config.method
    merged = dict(weights)
    for module, leaves in tensors.items():
        if ".experts." not in module:
            merged[f"{module}.weight"] = method.merge(weights[f"{module}.weight"], leaves)
            continue
        prefix, expert, projection = module.rsplit(".", 2)
        fused = f"{prefix}.down_proj" if projection == "down_proj" else f"{prefix}.gate_up_proj"
        rows = {"down_proj": slice(None), "gate_proj": slice(0, FFN), "up_proj": slice(FFN, 2 * FFN)}[projection]
        index = (torch.tensor(int(expert)), torch.arange(weights[fused].shape[1])[rows])
        merged[fused] = merged[fused].index_put(index, method.merge(weights[fused][int(expert), rows], leaves))
    rows = [functional_call_log_probs(reference, merged, sequence) for sequence in tokens]
    masks = [response_mask(sequence)[:-1] for sequence in tokens]
    return -sum((row * mask).sum() for row, mask in zip(rows, masks, strict=True)) / sum(mask.sum() for mask in masks)


def functional_call_log_probs(reference, weights, sequence) -> torch.Tensor:
    logits = functional_call(reference, weights, (sequence[None],)).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, sequence[1:, None])[:, 0]


def assert_gradients(actual: dict[str, torch.Tensor], trained: dict[str, torch.Tensor]) -> None:
    unused = {name for name, tensor in trained.items() if tensor.grad is None or not tensor.grad.any()}
    assert trained.keys() - actual.keys() <= unused
    assert any(".experts." in name for name in actual)
    for name in actual.keys() - unused:
        expected = trained[name].grad
        assert (actual[name] - expected).abs().max() <= 1e-5 * expected.abs().max() + 1e-9, name


def dequantized_moe_tensors(
    quantized: Path, stored_as: WeightFormat, model: PreTrainedModel
) -> dict[str, torch.Tensor]:
    """transformers' parameters of a mixture, experts fused, with the weights that the quantised checkpoint means."""
    tensors = safetensors.torch.load_file(quantized / "model.safetensors")

    def weight(module: str) -> torch.Tensor:
        prefix = f"{module}."
        stored = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        is_linear = LINEAR_WEIGHT.fullmatch(f"{module}.weight")
        return stored_as.dequantize(stored, torch.float32) if is_linear else stored["weight"]

    def parameter(name: str, held: torch.Tensor) -> torch.Tensor:
        prefix, _, leaf = name.rpartition(".")
        if not prefix.endswith(".experts"):
            return weight(prefix)
        parts = GATE_UP if leaf == "gate_up_proj" else ("down_proj",)
        return torch.stack(
            [torch.cat([weight(f"{prefix}.{expert}.{part}") for part in parts]) for expert in range(len(held))]
        )

    return {name: parameter(name, held) for name, held in model.named_parameters()}
