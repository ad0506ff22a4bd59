"""What a Hugging Face configuration says about a decoder, or a refusal that names the field."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding, yarn_get_mscale
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

from orbit_kernels.formats import BaseScheme, read_base_scheme
from orbit_kernels.linears.names import LANGUAGE_PREFIXES

_ROTARY = {
    "LlamaForCausalLM": LlamaRotaryEmbedding,
    "Qwen3ForCausalLM": Qwen3RotaryEmbedding,
    "Qwen3MoeForCausalLM": Qwen3MoeRotaryEmbedding,
    "DeepseekV3ForCausalLM": DeepseekV3RotaryEmbedding,
    "KimiK25ForConditionalGeneration": DeepseekV3RotaryEmbedding,
}
_QK_NORM = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
_LATENT = ("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration")
_ROPE_TYPES, _LATENT_ROPE_TYPES = ("default", "llama3"), ("default", "yarn")

# Fields that change the mathematics in a way the layer spec does not implement, with the values that leave it alone.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu",),
    "attention_dropout": (0, None),
    "pretraining_tp": (1, None),
    "sliding_window": (None,),
    "rope_interleave": (True, None),
    "scoring_func": ("sigmoid", None),
    "topk_method": ("noaux_tc", None),
    "moe_layer_freq": (1, None),
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
        scoring: of the router's logits. ``softmax`` over all experts, or ``sigmoid`` of each, chosen with a bias per expert
            and from the best groups only (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
        num_groups: groups of equally many experts.
        top_groups: groups that a token chooses from.
        scale: of the experts' sum.
        shared_ffn_size: width of the MLP that every token takes too, 0 without one.
    """

    layers: frozenset[int]
    num_experts: int
    top_k: int
    ffn_size: int
    normalized: bool
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    shared_ffn_size: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Args:
        q_lora_rank: width of the queries' latent.
        kv_lora_rank: width of the latent of keys and values, which a server caches.
        qk_nope_head_dim: width of a head's query and key that has no position.
        qk_rope_head_dim: width of the rest, which has; all heads share its key.
        v_head_dim: width of a head's value.
        softmax_scale: factor of the scores, that of yarn included.
    """

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    softmax_scale: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderArchitecture:
    """A decoder with SwiGLU and rotary positions (Qwen3, Qwen3-MoE, Llama, DeepSeek-V3, the text model of Kimi-K2).

    Args:
        prefix: of every tensor's name in the checkpoint, empty or ending in a dot.
        num_layers, hidden_size, ffn_size, vocab_size, max_positions: as in the checkpoint.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides ``num_heads``.
        head_dim: width of one head, not always ``hidden_size / num_heads``; with ``latent`` of its rotary part.
        norm_eps: epsilon of every RMSNorm.
        qk_norm: whether queries and keys are normalised per head (Qwen3).
        tied_embeddings: whether the head is the embedding matrix.
        dtype: of the activations and of what is not quantised, bfloat16 or float32.
        base: the format in which each linear is stored.
        latent: attention over latents, None for grouped-query attention.
        moe: experts in place of the MLP in some layers, None in a dense model.
        inv_freq: rotary inverse frequencies, fp32 [head_dim / 2], scaling included.
        rotary_scale: factor of the rotation's cosines and sines (yarn).
    """

    prefix: str
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
    latent: LatentAttention | None
    moe: MixtureOfExperts | None
    inv_freq: torch.Tensor
    rotary_scale: float

    @property
    def num_experts(self) -> int:
        """Experts of a layer that has some; 0 in a dense model."""
        return 0 if self.moe is None else self.moe.num_experts

    @classmethod
    def from_hf(cls, hf_config: Any) -> "DecoderArchitecture":
        """Read a transformers configuration.

        Raises:
            ValueError: the architecture, a quantisation, or a field that changes the mathematics is not supported.
        """
        name = _name(hf_config)
        base, prefix = read_base_scheme(hf_config.to_dict()), LANGUAGE_PREFIXES.get(hf_config.model_type, "")
        hf_config = hf_config.get_text_config()
        _check_fields(hf_config, _LATENT_ROPE_TYPES if name in _LATENT else _ROPE_TYPES)
        rotary = _ROTARY[name](hf_config)
        return cls(
            prefix=prefix,
            num_layers=hf_config.num_hidden_layers,
            hidden_size=hf_config.hidden_size,
            ffn_size=hf_config.intermediate_size,
            vocab_size=hf_config.vocab_size,
            max_positions=hf_config.max_position_embeddings,
            num_heads=hf_config.num_attention_heads,
            num_kv_heads=hf_config.num_key_value_heads,
            head_dim=hf_config.head_dim,
            norm_eps=hf_config.rms_norm_eps,
            qk_norm=name in _QK_NORM,
            tied_embeddings=bool(hf_config.tie_word_embeddings),
            dtype=base.dense.dtype,
            base=base,
            latent=_latent(hf_config) if name in _LATENT else None,
            moe=_MOE[name](hf_config) if name in _MOE else None,
            inv_freq=rotary.inv_freq.float(),
            rotary_scale=rotary.attention_scaling,
        )


def _latent(hf_config: Any) -> LatentAttention:
    """The scale of the scores is transformers' (DeepseekV3Attention)."""
    if hf_config.q_lora_rank is None:
        raise ValueError("q_lora_rank=None: queries without a latent are not implemented; use another checkpoint")
    scale, rope = hf_config.qk_head_dim**-0.5, hf_config.rope_parameters
    if rope["rope_type"] == "yarn":
        scale *= yarn_get_mscale(rope["factor"], rope.get("mscale_all_dim") or 0) ** 2
    return LatentAttention(
        q_lora_rank=hf_config.q_lora_rank,
        kv_lora_rank=hf_config.kv_lora_rank,
        qk_nope_head_dim=hf_config.qk_nope_head_dim,
        qk_rope_head_dim=hf_config.qk_rope_head_dim,
        v_head_dim=hf_config.v_head_dim,
        softmax_scale=scale,
    )


