"""What a Hugging Face configuration says about a decoder, or a refusal that names the field."""

import dataclasses
from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

from orbit_kernels.formats import BaseScheme, read_base_scheme

_ROTARY = {
    "LlamaForCausalLM": LlamaRotaryEmbedding,
    "Qwen3ForCausalLM": Qwen3RotaryEmbedding,
    "Qwen3MoeForCausalLM": Qwen3MoeRotaryEmbedding,
}
_QK_NORM = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
_MOE = ("Qwen3MoeForCausalLM",)
_ROPE_TYPES = ("default", "llama3")
_DTYPES = (torch.bfloat16, torch.float32)

# Fields that change the mathematics in a way the layer spec does not implement, with the values that leave it alone.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu",),
    "attention_dropout": (0, None),
    "pretraining_tp": (1, None),
    "sliding_window": (None,),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureOfExperts:
    """The layers whose MLP is a choice of experts.

    Args:
        layers: their numbers.
        num_experts: experts of each.
        top_k: experts of a token.
        ffn_size: width of one expert.
        normalized: whether a token's weights are scaled to a sum of one.
    """

    layers: frozenset[int]
    num_experts: int
    top_k: int
    ffn_size: int
    normalized: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderArchitecture:
    """A decoder with grouped-query attention, SwiGLU and rotary positions (Qwen3, Qwen3-MoE, Llama).

    Args:
        num_layers, hidden_size, ffn_size, vocab_size, max_positions: as in the checkpoint.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides ``num_heads``.
        head_dim: width of one head; not always ``hidden_size / num_heads``.
        norm_eps: epsilon of every RMSNorm.
        qk_norm: whether queries and keys are normalised per head (Qwen3).
        tied_embeddings: whether the head is the embedding matrix.
        dtype: of the activations and of what is not quantised, bfloat16 or float32.
        base: the format in which each linear is stored.
        moe: experts in place of the MLP in some layers, None in a dense model.
        inv_freq: rotary inverse frequencies, fp32 [head_dim / 2], scaling included.
    """

    num_layers: int
    hidden_size: int
    ffn_size: int
    vocab_size: int
    max_positions: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    qk_norm: bool
    tied_embeddings: bool
    dtype: torch.dtype
    base: BaseScheme
    moe: MixtureOfExperts | None
    inv_freq: torch.Tensor

    @classmethod
    def from_hf(cls, hf_config: Any) -> "DecoderArchitecture":
        """Read a transformers configuration.

        Raises:
            ValueError: the architecture, a quantisation, or a field that changes the mathematics is not supported.
        """
        architecture = _architecture(hf_config)
        _check_fields(hf_config)
        return cls(
            num_layers=hf_config.num_hidden_layers,
            hidden_size=hf_config.hidden_size,
            ffn_size=hf_config.intermediate_size,
            vocab_size=hf_config.vocab_size,
            max_positions=hf_config.max_position_embeddings,
            num_heads=hf_config.num_attention_heads,
            num_kv_heads=hf_config.num_key_value_heads,
            head_dim=hf_config.head_dim,
            norm_eps=hf_config.rms_norm_eps,
            qk_norm=architecture in _QK_NORM,
            tied_embeddings=bool(hf_config.tie_word_embeddings),
            dtype=_dtype(hf_config),
            base=read_base_scheme(hf_config.to_dict()),
            moe=_moe(hf_config) if architecture in _MOE else None,
            inv_freq=_ROTARY[architecture](hf_config).inv_freq.float(),
        )


def _moe(hf_config: Any) -> MixtureOfExperts:
    """Layers have experts by transformers' rule (Qwen3MoeDecoderLayer)."""
    dense, step = hf_config.mlp_only_layers or (), hf_config.decoder_sparse_step
    return MixtureOfExperts(
        layers=frozenset(
            layer for layer in range(hf_config.num_hidden_layers) if layer not in dense and (layer + 1) % step == 0
        ),
        num_experts=hf_config.num_experts,
        top_k=hf_config.num_experts_per_tok,
        ffn_size=hf_config.moe_intermediate_size,
        normalized=hf_config.norm_topk_prob,
    )


def _architecture(hf_config: Any) -> str:
    names = list(hf_config.architectures or [])
    if len(names) != 1 or names[0] not in _ROTARY:
        raise ValueError(f"architectures={names}: must be one of {sorted(_ROTARY)}; other families are not implemented")
    return names[0]


def _check_fields(hf_config: Any) -> None:
    for field, neutral in _NEUTRAL_VALUES.items():
        value = getattr(hf_config, field, None)
        if value not in neutral:
            raise ValueError(f"{field}={value!r}: only {neutral[0]!r} is implemented; use another checkpoint")
    layer_types = set(getattr(hf_config, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"}:
        raise ValueError(f"layer_types={sorted(layer_types)}: only full_attention is implemented")
    rope = hf_config.rope_parameters
    if rope["rope_type"] not in _ROPE_TYPES:
        raise ValueError(f"rope_parameters.rope_type={rope['rope_type']!r}: must be one of {', '.join(_ROPE_TYPES)}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"rope_parameters.partial_rotary_factor={rope['partial_rotary_factor']}: only 1.0 is implemented"
        )


def _dtype(hf_config: Any) -> torch.dtype:
    dtype = hf_config.dtype or torch.float32
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    if dtype not in _DTYPES:
        raise ValueError(
            f"dtype={dtype}: must be one of {[str(d) for d in _DTYPES]}; convert the checkpoint to bfloat16"
        )
    return dtype
