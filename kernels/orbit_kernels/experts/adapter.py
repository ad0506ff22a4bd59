"""This module puts adapters on the experts of a layer.

An expert's projection has the name that it has in the checkpoint, `model.layers.0.mlp.experts.3.gate_proj`, and its
adapter's tensors follow from it as for any linear (`orbit_kernels.adapters.config.tensor_name`). What all experts of a
layer share goes by the name without the number, `model.layers.0.mlp.experts.gate_proj`. peft reads the former where a
model holds its experts as separate linears; transformers 5 fuses them into one 3-D weight, which peft cannot adapt:
merge the adapter there.

The dimension suffixes are: T tokens, R rows of a chunk, D hidden, I input width of a projection, O output width.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch.utils.checkpoint import checkpoint

from orbit_kernels.experts.linear import ChunkLinear
from orbit_kernels.experts.routing import ExpertChunk


def expert_module(prefix: str, projection: str, expert: int | None) -> str:
    """Returns the name of an expert's projection, e.g. with prefix ``...mlp.experts``.

    With None it is the name of what all experts share.
    """
    return f"{prefix}.{projection}" if expert is None else f"{prefix}.{expert}.{projection}"


class RowAdapter(Protocol):
    """A ``RowAdapter`` is what an adapter does around one frozen linear, or fused ones that read the same input."""

    def inputs(self, x_RI: torch.Tensor) -> list[torch.Tensor]:
        """Returns what the frozen weight reads: one input for all projections, or one for each."""
        ...

    def output(self, x_RI: torch.Tensor, y_RO: torch.Tensor) -> torch.Tensor:
        """Returns the adapted output, from the linear's own input and from the frozen weight's output."""
        ...


class ExpertAdapter:
    """An ``ExpertAdapter`` says what happens around the frozen products of a layer's experts. This one adds nothing."""

    def before_dispatch(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Returns the experts' input for every token, before it is copied to its experts.

        The router never reads this.
        """
        return x_TD

    def linear(self, chunk: ExpertChunk, frozen: ChunkLinear, x_RI: torch.Tensor) -> torch.Tensor:
        """Returns the adapted output [R, O] of one projection, or of fused ones, of a chunk.

        A row's output must depend on its own expert's rows alone: results are equal for any chunk size.
        """
        return frozen(x_RI)


class PerExpert(ExpertAdapter):
    """``PerExpert`` puts adapters of single experts around the one product of a chunk.

    Args:
        adapters: by fused projections, ``GATE_UP`` or ``(DOWN,)``, one for each expert (the same again where experts share
            one); projections that are absent have none.
        common_input: what all experts share on the input of gate and up; applied to every token once, before dispatch.
    """

    def __init__(
        self,
        adapters: Mapping[tuple[str, ...], Sequence[RowAdapter]],
        common_input: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ):
        self._adapters, self._shared_input = dict(adapters), common_input

    def before_dispatch(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Does what ExpertAdapter says."""
        return x_TD if self._shared_input is None else self._shared_input(x_TD)

    def linear(self, chunk: ExpertChunk, frozen: ChunkLinear, x_RI: torch.Tensor) -> torch.Tensor:
        """Does what ExpertAdapter says."""
        if frozen.projections not in self._adapters:
            return frozen(x_RI)
        own = [self._adapters[frozen.projections][expert] for expert in chunk.experts]
        return adapted_product(own, chunk, frozen, x_RI)


def adapted_product(
    adapters: Sequence[RowAdapter], chunk: ExpertChunk, frozen: ChunkLinear, x_RI: torch.Tensor
) -> torch.Tensor:
    """Returns the product of a chunk with an adapter on each of its experts, [R, O]."""
    rows = x_RI.split(chunk.counts)
    inputs = [_recomputed(adapter.inputs, x) for adapter, x in zip(adapters, rows, strict=True)]
    columns = [torch.cat(column) for column in zip(*inputs, strict=True)]
    if len(columns) == 1:
        y_RO = frozen(columns[0])
    else:
        pairs = zip(columns, frozen.projections, strict=True)
        y_RO = torch.cat([frozen(column, projection) for column, projection in pairs], dim=-1)
    outputs = y_RO.split(chunk.counts)
    return torch.cat([adapter.output(x, y) for adapter, x, y in zip(adapters, rows, outputs, strict=True)])


def _recomputed(inputs: Callable[[torch.Tensor], list[torch.Tensor]], x_RI: torch.Tensor) -> list[torch.Tensor]:
    """Returns ``inputs(x)``, and computes it again in backward.

    What an expert's rotation is made of would take a hundred times its own size.
    """
    if not torch.is_grad_enabled():
        return inputs(x_RI)
    recomputed = checkpoint(inputs, x_RI, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(recomputed, list)
    return recomputed
