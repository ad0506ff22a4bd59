"""This module is the feed-forward part of a mixture-of-experts layer over frozen, stored experts.

The dimension suffixes are: T tokens, K experts of a token, R rows (T * K), D hidden, F width of an expert.
"""

import torch
from torch.nn import functional

from orbit_kernels.contract.options import Activations
from orbit_kernels.experts.adapter import ExpertAdapter
from orbit_kernels.experts.linear import ChunkLinear
from orbit_kernels.experts.routing import Dispatch, ExpertChunk, combine, gather
from orbit_kernels.experts.weights import DOWN, GATE_UP, ChunkBuffer, FrozenExperts

_NO_ADAPTER = ExpertAdapter()


def expert_mlp(
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    experts: FrozenExperts,
    *,
    buffer: ChunkBuffer,
    activations: Activations = "deployed",
    adapter: ExpertAdapter = _NO_ADAPTER,
) -> torch.Tensor:
    """Sums ``weight_k * W2 (silu(W1 x) * W3 x)`` over each token's experts k: returns [T, D] in the dtype of ``x``.

    Experts with tokens are taken ``buffer.num_experts`` at a time: they are dequantised into the buffer, multiplied
    with their rows in one grouped GEMM, and overwritten by the next; in backward this happens again. Experts without
    tokens are never read. Gradients go to ``x``, the routing weights and the adapter, never to a base weight. Results
    are the same bits for any chunk size, and in trainer and server when both call this with the same tokens. Temporary
    weights take the buffer; the rest grows with the rows, whatever the number of experts.

    Args:
        x_TD: tokens, bfloat16 or float32.
        ids_TK: int64, the experts that the router chose.
        weights_TK: their weights, any float dtype.
        experts: stored weights.
        buffer: memory for one chunk, shared by all layers of a process.
        activations: whether the input of each product is quantised as the deployed kernel does it.
        adapter: what happens around the products.

    Raises:
        ValueError: shapes that do not belong together, or an id of no expert.
    """
    if ids_TK.shape != weights_TK.shape or ids_TK.dim() != 2 or ids_TK.shape[0] != x_TD.shape[0]:
        raise ValueError(
            f"expert_mlp: tokens {tuple(x_TD.shape)}, expert ids {tuple(ids_TK.shape)}, weights {tuple(weights_TK.shape)}; "
            "must be [T, D], [T, K] and [T, K]"
        )
    dispatch = Dispatch.of(ids_TK, len(experts))
    rows_RD = gather(adapter.before_dispatch(x_TD), dispatch)
    outputs_RD = expert_outputs(rows_RD, dispatch, experts, buffer=buffer, activations=activations, adapter=adapter)
    return combine(outputs_RD, weights_TK, dispatch)


def expert_outputs(
    rows_RD: torch.Tensor,
    dispatch: Dispatch,
    experts: FrozenExperts,
    *,
    buffer: ChunkBuffer,
    activations: Activations,
    adapter: ExpertAdapter,
) -> torch.Tensor:
    """Puts each row through its own expert, before the router's weights: returns [R, D].

    Where there are no rows it returns the rows themselves.

    Args:
        rows_RD: grouped by expert, as ``gather`` returns them.
        dispatch: whose rows they are.
        experts, buffer, activations, adapter: see ``expert_mlp``.
    """
    if not dispatch.experts:
        return rows_RD
    chunks = list(dispatch.chunks(buffer.num_experts))
    outputs = [
        _chunk_mlp(chunk_RD, chunk, experts, buffer, activations, adapter)
        for chunk_RD, chunk in zip(rows_RD.split([sum(chunk.counts) for chunk in chunks]), chunks, strict=True)
    ]
    return torch.cat(outputs)


def _chunk_mlp(
    x_RD: torch.Tensor,
    chunk: ExpertChunk,
    experts: FrozenExperts,
    buffer: ChunkBuffer,
    activations: Activations,
    adapter: ExpertAdapter,
) -> torch.Tensor:
    gate_up = ChunkLinear(chunk, experts, GATE_UP, buffer, activations)
    gate_RF, up_RF = adapter.linear(chunk, gate_up, x_RD).chunk(2, dim=-1)
    hidden_RF = functional.silu(gate_RF) * up_RF
    return adapter.linear(chunk, ChunkLinear(chunk, experts, (DOWN,), buffer, activations), hidden_RF)
