"""Hugging Face names of the tensors and linears inside a Megatron-Core model, and a digest over them."""

import hashlib
from collections.abc import Iterable, Iterator

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from orbit_verl.model.linear import FrozenLinear

_LAYER_NORMS = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
_QK_NORMS = {"q_layernorm": "q_norm", "k_layernorm": "k_norm"}


def frozen_linears(model: GPTModel) -> Iterator[tuple[str, FrozenLinear]]:
    """The linears with the name of the Hugging Face module that holds their parts, e.g. ``model.layers.0.mlp``."""
    for prefix, layer in _layers(model):
        yield f"{prefix}.self_attn", layer.self_attention.linear_qkv
        yield f"{prefix}.self_attn", layer.self_attention.linear_proj
        yield f"{prefix}.mlp", layer.mlp.linear_fc1
        yield f"{prefix}.mlp", layer.mlp.linear_fc2


def named_tensors(model: GPTModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Every base tensor by its checkpoint name; parts of a fused linear as views."""
    yield "model.embed_tokens.weight", model.embedding.word_embeddings.weight
    for prefix, layer in _layers(model):
        for ours, theirs in _LAYER_NORMS.items():
            yield f"{prefix}.{theirs}.weight", getattr(layer, ours).weight
        for ours, theirs in _QK_NORMS.items():
            norm = getattr(layer.self_attention, ours)
            if norm is not None:
                yield f"{prefix}.self_attn.{theirs}.weight", norm.weight
    for prefix, linear in frozen_linears(model):
        for part, weight in linear.part_weights().items():
            yield f"{prefix}.{part}.weight", weight
    yield "model.norm.weight", model.decoder.final_layernorm.weight
    if not model.share_embeddings_and_output_weights:
        yield "lm_head.weight", model.output_layer.weight


def base_digest(models: Iterable[GPTModel]) -> str:
    """SHA-256 over names, dtypes, shapes and bits of all frozen tensors; equal exactly when the base is unchanged."""
    tensors = dict(item for model in models for item in named_tensors(model))
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _layers(model: GPTModel) -> Iterator[tuple[str, torch.nn.Module]]:
    for layer in model.decoder.layers:
        yield f"model.layers.{layer.layer_number - 1}", layer
