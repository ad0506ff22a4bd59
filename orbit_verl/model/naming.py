"""Hugging Face names of the tensors and linears inside a Megatron-Core model, and a manifest of them."""

from collections.abc import Iterator, Mapping, Sequence

import torch

from orbit_kernels.manifest import BaseManifest, Cut
from orbit_kernels.names import EXPERTS, ROUTER, SHARED_EXPERT
from orbit_verl.config import AdapterSettings
from orbit_verl.model.latent_attention import FrozenLatentAttention
from orbit_verl.model.linear import FrozenLinear
from orbit_verl.model.modules import FrozenGPTModel
from orbit_verl.model.moe import FrozenMoE, SharedLinear

_LAYER_NORMS = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
_QK_NORMS = {"q_layernorm": "q_norm", "k_layernorm": "k_norm"}
_LATENT_NORMS = {"query_norm": "q_a_layernorm", "kv_norm": "kv_a_layernorm"}


def frozen_linears(model: FrozenGPTModel) -> Iterator[tuple[str, FrozenLinear]]:
    """The linears that this rank holds, with the Hugging Face name of what holds their parts, e.g. ``model.layers.0.mlp``."""
    for prefix, layer in _layers(model):
        yield from ((f"{prefix}.self_attn", linear) for linear in _attention_linears(layer.self_attention))
        if not isinstance(layer.mlp, FrozenMoE):
            yield f"{prefix}.mlp", layer.mlp.linear_fc1
            yield f"{prefix}.mlp", layer.mlp.linear_fc2
            continue
        for index, expert in zip(layer.mlp.layout.held, layer.mlp.experts, strict=True):
            yield f"{prefix}{EXPERTS}{index}", expert.gate_up
            yield f"{prefix}{EXPERTS}{index}", expert.down
        if layer.mlp.shared_expert is not None:
            yield f"{prefix}{SHARED_EXPERT}", layer.mlp.shared_expert.gate_up
            yield f"{prefix}{SHARED_EXPERT}", layer.mlp.shared_expert.down


def adapted_linears(
    model: FrozenGPTModel, settings: AdapterSettings
) -> Iterator[tuple[str, FrozenLinear | SharedLinear]]:
    """What can carry an adapter, named as in ``frozen_linears``; a layer's experts as one where they share theirs."""
    if settings.experts == "each":
        yield from frozen_linears(model)
        return
    yield from ((prefix, linear) for prefix, linear in frozen_linears(model) if EXPERTS not in f"{prefix}.")
    for prefix, layer in _layers(model):
        if isinstance(layer.mlp, FrozenMoE):
            yield from ((f"{prefix}{EXPERTS[:-1]}", linear) for linear in layer.mlp.shared)


def plain_tensors(model: FrozenGPTModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The base tensors that are never quantised, by checkpoint name: embeddings, norms, routers, head."""
    yield f"{model.checkpoint_prefix}model.embed_tokens.weight", model.embedding.word_embeddings.weight
    for prefix, layer in _layers(model):
        for ours, theirs in _LAYER_NORMS.items():
            yield f"{prefix}.{theirs}.weight", getattr(layer, ours).weight
        for ours, theirs in (_QK_NORMS | _LATENT_NORMS).items():
            norm = getattr(layer.self_attention, ours, None)
            if norm is not None:
                yield f"{prefix}.self_attn.{theirs}.weight", norm.weight
        if isinstance(layer.mlp, FrozenMoE):
            yield from ((f"{prefix}{ROUTER}.{leaf}", tensor) for leaf, tensor in layer.mlp.router.named_parameters())
    yield f"{model.checkpoint_prefix}model.norm.weight", model.decoder.final_layernorm.weight
    if not model.share_embeddings_and_output_weights:
        yield f"{model.checkpoint_prefix}lm_head.weight", model.output_layer.weight


def named_tensors(model: FrozenGPTModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Every base tensor of this rank as it is stored, by checkpoint name; parts of a stacked linear as views."""
    yield from plain_tensors(model)
    for prefix, linear in frozen_linears(model):
        for part, stored in linear.stored_parts().items():
            for leaf, tensor in stored.tensors.items():
                yield f"{prefix}.{part}.{leaf}", tensor


def base_manifest(model: FrozenGPTModel, cuts: Mapping[str, Sequence[Cut]] | None = None) -> BaseManifest:
    """What this rank's live base is: the format of each linear but the routers, and dtype, shape and digest of each tensor.

    Args:
        model: the trainer's.
        cuts: names of tensors that are to be digested in parts, and the parts.
    """
    formats = {
        f"{prefix}.{part}": stored.format
        for prefix, linear in frozen_linears(model)
        for part, stored in linear.stored_parts().items()
    }
    return BaseManifest.of(formats, named_tensors(model), cuts)


def _layers(model: FrozenGPTModel) -> Iterator[tuple[str, torch.nn.Module]]:
    for layer in model.decoder.layers:
        yield f"{model.checkpoint_prefix}model.layers.{layer.layer_number - 1}", layer


def _attention_linears(attention: torch.nn.Module) -> tuple[FrozenLinear, ...]:
    if isinstance(attention, FrozenLatentAttention):
        return attention.latents, attention.queries, attention.keys_values, attention.output
    return attention.linear_qkv, attention.linear_proj
