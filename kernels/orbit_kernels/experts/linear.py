"""This module multiplies a chunk of frozen experts with their rows; the input alone has a gradient.

The dimension suffixes are: R rows of a chunk, grouped by expert, I input width, O output width.
"""

import functools
from collections.abc import Sequence

import torch
from torch.nn import functional

from orbit_kernels.contract.options import Activations
from orbit_kernels.experts.routing import ExpertChunk
from orbit_kernels.experts.weights import ChunkBuffer, FrozenExperts
from orbit_kernels.frozen.product import StoredWeight


class ChunkLinear:
    """A ``ChunkLinear`` is one projection, or two fused ones, of a chunk's experts.

    Args:
        chunk: the experts and their rows.
        experts: stored weights.
        projections: names of the fused projections, in the order of their outputs.
        buffer: where weights are dequantised, in forward and again in backward.
        activations: see ``orbit_kernels.frozen.product``.
    """

    def __init__(
        self,
        chunk: ExpertChunk,
        experts: FrozenExperts,
        projections: Sequence[str],
        buffer: ChunkBuffer,
        activations: Activations,
    ):
        self.projections = tuple(projections)
        self._chunk, self._buffer, self._activations = chunk, buffer, activations
        self._parts = [experts.stored(expert, projections) for expert in chunk.experts]

    def __call__(self, x_RI: torch.Tensor, projection: str | None = None) -> torch.Tensor:
        """Returns ``x W^T`` [R, O] of all projections side by side, or of the named one alone."""
        multiplied = self._parts
        if projection is not None:
            index = self.projections.index(projection)
            multiplied = [(parts[index],) for parts in self._parts]
        fused = self._parts if self._activations == "deployed" else None
        return _ChunkProduct.apply(x_RI, multiplied, fused, self._chunk.counts, self._buffer)


class _ChunkProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RI, multiplied, fused, counts: Sequence[int], buffer: ChunkBuffer):
        ctx.multiplied, ctx.counts, ctx.buffer = multiplied, counts, buffer
        if fused is not None:
            x_RI = _model_input(x_RI, fused, counts)
        return grouped_linear(x_RI, buffer.dequantize(multiplied, x_RI.dtype), counts)

    @staticmethod
    def backward(ctx, grad_RO):
        matrices = ctx.buffer.dequantize(ctx.multiplied, grad_RO.dtype)
        return grouped_linear_backward(grad_RO, matrices, ctx.counts), None, None, None, None


def grouped_linear(
    x_RI: torch.Tensor, matrices: Sequence[Sequence[torch.Tensor]], counts: Sequence[int]
) -> torch.Tensor:
    """Computes the grouped GEMM: ``x W^T`` [R, O] of each expert's rows with its own matrices, outputs side by side.

    This is the reference. A row's result depends on its own expert's rows alone, never on the rest of the chunk.

    Args:
        x_RI: rows grouped by expert.
        matrices: of each expert, as ``ChunkBuffer.dequantize`` returns them.
        counts: rows of each expert.
    """
    width = sum(matrix_OI.shape[0] for matrix_OI in matrices[0])
    y_RO = x_RI.new_empty(x_RI.shape[0], width)
    for x_of_expert, y_of_expert, own in zip(x_RI.split(counts), y_RO.split(counts), matrices, strict=True):
        outputs = y_of_expert.split([matrix_OI.shape[0] for matrix_OI in own], dim=1)
        for output, matrix_OI in zip(outputs, own, strict=True):
            output.copy_(functional.linear(x_of_expert, matrix_OI))
    return y_RO


def grouped_linear_backward(
    grad_RO: torch.Tensor, matrices: Sequence[Sequence[torch.Tensor]], counts: Sequence[int]
) -> torch.Tensor:
    """Returns the gradient [R, I] of ``grouped_linear``'s input; several matrices of an expert are summed in fp32."""
    grad_RI = grad_RO.new_empty(grad_RO.shape[0], matrices[0][0].shape[1])
    for grad_of_expert, out, own in zip(grad_RO.split(counts), grad_RI.split(counts), matrices, strict=True):
        grads = grad_of_expert.split([matrix_OI.shape[0] for matrix_OI in own], dim=1)
        products = [grad @ matrix_OI for grad, matrix_OI in zip(grads, own, strict=True)]
        out.copy_(products[0] if len(products) == 1 else functools.reduce(torch.add, map(torch.Tensor.float, products)))
    return grad_RI


def _model_input(x_RI: torch.Tensor, fused: Sequence[Sequence[StoredWeight]], counts: Sequence[int]) -> torch.Tensor:
    """Returns what the deployed kernel feeds its GEMM; its rounding counts as the identity in backward."""
    inputs = [
        parts[0].format.model_input(x_of_expert, [part.tensors for part in parts])
        for x_of_expert, parts in zip(x_RI.split(counts), fused, strict=True)
    ]
    return torch.cat(inputs)
