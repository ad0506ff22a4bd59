"""This module puts slotted adapters on the routed experts of a layer.

Dimension suffixes: T tokens of a batch, R rows of a chunk of experts, D hidden, I input width, O output width.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.topk import TopKOutput

from orbit_kernels.experts import GATE_UP, ExpertAdapter, adapted_product
from orbit_kernels.experts.linear import ChunkLinear
from orbit_kernels.experts.routing import ExpertChunk
from orbit_kernels.upstream.ledger import Method
from orbit_sglang.model.slotted.batch import BatchSlots
from orbit_sglang.model.slotted.slotted_linear import Slots, SlottedLinear

FORWARD = Method(
    "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.forward", ("self", "hidden_states", "topk_output")
)


class SlottedExperts(ExpertAdapter):
    """``SlottedExperts`` hold an adapter per slot and expert; each row has its token's slot.

    Args:
        linears: by fused projections, one for each expert.
        batch: slots of the running forward pass.
    """

    def __init__(self, linears: Mapping[tuple[str, ...], Sequence[SlottedLinear]], batch: BatchSlots):
        self._linears, self._batch = dict(linears), batch

    def linear(self, chunk: ExpertChunk, frozen: ChunkLinear, x_RI: torch.Tensor) -> torch.Tensor:
        """Returns the adapted output [R, O] of one projection, or of fused ones, of a chunk."""
        linears = self._linears.get(frozen.projections)
        if linears is None:
            return frozen(x_RI)
        own = [linears[expert] for expert in chunk.experts]
        slots = self._batch.of_tokens(chunk.token_R)
        if all(linear.is_idle(slots) for linear in own):
            return frozen(x_RI)
        of_expert = [slots] * len(own) if isinstance(slots, int) else slots.split(chunk.counts)
        rows = [_Rows(linear, slots) for linear, slots in zip(own, of_expert, strict=True)]
        return adapted_product(rows, chunk, frozen, x_RI)


class CommonExpertAdapter(SlottedExperts):
    """A ``CommonExpertAdapter`` is an adapter per slot that all experts share.

    That of gate and up acts before dispatch.

    Args:
        linears: by fused projections.
        num_experts: experts of the layer.
        batch: slots of the running forward pass.
    """

    def __init__(self, linears: Mapping[tuple[str, ...], SlottedLinear], num_experts: int, batch: BatchSlots):
        after = {key: [linear] * num_experts for key, linear in linears.items() if key != GATE_UP}
        super().__init__(after, batch)
        self._input = linears.get(GATE_UP)

    def before_dispatch(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Returns the input [T, D] with the adapter of gate and up."""
        slots = self._batch.of_rows(x_TD.shape[0])
        if self._input is None or self._input.is_idle(slots):
            return x_TD
        (rotated_TD,) = self._input.inputs(x_TD, slots)
        return rotated_TD


class AdaptedExpertsInput:
    """An ``AdaptedExpertsInput`` turns the input of routed experts, whatever computes them, by one rotation of all.

    It wraps ``forward``. The router has chosen by then, from the plain input, which the shared expert reads too.

    Args:
        linear: the adapter of gate and up.
        experts: SGLang's.
        batch: slots of the running forward pass.
    """

    def __init__(self, linear: SlottedLinear, experts: FusedMoE, batch: BatchSlots):
        self._linear, self._batch = linear, batch
        self._base_forward = FORWARD.replace_on(experts, self.forward)

    def forward(self, hidden_states: torch.Tensor, topk_output: TopKOutput) -> torch.Tensor:
        """Returns the experts' weighted sum [T, D]; the caller's ``hidden_states`` [T, D] are left as they are."""
        slots = self._batch.of_rows(hidden_states.shape[0])
        if not self._linear.is_idle(slots):
            (hidden_states,) = self._linear.inputs(hidden_states, slots)
        return self._base_forward(hidden_states, topk_output)


@dataclasses.dataclass
class _Rows:
    """``_Rows`` are the adapter of one expert for its rows of a chunk."""

    linear: SlottedLinear
    slots: Slots

    def inputs(self, x_RI: torch.Tensor) -> list[torch.Tensor]:
        return self.linear.inputs(x_RI, self.slots)

    def output(self, x_RI: torch.Tensor, y_RO: torch.Tensor) -> torch.Tensor:
        return self.linear.output(x_RI, y_RO, self.slots)
