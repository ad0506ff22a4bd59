"""This module computes causal attention by PyTorch's SDPA, on a CPU in the shapes of the server's calls.

SDPA's CPU kernel in bf16 rounds a row by the number of rows and keys of the call, so that a token which the server
decoded alone differs in its last bit from the same token inside a whole sequence; over 30 layers of bf16 that bit grows
to 0.03 nats (SmolLM2-135M). Everything else in the model rounds row by row. `as_served` makes the forward pass repeat
the server's calls (SGLang 0.5.12, torch_native_backend.py::TorchNativeAttnBackend): the prompt in one, every later
token in its own. The log-probs are then the server's own, up to the fp32 softmax. A difference remains for tokens that
the server decoded while no other request ran, as oneDNN has another GEMM for one row of more than about a thousand
columns.

Dimension suffixes: S sequence, B batch, T packed tokens, H query heads, K key-value heads, C head width.
"""

import contextlib
import contextvars
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import nn
from torch.nn.utils.rnn import pad_sequence

_prompt_lengths: contextvars.ContextVar[tuple[int, ...] | None] = contextvars.ContextVar("prompt_lengths", default=None)


@contextlib.contextmanager
def as_served(prompt_lengths: Sequence[int]) -> Iterator[None]:
    """Makes the body attend in the server's shapes; the gradient is that of one causal call over the sequence.

    Args:
        prompt_lengths: leading tokens of each sequence that the server took in one call; the others were decoded.
    """
    token = _prompt_lengths.set(tuple(prompt_lengths))
    try:
        yield
    finally:
        _prompt_lengths.reset(token)


def is_as_served() -> bool:
    """Says whether the forward pass repeats the server's calls now."""
    return _prompt_lengths.get() is not None


class CausalAttention(nn.Module):
    """A `CausalAttention` is causal softmax attention in Megatron-Core's calls.

    It takes padded batches [S, B, ...] and packed sequences [T, ...]. Padding stands after the tokens, where causality
    already hides it, so no mask is needed; `FrozenGPTModel` checks it.
    """

    def __init__(self, *, softmax_scale: float | None, **_megatron: Any):
        super().__init__()
        self._scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **_megatron: Any,
    ) -> torch.Tensor:
        """Attends with queries [S, B, H, C] to keys and values [S, B, K, C] and returns [S, B, H * C].

        Packed, it takes queries [T, H, C] and returns [T, H * C]. Values may have another width than queries and keys;
        the output has theirs.
        """
        if packed_seq_params is None:
            return self._attend(query, key, value)
        lengths = packed_seq_params.cu_seqlens_q_padded.diff().tolist()
        pieces = [tensor.split(lengths) for tensor in (query, key, value)]
        if not is_as_served():
            outputs = [self._attend(*(t.unsqueeze(1) for t in piece)).squeeze(1) for piece in zip(*pieces, strict=True)]
        else:
            padded = self._attend(*(pad_sequence(piece) for piece in pieces))
            outputs = [padded[:length, index] for index, length in enumerate(lengths)]
        return torch.cat(outputs)

    def _attend(self, q_SBHC: torch.Tensor, k_SBKC: torch.Tensor, v_SBKC: torch.Tensor) -> torch.Tensor:
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (q_SBHC, k_SBKC, v_SBKC))
        prompt_lengths = _prompt_lengths.get()
        if prompt_lengths is None:
            out_BHSC = _sdpa(q, k, v, self._scale, causal=True)
        else:
            out_BHSC = _ServedAttention.apply(q, k, v, prompt_lengths, self._scale)
        return out_BHSC.permute(2, 0, 1, 3).flatten(2)


class _ServedAttention(torch.autograd.Function):
    """A `_ServedAttention` repeats the server's calls in forward; backward is that of one causal call."""

    @staticmethod
    def forward(ctx, q_BHSC, k_BKSC, v_BKSC, prompt_lengths: tuple[int, ...], scale: float | None):
        ctx.save_for_backward(q_BHSC, k_BKSC, v_BKSC)
        ctx.scale = scale
        out_BHSC = q_BHSC.new_empty(*q_BHSC.shape[:-1], v_BKSC.shape[-1])
        for length in set(prompt_lengths) - {0}:
            rows = _rows(prompt == length for prompt in prompt_lengths)
            q, k, v = (tensor[rows, :, :length] for tensor in (q_BHSC, k_BKSC, v_BKSC))
            out_BHSC[rows, :, :length] = _sdpa(q, k, v, scale, causal=True)
        for end in range(min(prompt_lengths) + 1, q_BHSC.shape[2] + 1):
            rows = _rows(prompt < end for prompt in prompt_lengths)
            k, v = k_BKSC[rows, :, :end], v_BKSC[rows, :, :end]
            out_BHSC[rows, :, end - 1 : end] = _sdpa(q_BHSC[rows, :, end - 1 : end], k, v, scale, causal=False)
        return out_BHSC

    @staticmethod
    def backward(ctx, grad_BHSC: torch.Tensor):
        q, k, v = (tensor.detach().requires_grad_(True) for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            out_BHSC = _sdpa(q, k, v, ctx.scale, causal=True)
        return *torch.autograd.grad(out_BHSC, (q, k, v), grad_BHSC), None, None


def _rows(wanted_by_row: Iterable[bool]) -> slice | list[int]:
    """Returns the wanted indices, as a slice, which copies nothing, where that is all of them."""
    chosen = list(wanted_by_row)
    return slice(None) if all(chosen) else [index for index, wanted in enumerate(chosen) if wanted]


def _sdpa(q, k, v, scale: float | None, *, causal: bool) -> torch.Tensor:
    grouped = q.shape[1] != k.shape[1]
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
