"""Hugging Face names of the tensors and linears inside a Megatron-Core model, and a manifest of them."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from orbit_kernels.formats import Bf16Format
from orbit_kernels.manifest import BaseManifest, Cut
from orbit_verl.config import AdapterSettings
from orbit_verl.model.linear import FrozenLinear
from orbit_verl.model.moe import FrozenMoE, SharedLinear
from orbit_verl.model.tensors import EXPERTS

_LAYER_NORMS = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
_QK_NORMS = {"q_layernorm": "q_norm", "k_layernorm": "k_norm"}


def frozen_linears(model: GPTModel) -> Iterator[tuple[str, FrozenLinear]]:
    """The linears with the name of the Hugging Face module that holds their parts, e.g. ``model.layers.0.mlp``."""
    for prefix, layer in _layers(model):
        yield f"{prefix}.self_attn", layer.self_attention.linear_qkv
        yield f"{prefix}.self_attn", layer.self_attention.linear_proj
        if not isinstance(layer.mlp, FrozenMoE):
            yield f"{prefix}.mlp", layer.mlp.linear_fc1
            yield f"{prefix}.mlp", layer.mlp.linear_fc2
            continue
        for index, expert in enumerate(layer.mlp.experts):
            yield f"{prefix}.mlp.experts.{index}", expert.gate_up
            yield f"{prefix}.mlp.experts.{index}", expert.down


def adapted_linears(model: GPTModel, settings: AdapterSettings) -> Iterator[tuple[str, FrozenLinear | SharedLinear]]:
    """What can carry an adapter, named as in ``frozen_linears``; a layer's experts as one where they share theirs."""
    if settings.experts == "each":
        yield from frozen_linears(model)
        return
    yield from ((prefix, linear) for prefix, linear in frozen_linears(model) if EXPERTS not in f"{prefix}.")
    for prefix, layer in _layers(model):
        if isinstance(layer.mlp, FrozenMoE):
            yield from ((f"{prefix}.mlp.experts", linear) for linear in layer.mlp.shared)


def plain_tensors(model: GPTModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The base tensors that are never quantised, by checkpoint name: embeddings, norms, routers, head."""
    yield "model.embed_tokens.weight", model.embedding.word_embeddings.weight
    for prefix, layer in _layers(model):
        for ours, theirs in _LAYER_NORMS.items():
            yield f"{prefix}.{theirs}.weight", getattr(layer, ours).weight
        for ours, theirs in _QK_NORMS.items():
            norm = getattr(layer.self_attention, ours)
            if norm is not None:
                yield f"{prefix}.self_attn.{theirs}.weight", norm.weight
        if isinstance(layer.mlp, FrozenMoE):
            yield f"{prefix}.mlp.gate.weight", layer.mlp.router.weight
    yield "model.norm.weight", model.decoder.final_layernorm.weight
    if not model.share_embeddings_and_output_weights:
        yield "lm_head.weight", model.output_layer.weight


def named_tensors(model: GPTModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Every base tensor as it is stored, by checkpoint name; parts of a stacked linear as views."""
    yield from plain_tensors(model)
    for prefix, linear in frozen_linears(model):
        for part, stored in linear.stored_parts().items():
            for leaf, tensor in stored.tensors.items():
                yield f"{prefix}.{part}.{leaf}", tensor


def base_manifest(model: GPTModel, cuts: Mapping[str, Sequence[Cut]] | None = None) -> BaseManifest:
    """What the live base is: the format of each linear, and dtype, shape and digest of each stored tensor.

    Args:
        model: the trainer's.
        cuts: names of tensors that are to be digested in parts, and the parts.
    """
    formats = {
        f"{prefix}.{part}": stored.format
        for prefix, linear in frozen_linears(model)
        for part, stored in linear.stored_parts().items()
    }
    for prefix, layer in _layers(model):
        if isinstance(layer.mlp, FrozenMoE):
            formats[f"{prefix}.mlp.gate"] = Bf16Format(dtype=layer.mlp.router.weight.dtype)
    return BaseManifest.of(formats, named_tensors(model), cuts)


def _layers(model: GPTModel) -> Iterator[tuple[str, torch.nn.Module]]:
    for layer in model.decoder.layers:
        yield f"model.layers.{layer.layer_number - 1}", layer
