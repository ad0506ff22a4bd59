"""This module says what the checkpoint of a decoder must hold: names, shapes, and the stored format of each linear."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from orbit_kernels.checkpoint.files import HFCheckpoint
from orbit_kernels.families import DecoderArchitecture
from orbit_kernels.formats import Bf16Format, TensorSpec, WeightFormat
from orbit_kernels.linears.fusing import GATE_UP, LATENTS, QKV
from orbit_kernels.linears.names import EXPERTS, ROUTER, ROUTER_BIAS, SHARED_EXPERT, unused_tensors

ATTENTION_OUT, MLP_OUT = ("o_proj",), ("down_proj",)
QUERY_UP, KEY_VALUE_UP = ("q_b_proj",), ("kv_b_proj",)


def linear_shape(architecture: DecoderArchitecture, module: str) -> tuple[int, int]:
    """Returns rows and columns of a linear by its Hugging Face name, e.g. ``model.layers.0.mlp.experts.3.up_proj``."""
    hidden = architecture.hidden_size
    parent, _, leaf = module.rpartition(".")
    if parent.endswith(".self_attn"):
        shapes = _attention_shapes(architecture) if architecture.latent is None else _latent_shapes(architecture)
        return shapes[leaf]
    ffn = architecture.ffn_size
    if EXPERTS in parent:
        ffn = architecture.moe.ffn_size
    elif parent.endswith(SHARED_EXPERT):
        ffn = architecture.moe.shared_ffn_size
    return (hidden, ffn) if leaf == "down_proj" else (ffn, hidden)


def _attention_shapes(architecture: DecoderArchitecture) -> dict[str, tuple[int, int]]:
    hidden = architecture.hidden_size
    rows, kv_rows = (heads * architecture.head_dim for heads in (architecture.num_heads, architecture.num_kv_heads))
    return {
        "q_proj": (rows, hidden),
        "k_proj": (kv_rows, hidden),
        "v_proj": (kv_rows, hidden),
        "o_proj": (hidden, rows),
    }


def _latent_shapes(architecture: DecoderArchitecture) -> dict[str, tuple[int, int]]:
    hidden, heads, latent = architecture.hidden_size, architecture.num_heads, architecture.latent
    return {
        "q_a_proj": (latent.q_lora_rank, hidden),
        "q_b_proj": (heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim), latent.q_lora_rank),
        "kv_a_proj_with_mqa": (latent.kv_lora_rank + latent.qk_rope_head_dim, hidden),
        "kv_b_proj": (heads * (latent.qk_nope_head_dim + latent.v_head_dim), latent.kv_lora_rank),
        "o_proj": (hidden, heads * latent.v_head_dim),
    }


def fused_format(architecture: DecoderArchitecture, prefix: str, parts: Sequence[str]) -> WeightFormat:
    """Returns the format of linears that are multiplied as one; unquantised ones have the dtype of the activations.

    Args:
        architecture: the model.
        prefix: of the parts' names, e.g. ``model.layers.0.mlp``.
        parts: leaf names.

    Raises:
        ValueError: the parts are stored in different formats.
    """
    found = architecture.base.common_format([f"{prefix}.{part}" for part in parts])
    return Bf16Format(dtype=architecture.dtype) if isinstance(found, Bf16Format) else found


def linear_formats(architecture: DecoderArchitecture) -> dict[str, WeightFormat]:
    """Returns the format of every linear by its name, e.g. ``model.layers.0.mlp.up_proj``.

    Raises:
        ValueError: linears that are multiplied as one are stored in different formats.
    """
    return {
        f"{prefix}.{part}": fused_format(architecture, prefix, parts)
        for prefix, parts in fused_linears(architecture)
        for part in parts
    }


def expected_tensors(architecture: DecoderArchitecture) -> dict[str, TensorSpec]:
    """Returns every stored tensor by checkpoint name; an unquantised one may be stored in a narrower dtype.

    Raises:
        ValueError: a linear has a shape that its format cannot store, or ``linear_formats`` refuses.
    """
    expected = dict(_plain_tensors(architecture))
    for module, weight_format in linear_formats(architecture).items():
        shape = linear_shape(architecture, module)
        if isinstance(weight_format, Bf16Format):
            expected[f"{module}.weight"] = _plain_spec(architecture, shape)
            continue
        try:
            specs = weight_format.specs(*shape)
        except ValueError as error:
            raise ValueError(f"{module}: {error}") from None
        expected |= {f"{module}.{leaf}": spec for leaf, spec in specs.items()}
    return expected


def open_checkpoint(
    architecture: DecoderArchitecture, folder: str | Path, held: Callable[[str], bool] = lambda module: True
) -> HFCheckpoint:
    """Opens the checkpoint and checks every header and the scales of every held linear; no weight is read.

    Args:
        architecture: the model.
        folder: of the checkpoint.
        held: whether a linear is held, by its name.

    Raises:
        ValueError: the folder or a file is missing or cut short; a tensor is missing, superfluous, of another shape or
            dtype, or holds a scale, zero point or shape that no weight has. Tensors are named.
    """
    checkpoint = HFCheckpoint(folder)
    unused = unused_tensors(
        checkpoint.specs,
        prefix=architecture.prefix,
        num_layers=None if architecture.latent is None else architecture.num_layers,
        tied_head=architecture.tied_embeddings,
    )
    checkpoint.check(expected_tensors(architecture), optional=unused)
    checkpoint.check_values({name: found for name, found in linear_formats(architecture).items() if held(name)})
    return checkpoint


def _plain_spec(architecture: DecoderArchitecture, shape: tuple[int, ...]) -> TensorSpec:
    narrower = (torch.bfloat16, torch.float16) if architecture.dtype == torch.float32 else ()
    return TensorSpec(shape, architecture.dtype, also=narrower)


def layer_name(architecture: DecoderArchitecture, layer: int) -> str:
    """Returns the Hugging Face name of a layer."""
    return f"{architecture.prefix}model.layers.{layer}"


def has_experts(architecture: DecoderArchitecture, layer: int) -> bool:
    """Says whether the MLP of a layer is a choice of experts."""
    return architecture.moe is not None and layer in architecture.moe.layers


def fused_linears(architecture: DecoderArchitecture) -> Iterator[tuple[str, Sequence[str]]]:
    """Yields the linears that are multiplied as one: the module that holds them, and their leaf names."""
    grouped_query, latent = (QKV, ATTENTION_OUT), (LATENTS, QUERY_UP, KEY_VALUE_UP, ATTENTION_OUT)
    attention = grouped_query if architecture.latent is None else latent
    for layer in range(architecture.num_layers):
        prefix = layer_name(architecture, layer)
        yield from ((f"{prefix}.self_attn", parts) for parts in attention)
        mlps = [f"{prefix}.mlp"]
        if has_experts(architecture, layer):
            mlps = [f"{prefix}{EXPERTS}{expert}" for expert in range(architecture.moe.num_experts)]
            mlps += [f"{prefix}{SHARED_EXPERT}"] if architecture.moe.shared_ffn_size else []
        yield from ((mlp, parts) for mlp in mlps for parts in (GATE_UP, MLP_OUT))


def _plain_tensors(architecture: DecoderArchitecture) -> Iterator[tuple[str, TensorSpec]]:
    hidden = architecture.hidden_size
    embedding, norm = _plain_spec(architecture, (architecture.vocab_size, hidden)), _plain_spec(architecture, (hidden,))
    yield f"{architecture.prefix}model.embed_tokens.weight", embedding
    for layer in range(architecture.num_layers):
        prefix = layer_name(architecture, layer)
        yield f"{prefix}.input_layernorm.weight", norm
        yield f"{prefix}.post_attention_layernorm.weight", norm
        for name, width in _inner_norms(architecture):
            yield f"{prefix}.self_attn.{name}.weight", _plain_spec(architecture, (width,))
        if has_experts(architecture, layer):
            moe = architecture.moe
            yield f"{prefix}{ROUTER}.weight", _plain_spec(architecture, (moe.num_experts, hidden))
            if moe.scoring == "sigmoid":
                bias = TensorSpec((moe.num_experts,), torch.float32, also=(torch.bfloat16,))
                yield f"{prefix}{ROUTER_BIAS}", bias
    yield f"{architecture.prefix}model.norm.weight", norm
    if not architecture.tied_embeddings:
        yield f"{architecture.prefix}lm_head.weight", embedding


def _inner_norms(architecture: DecoderArchitecture) -> list[tuple[str, int]]:
    """Returns the norms inside of attention and their widths."""
    if architecture.latent is not None:
        return [
            ("q_a_layernorm", architecture.latent.q_lora_rank),
            ("kv_a_layernorm", architecture.latent.kv_lora_rank),
        ]
    return [(name, architecture.head_dim) for name in ("q_norm", "k_norm")] if architecture.qk_norm else []
