"""This module gives the tensors and linears inside a Megatron-Core model their Hugging Face names."""

from collections.abc import Callable, Iterator

import torch

from orbit_kernels.linears.names import EXPERTS, ROUTER, SHARED_EXPERT
from orbit_verl.config.keys import AdapterSettings
from orbit_verl.model.latent_attention import FrozenLatentAttention
from orbit_verl.model.linear import FrozenLinear
from orbit_verl.model.modules import FrozenGPTModel
from orbit_verl.model.moe import CommonLinear, FrozenMoE

_LAYER_NORMS = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
_QK_NORMS = {"q_layernorm": "q_norm", "k_layernorm": "k_norm"}
_LATENT_NORMS = {"query_norm": "q_a_layernorm", "kv_norm": "kv_a_layernorm"}


def frozen_linears(model: FrozenGPTModel) -> Iterator[tuple[str, FrozenLinear]]:
    """Yields the linears that this rank holds, each with the Hugging Face name of what holds its parts.

    Such a name is, for example, ``model.layers.0.mlp``.
    """
    return _linears(model, _linears_of_each_expert)


def adapted_linears(
    model: FrozenGPTModel, settings: AdapterSettings
) -> Iterator[tuple[str, FrozenLinear | CommonLinear]]:
    """Yields what can carry an adapter, named as in ``frozen_linears``; experts that share theirs come as one."""
    return _linears(model, _linears_of_each_expert if settings.experts == "each" else _linears_that_experts_share)


def plain_tensors(model: FrozenGPTModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the base tensors that are never quantised, by checkpoint name: embeddings, norms, routers, head."""
    embedding = f"{model.checkpoint_prefix}model.embed_tokens.weight"
    if model.pre_process:
        yield embedding, model.embedding.word_embeddings.weight
    for prefix, layer in _layers(model):
        for ours, theirs in _LAYER_NORMS.items():
            yield f"{prefix}.{theirs}.weight", getattr(layer, ours).weight
        for ours, theirs in (_QK_NORMS | _LATENT_NORMS).items():
            norm = getattr(layer.self_attention, ours, None)
            if norm is not None:
                yield f"{prefix}.self_attn.{theirs}.weight", norm.weight
        if isinstance(layer.mlp, FrozenMoE):
            yield from ((f"{prefix}{ROUTER}.{leaf}", tensor) for leaf, tensor in layer.mlp.router.named_parameters())
    if not model.post_process:
        return
    yield f"{model.checkpoint_prefix}model.norm.weight", model.decoder.final_layernorm.weight
    if not model.share_embeddings_and_output_weights:
        yield f"{model.checkpoint_prefix}lm_head.weight", model.output_layer.weight
    elif not model.pre_process:
        yield embedding, model.output_layer.weight


def named_tensors(model: FrozenGPTModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields every base tensor of this rank as it is stored, or its part, by checkpoint name.

    Parts of a stacked linear are views.
    """
    yield from plain_tensors(model)
    for prefix, linear in frozen_linears(model):
        for part, stored in linear.stored_parts().items():
            for leaf, tensor in stored.tensors.items():
                yield f"{prefix}.{part}.{leaf}", tensor


def _layers(model: FrozenGPTModel) -> Iterator[tuple[str, torch.nn.Module]]:
    for layer in model.decoder.layers:
        yield f"{model.checkpoint_prefix}model.layers.{layer.layer_number - 1}", layer


def _linears(
    model: FrozenGPTModel, of_experts: Callable[[str, FrozenMoE], Iterator[tuple[str, torch.nn.Module]]]
) -> Iterator[tuple[str, torch.nn.Module]]:
    for prefix, layer in _layers(model):
        yield from ((f"{prefix}.self_attn", linear) for linear in _attention_linears(layer.self_attention))
        if not isinstance(layer.mlp, FrozenMoE):
            yield from ((f"{prefix}.mlp", linear) for linear in (layer.mlp.linear_fc1, layer.mlp.linear_fc2))
            continue
        yield from of_experts(prefix, layer.mlp)
        shared = layer.mlp.shared_expert
        if shared is not None:
            yield from ((f"{prefix}{SHARED_EXPERT}", linear) for linear in (shared.gate_up, shared.down))


def _linears_of_each_expert(prefix: str, moe: FrozenMoE) -> Iterator[tuple[str, FrozenLinear]]:
    for index, expert in zip(moe.layout.experts, moe.experts, strict=True):
        yield from ((f"{prefix}{EXPERTS}{index}", linear) for linear in (expert.gate_up, expert.down))


def _linears_that_experts_share(prefix: str, moe: FrozenMoE) -> Iterator[tuple[str, CommonLinear]]:
    yield from ((f"{prefix}{EXPERTS[:-1]}", linear) for linear in moe.common)


def _attention_linears(attention: torch.nn.Module) -> tuple[FrozenLinear, ...]:
    if isinstance(attention, FrozenLatentAttention):
        return attention.latents, attention.queries, attention.keys_values, attention.output
    return attention.linear_qkv, attention.linear_proj
