"""What the checkpoint of a decoder must hold: names, shapes, and the stored format of each linear."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from orbit_kernels.checkpoint import HFCheckpoint
from orbit_kernels.formats import Bf16Format, TensorSpec, WeightFormat
from orbit_kernels.fusing import GATE_UP, QKV
from orbit_verl.model.architecture import DecoderArchitecture

ATTENTION_OUT, MLP_OUT = ("o_proj",), ("down_proj",)
EXPERTS = ".mlp.experts."


def linear_shape(architecture: DecoderArchitecture, module: str) -> tuple[int, int]:
    """Rows and columns of a linear by its Hugging Face name, e.g. ``model.layers.0.mlp.experts.3.up_proj``."""
    hidden = architecture.hidden_size
    parent, _, leaf = module.rpartition(".")
    if parent.endswith(".self_attn"):
        rows, kv_rows = (heads * architecture.head_dim for heads in (architecture.num_heads, architecture.num_kv_heads))
        shapes = {
            "q_proj": (rows, hidden),
            "k_proj": (kv_rows, hidden),
            "v_proj": (kv_rows, hidden),
            "o_proj": (hidden, rows),
        }
        return shapes[leaf]
    ffn = architecture.moe.ffn_size if EXPERTS in parent else architecture.ffn_size
    return (hidden, ffn) if leaf == "down_proj" else (ffn, hidden)


def fused_format(architecture: DecoderArchitecture, prefix: str, parts: Sequence[str]) -> WeightFormat:
    """The format of linears that are multiplied as one; unquantised ones have the dtype of the activations.

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
    """The format of every linear by its name, e.g. ``model.layers.0.mlp.up_proj``.

    Raises:
        ValueError: linears that are multiplied as one are stored in different formats.
    """
    return {
        f"{prefix}.{part}": fused_format(architecture, prefix, parts)
        for prefix, parts in _fused_linears(architecture)
        for part in parts
    }


def expected_tensors(architecture: DecoderArchitecture) -> dict[str, TensorSpec]:
    """Every stored tensor by checkpoint name; an unquantised one may be stored in a narrower dtype.

    Raises:
        ValueError: a linear has a shape that its format cannot store, or ``linear_formats`` refuses.
    """
    expected = {name: _plain_spec(architecture, shape) for name, shape in _plain_tensors(architecture)}
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


def open_checkpoint(architecture: DecoderArchitecture, folder: str | Path) -> HFCheckpoint:
    """The checkpoint, with every header and every scale checked; no weight is read.

    Raises:
        ValueError: the folder or a file is missing or cut short; a tensor is missing, superfluous, of another shape or
            dtype, or holds a scale, zero point or shape that no weight has. Tensors are named.
    """
    checkpoint = HFCheckpoint(folder)
    tied_head = frozenset({"lm_head.weight"} if architecture.tied_embeddings else ())
    checkpoint.check(expected_tensors(architecture), optional=tied_head)
    checkpoint.check_values(linear_formats(architecture))
    return checkpoint


def _plain_spec(architecture: DecoderArchitecture, shape: tuple[int, ...]) -> TensorSpec:
    narrower = (torch.bfloat16, torch.float16) if architecture.dtype == torch.float32 else ()
    return TensorSpec(shape, architecture.dtype, also=narrower)


def has_experts(architecture: DecoderArchitecture, layer: int) -> bool:
    """Whether the MLP of a layer is a choice of experts."""
    return architecture.moe is not None and layer in architecture.moe.layers


def _fused_linears(architecture: DecoderArchitecture) -> Iterator[tuple[str, Sequence[str]]]:
    for layer in range(architecture.num_layers):
        prefix = f"model.layers.{layer}"
        yield from ((f"{prefix}.self_attn", parts) for parts in (QKV, ATTENTION_OUT))
        mlps = [f"{prefix}.mlp"]
        if has_experts(architecture, layer):
            mlps = [f"{prefix}{EXPERTS}{expert}" for expert in range(architecture.moe.num_experts)]
        yield from ((mlp, parts) for mlp in mlps for parts in (GATE_UP, MLP_OUT))


def _plain_tensors(architecture: DecoderArchitecture) -> Iterator[tuple[str, tuple[int, ...]]]:
    embedding, norm = (architecture.vocab_size, architecture.hidden_size), (architecture.hidden_size,)
    yield "model.embed_tokens.weight", embedding
    for layer in range(architecture.num_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", norm
        yield f"{prefix}.post_attention_layernorm.weight", norm
        if architecture.qk_norm:
            yield f"{prefix}.self_attn.q_norm.weight", (architecture.head_dim,)
            yield f"{prefix}.self_attn.k_norm.weight", (architecture.head_dim,)
        if has_experts(architecture, layer):
            yield f"{prefix}.mlp.gate.weight", (architecture.moe.num_experts, architecture.hidden_size)
    yield "model.norm.weight", norm
    if not architecture.tied_embeddings:
        yield "lm_head.weight", embedding
