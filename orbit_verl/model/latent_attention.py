"""This module computes the frozen base's multi-head latent attention, in Megatron-Core's calling convention.

A server caches the latent of keys and values and decodes without ever expanding it: the up-projection's halves are
multiplied into the queries and the attention's output instead ("absorbed", arXiv:2405.04434, section 2.1.2). Rounded to
bf16, that is another function than the expanded one. Where attention repeats the server's calls (`as_served`), so does
this; otherwise keys and values are expanded, which costs a third of the absorbed scores.

An OFT adapter of the up-projection rotates the latent, before or after the cache: both ways agree.

Dimension suffixes: S sequence, B batch, T tokens (S * B), D hidden, H heads, P plain and R rotary width of queries and
keys, V width of values, L width of the latent of keys and values.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from orbit_kernels.families import DecoderArchitecture
from orbit_kernels.frozen.product import StoredWeight
from orbit_verl.model.attention import CausalAttention, is_as_served
from orbit_verl.model.linear import FrozenLinear
from orbit_verl.model.modules import RMSNorm


class FrozenLatentAttention(nn.Module):
    """A `FrozenLatentAttention` makes queries, keys and values from latents, attends causally, and projects the output.

    Args:
        config: Megatron-Core's, of the dtype and the rotation.
        architecture: the model; ``latent`` is set.
        latents, queries, keys_values, output: make the linears, from the layer's input to the latents of queries and of
            keys and values with their rotary key, from these to queries and to keys and values, and back to hidden.
    """

    def __init__(
        self,
        *,
        config: TransformerConfig,
        architecture: DecoderArchitecture,
        latents: Callable[[], FrozenLinear],
        queries: Callable[[], FrozenLinear],
        keys_values: Callable[[], FrozenLinear],
        output: Callable[[], FrozenLinear],
        **_megatron: Any,
    ):
        super().__init__()
        self._config, self._shape = config, architecture.latent
        self._num_heads = architecture.num_heads // config.tensor_model_parallel_size
        self._rotary_scale = architecture.rotary_scale
        self.latents, self.queries, self.keys_values, self.output = latents(), queries(), keys_values(), output()
        eps = architecture.norm_eps
        self.query_norm = RMSNorm(config=config, hidden_size=self._shape.q_lora_rank, eps=eps)
        self.kv_norm = RMSNorm(config=config, hidden_size=self._shape.kv_lora_rank, eps=eps)
        self.attention = CausalAttention(softmax_scale=self._shape.softmax_scale)

    def forward(
        self,
        x_SBD: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        rotary_pos_emb: torch.Tensor,
        packed_seq_params: PackedSeqParams | None = None,
        **_megatron: Any,
    ) -> tuple[torch.Tensor, None]:
        """Maps hidden states [S, B, D], packed [T, 1, D], to that shape; also returns Megatron-Core's absent bias.

        With tensor parallelism S is the rank's share of the sequence, down to the latents; H is its share of the heads.
        Everything is in the model's dtype; the padding mask is not needed, see `CausalAttention`.
        """
        shape = self._shape
        latents, _ = self.latents(x_SBD)
        query_latent, latent_SBL, k_rotary = latents.split(
            [shape.q_lora_rank, shape.kv_lora_rank, shape.qk_rope_head_dim], dim=-1
        )
        queries, _ = self.queries(self.query_norm(query_latent))
        q_plain, q_rotary = queries.unflatten(-1, (self._num_heads, -1)).split(
            [shape.qk_nope_head_dim, shape.qk_rope_head_dim], dim=-1
        )
        rotate = _Rotary(self._config, rotary_pos_emb, packed_seq_params, self._rotary_scale)
        q_SBHR, k_SB1R = rotate(q_rotary), rotate(self.keys_values.whole_sequence(k_rotary).unsqueeze(-2))
        heads = self._absorbed if is_as_served() else self._expanded
        y_SBHV = heads(q_plain, q_SBHR, self.kv_norm(latent_SBL), k_SB1R, packed_seq_params)
        return self.output(y_SBHV.flatten(2))

    def _absorbed(
        self,
        q_SBHP: torch.Tensor,
        q_SBHR: torch.Tensor,
        latent_SBL: torch.Tensor,
        k_SB1R: torch.Tensor,
        packed: PackedSeqParams | None,
    ) -> torch.Tensor:
        """Lets all heads read the one latent, as from the server's cache, and returns [S, B, H, V]."""
        latent_SBL = self.keys_values.whole_sequence(latent_SBL)
        adapter = self.keys_values.adapter if self.keys_values.adapter_enabled else None
        latent_SB1L = (latent_SBL if adapter is None else adapter.inputs(latent_SBL)[0]).unsqueeze(-2)
        (weight,) = self.keys_values.stored_parts().values()
        q_SBHL = _AbsorbedKeys.apply(q_SBHP.flatten(0, 1), weight, self._num_heads).view(*q_SBHP.shape[:3], -1)
        attended = self._attend(
            torch.cat([q_SBHL, q_SBHR], dim=-1), torch.cat([latent_SB1L, k_SB1R], dim=-1), latent_SB1L, packed
        )
        y_THV = _AbsorbedValues.apply(attended.flatten(0, 1), weight, self._shape.v_head_dim)
        return y_THV.view(*attended.shape[:3], -1)

    def _expanded(
        self,
        q_SBHP: torch.Tensor,
        q_SBHR: torch.Tensor,
        latent_SBL: torch.Tensor,
        k_SB1R: torch.Tensor,
        packed: PackedSeqParams | None,
    ) -> torch.Tensor:
        """Gives every head keys and values of its own, and returns [S, B, H, V]."""
        keys_values, _ = self.keys_values(latent_SBL)
        k_SBHP, v_SBHV = keys_values.unflatten(-1, (self._num_heads, -1)).split(
            [self._shape.qk_nope_head_dim, self._shape.v_head_dim], dim=-1
        )
        key = torch.cat([k_SBHP, k_SB1R.expand_as(q_SBHR)], dim=-1)
        return self._attend(torch.cat([q_SBHP, q_SBHR], dim=-1), key, v_SBHV, packed)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSeqParams | None
    ) -> torch.Tensor:
        """Attends causally: [S, B, heads, width], packed [T, 1, heads, width], to one such, as wide as the values."""
        if packed is not None:
            query, key, value = (tensor.squeeze(1) for tensor in (query, key, value))
        out = self.attention(query, key, value, None, packed_seq_params=packed)
        return out.view(-1, 1, self._num_heads, value.shape[-1]) if packed else out.unflatten(-1, (self._num_heads, -1))