def _deepseek_moe(hf_config: Any) -> MixtureOfExperts:
    groups, chosen = hf_config.n_group or 1, hf_config.topk_group or 1
    experts, top_k = hf_config.n_routed_experts, hf_config.num_experts_per_tok
    if experts % groups or chosen > groups or top_k > chosen * (experts // groups):
        raise ValueError(
            f"n_group={groups}, topk_group={chosen}, n_routed_experts={experts}, num_experts_per_tok={top_k}: groups must "
            "divide the experts, and the chosen ones must hold a token's experts; check config.json"
        )
    return MixtureOfExperts(
        layers=frozenset(range(hf_config.first_k_dense_replace, hf_config.num_hidden_layers)),
        num_experts=experts,
        top_k=top_k,
        ffn_size=hf_config.moe_intermediate_size,
        normalized=hf_config.norm_topk_prob,
        scoring="sigmoid",
        num_groups=groups,
        top_groups=chosen,
        scale=hf_config.routed_scaling_factor,
        shared_ffn_size=hf_config.moe_intermediate_size * (hf_config.n_shared_experts or 0),
    )


def _qwen3_moe(hf_config: Any) -> MixtureOfExperts:
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


_MOE = {
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "DeepseekV3ForCausalLM": _deepseek_moe,
    "KimiK25ForConditionalGeneration": _deepseek_moe,
}


def _name(hf_config: Any) -> str:
    names = list(hf_config.architectures or [])
    if len(names) != 1 or names[0] not in _ROTARY:
        raise ValueError(f"architectures={names}: must be one of {sorted(_ROTARY)}; other families are not implemented")
    return names[0]


def _check_fields(hf_config: Any, rope_types: Sequence[str]) -> None:
    for field, neutral in _NEUTRAL_VALUES.items():
        value = getattr(hf_config, field, None)
        if value not in neutral:
            raise ValueError(f"{field}={value!r}: only {neutral[0]!r} is implemented; use another checkpoint")
    layer_types = set(getattr(hf_config, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"}:
        raise ValueError(f"layer_types={sorted(layer_types)}: only full_attention is implemented")
    rope = hf_config.rope_parameters
    if rope["rope_type"] not in rope_types:
        raise ValueError(f"rope_parameters.rope_type={rope['rope_type']!r}: must be one of {', '.join(rope_types)}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"rope_parameters.partial_rotary_factor={rope['partial_rotary_factor']}: only 1.0 is implemented"
        )
