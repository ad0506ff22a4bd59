"""This module computes a mixture of experts that are spread over ranks: rows travel to their experts and back.

Each rank routes its own tokens, and sums its tokens' experts by the router's weights; in between the experts' ranks
compute unweighted rows. Numerics are those of `orbit_kernels.experts`, whose steps these are: only the rows of an
expert come from several ranks.

Dimension suffixes: T tokens, K experts of a token, R rows sent (T * K), P rows received, L experts held, G ranks, D
hidden.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all

from orbit_kernels.contract.options import Activations
from orbit_kernels.experts import ChunkBuffer, Dispatch, ExpertAdapter, FrozenExperts, combine, expert_outputs, gather


def expert_parallel_mlp(
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    experts: FrozenExperts,
    *,
    group: dist.ProcessGroup,
    buffer: ChunkBuffer,
    activations: Activations,
    adapter: ExpertAdapter,
) -> torch.Tensor:
    """Does ``orbit_kernels.experts.expert_mlp`` with the experts of all ranks of ``group``; each gives its own tokens.

    Every rank exchanges rows twice in forward and twice in backward, whether or not it has tokens or its experts get
    any.

    Args:
        x_TD: this rank's tokens; there may be none.
        ids_TK: int64, experts by their number in the whole layer.
        weights_TK: their weights.
        experts: those that this rank holds, rank by rank the layer's.
        group: the ranks.
        buffer, activations: see ``expert_mlp``.
        adapter: what happens around the products; expert 0 is the first that this rank holds.

    Returns:
        [T, D] in the dtype of ``x``.

    Raises:
        ValueError: an id of no expert.
    """
    dispatch = Dispatch.of(ids_TK, group.size() * len(experts))
    exchange = _Exchange(dispatch, len(experts), group, x_TD.device)
    received_PD = exchange.to_experts(gather(adapter.before_dispatch(x_TD), dispatch))
    held = Dispatch.of(exchange.expert_P[:, None], len(experts))
    rows_PD = gather(received_PD, held)
    rows_PD = expert_outputs(rows_PD, held, experts, buffer=buffer, activations=activations, adapter=adapter)
    outputs_PD = rows_PD.index_select(0, held.row_TK[:, 0])
    return combine(exchange.to_tokens(outputs_PD), weights_TK, dispatch)


class _Exchange:
    """An `_Exchange` knows how many rows go from each rank to each, and sends them.

    Args:
        dispatch: this rank's rows, whose order by expert is one by rank too.
        num_held: L.
        group: the ranks.
        device: of the rows.
    """

    def __init__(self, dispatch: Dispatch, num_held: int, group: dist.ProcessGroup, device: torch.device):
        self._group = group
        counts_GL = torch.zeros(group.size(), num_held, dtype=torch.int64)
        counts_GL.view(-1)[list(dispatch.experts)] = torch.tensor(dispatch.counts, dtype=torch.int64)
        received_GL = all_to_all(group, counts_GL.to(device))
        held_GL = torch.arange(num_held, device=device).expand_as(received_GL)
        self.expert_P = held_GL.flatten().repeat_interleave(received_GL.flatten())
        self._sent, self._received = counts_GL.sum(1).tolist(), received_GL.sum(1).tolist()

    def to_experts(self, rows_RD: torch.Tensor) -> torch.Tensor:
        """Returns the rows of this rank's experts [P, D], by the rank of origin, then by expert (``expert_P``)."""
        return self._send(rows_RD, self._sent, self._received)

    def to_tokens(self, rows_PD: torch.Tensor) -> torch.Tensor:
        """Sends the rows back and returns them, [R, D], in the order in which ``to_experts`` got them."""
        return self._send(rows_PD, self._received, self._sent)

    def _send(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        # Backward is an exchange too. Without rows for its experts a rank's outputs need no gradient of their own, but
        # the other ranks wait for it there.
        if torch.is_grad_enabled() and not rows.requires_grad:
            rows.requires_grad_()
        return all_to_all(self._group, rows, received, sent)