class _Rotary:
    """A `_Rotary` rotates pairs of neighbours [S, B, H, R] by the positions of their sequence.

    The layout is DeepSeek's interleaved one.
    """

    def __init__(self, config: TransformerConfig, angles: torch.Tensor, packed: PackedSeqParams | None, scale: float):
        self._config, self._angles, self._packed, self._scale = config, angles, packed, scale

    def __call__(self, x_SBHR: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            return apply_rotary_pos_emb(x_SBHR, self._angles, self._config, mscale=self._scale)
        x_THR = apply_rotary_pos_emb(
            x_SBHR.squeeze(1), self._angles, self._config, self._packed.cu_seqlens_q_padded, mscale=self._scale
        )
        return x_THR.unsqueeze(1)


class _AbsorbedKeys(torch.autograd.Function):
    """An `_AbsorbedKeys` multiplies queries [T, H, P] by the up-projection of each head's keys: [T, H, L]."""

    @staticmethod
    def forward(ctx, q_THP: torch.Tensor, weight: StoredWeight, num_heads: int) -> torch.Tensor:
        ctx.weight, ctx.qk_nope_head_dim = weight, q_THP.shape[-1]
        return _per_head(q_THP, _heads(weight, num_heads, q_THP.dtype)[:, : q_THP.shape[-1]])

    @staticmethod
    def backward(ctx, grad_THL: torch.Tensor):
        weight_HPL = _heads(ctx.weight, grad_THL.shape[1], grad_THL.dtype)[:, : ctx.qk_nope_head_dim]
        return _per_head(grad_THL, weight_HPL.transpose(1, 2)), None, None


class _AbsorbedValues(torch.autograd.Function):
    """An `_AbsorbedValues` multiplies attended latents [T, H, L] by each head's up-projection of values: [T, H, V]."""

    @staticmethod
    def forward(ctx, x_THL: torch.Tensor, weight: StoredWeight, v_head_dim: int) -> torch.Tensor:
        ctx.weight = weight
        return _per_head(x_THL, _heads(weight, x_THL.shape[1], x_THL.dtype)[:, -v_head_dim:].transpose(1, 2))

    @staticmethod
    def backward(ctx, grad_THV: torch.Tensor):
        weight_HVL = _heads(ctx.weight, grad_THV.shape[1], grad_THV.dtype)[:, -grad_THV.shape[-1] :]
        return _per_head(grad_THV, weight_HVL), None, None


def _heads(weight: StoredWeight, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns the up-projection by head [H, P + V, L], dequantised for as long as it is used."""
    return weight.dequantize(dtype).unflatten(0, (num_heads, -1))


def _per_head(x_THI: torch.Tensor, weight_HIO: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x_THI.transpose(0, 1), weight_HIO).transpose(0, 1)
