"""This module describes a decoder of any family: its sizes, and which of the implemented attentions and MLPs it has."""

import dataclasses
from typing import Literal

import torch

from orbit_kernels.formats import BaseScheme


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureOfExperts:
    """``MixtureOfExperts`` describes the layers whose MLP is a choice of experts.

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
    """``LatentAttention`` describes multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

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
    """A ``DecoderArchitecture`` describes a decoder with SwiGLU and rotary positions.

    Qwen3, Qwen3-MoE, Llama, DeepSeek-V3 and the text model of Kimi-K2 are such decoders.

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
        """Returns the number of experts of a layer that has some; 0 in a dense model."""
        return 0 if self.moe is None else self.moe.num_experts
