"""This module multiplies an input with frozen weights that stay as they are stored; the input alone has a gradient.

The dimension suffixes are: T tokens, I input width, O output width (rows of all parts), R rows of one chunk.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.nn import functional

from orbit_kernels.contract.options import Activations
from orbit_kernels.formats.bf16 import Bf16Format
from orbit_kernels.formats.common.weight_format import WeightFormat

# Dequantising in pieces that fit the CPU's cache is faster, and bounds the scratch.
_PIECE_WEIGHTS = 2**17
_TOKENS_AT_ONCE = 16


@dataclasses.dataclass(frozen=True, eq=False)
class StoredWeight:
    """A ``StoredWeight`` is the weight [rows, columns] of one linear as its checkpoint stores it.

    Raises:
        ValueError: a stored tensor is missing, superfluous, or of another shape or dtype than the format says.
    """

    format: WeightFormat
    rows: int
    columns: int
    tensors: Mapping[str, torch.Tensor]

    def __post_init__(self):
        specs = self.format.specs(self.rows, self.columns)
        if specs.keys() != self.tensors.keys():
            raise ValueError(f"{self.format.name} weight: has {sorted(self.tensors)}, needs {sorted(specs)}")
        for leaf, spec in specs.items():
            tensor = self.tensors[leaf]
            if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
                raise ValueError(
                    f"{leaf} of {self.format.name} weight [{self.rows}, {self.columns}]: "
                    f"{tensor.dtype} {tuple(tensor.shape)}, must be {spec.dtype} {spec.shape}"
                )

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the stored tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def dequantize(self, dtype: torch.dtype, rows: slice = slice(None)) -> torch.Tensor:
        """Returns the weight [rows, columns] in ``dtype``; it may be a view, do not write to it."""
        return self.format.dequantize(self.tensors, dtype, rows)

    def dequantize_into(self, out_RI: torch.Tensor, first: int = 0, *, most_weights: int = _PIECE_WEIGHTS) -> None:
        """Writes as many rows as ``out`` has, from row ``first`` on, in its dtype.

        Args:
            out_RI: the memory to write to.
            first: row of the weight that becomes the first one there.
            most_weights: weights that are dequantised at a time, but at least one row.
        """
        step = max(1, most_weights // self.columns)
        for start in range(0, len(out_RI), step):
            stop = min(start + step, len(out_RI))
            out_RI[start:stop] = self.dequantize(out_RI.dtype, slice(first + start, first + stop))

    def is_plain(self, dtype: torch.dtype) -> bool:
        """Returns whether the weight is stored unquantised in ``dtype``, so that it can be read in place."""
        return isinstance(self.format, Bf16Format) and self.format.dtype == dtype


def frozen_matmul(
    x_TI: torch.Tensor,
    parts: Sequence[StoredWeight],
    *,
    chunk_bytes: int,
    activations: Activations = "deployed",
) -> torch.Tensor:
    """Returns ``x W^T`` with the parts' weights stacked by rows, in the dtype and on the device of ``x``.

    Weights are dequantised to the dtype of ``x`` in chunks of rows, in forward and again in backward, with one GEMM a
    chunk. Backward forms the gradient of ``x`` and nothing else: one GEMM of forward's size, from no saved activation.
    A quantised input counts as the identity there (straight-through). Trainer and server agree to the bit when both call
    this with the same parts, order and ``chunk_bytes``. Unquantised weights of the dtype of ``x`` are read in place.

    Args:
        x_TI: input; flatten further dimensions, because torch picks its GEMM by shape and strides.
        parts: one or more weights with the same number of columns and the same format.
        chunk_bytes: most temporary memory for weights, beside the output and the gradient.
        activations: ``deployed`` quantises the input as the format's deployed kernel does, ``none`` does not.

    Raises:
        ValueError: parts that do not belong together, or a budget below one row.
    """
    _check(x_TI, parts)
    stack = _Stack(tuple(parts), x_TI.dtype, chunk_bytes)
    return _FrozenMatmul.apply(x_TI, stack, activations)


class _FrozenMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TI, stack, activations):
        ctx.stack = stack
        if activations == "deployed":
            x_TI = stack.parts[0].format.model_input(x_TI, [part.tensors for part in stack.parts])
        if stack.is_one_chunk:
            return functional.linear(x_TI, next(stack.chunks())[1])
        y_TO = x_TI.new_empty(x_TI.shape[0], stack.num_rows)
        for rows, weight_RI in stack.chunks():
            y_TO[:, rows] = functional.linear(x_TI, weight_RI)
        return y_TO

    @staticmethod
    def backward(ctx, grad_TO):
        stack = ctx.stack
        if stack.is_one_chunk:
            return grad_TO @ next(stack.chunks())[1], None, None
        # Summed in fp32: rounding after every chunk would make the gradient depend on the budget.
        grad_TI = grad_TO.new_zeros(grad_TO.shape[0], stack.columns, dtype=torch.float32)
        for rows, weight_RI in stack.chunks():
            _add(grad_TI, grad_TO[:, rows] @ weight_RI)
        return grad_TI.to(grad_TO.dtype), None, None


def _add(total_TI: torch.Tensor, summand_TI: torch.Tensor) -> None:
    """Computes ``total += summand`` a few tokens at a time: torch would widen the whole summand first."""
    for total, summand in zip(total_TI.split(_TOKENS_AT_ONCE), summand_TI.split(_TOKENS_AT_ONCE), strict=True):
        total += summand


def _check(x_TI: torch.Tensor, parts: Sequence[StoredWeight]) -> None:
    if not parts:
        raise ValueError("frozen_matmul: no parts")
    if x_TI.dim() != 2 or any(part.columns != x_TI.shape[1] for part in parts):
        widths = [part.columns for part in parts]
        raise ValueError(f"frozen_matmul: input {tuple(x_TI.shape)} for weights with {widths} columns")
    formats = {part.format for part in parts}
    if len(formats) > 1:
        raise ValueError(
            f"frozen_matmul: fused parts of different formats {[part.format.describe() for part in parts]}; "
            "quantise all parts of a fused linear alike"
        )


class _Stack:
    """A ``_Stack`` is the parts' weights stacked by rows, dequantised chunk by chunk within a budget."""

    def __init__(self, parts: tuple[StoredWeight, ...], dtype: torch.dtype, chunk_bytes: int):
        self.parts = parts
        self.columns = parts[0].columns
        self.num_rows = sum(part.rows for part in parts)
        self._dtype = dtype
        self._in_place = len(parts) == 1 and parts[0].is_plain(dtype)
        scratch = parts[0].format.scratch_bytes_per_weight
        # A piece takes no more than a quarter of a small budget, but at least one row.
        self._piece_weights = max(self.columns, min(_PIECE_WEIGHTS, chunk_bytes // (4 * scratch)))
        self._rows_per_chunk = self.num_rows if self._in_place else self._fit(chunk_bytes, scratch)

    @property
    def is_one_chunk(self) -> bool:
        """Returns whether one GEMM does."""
        return self._rows_per_chunk >= self.num_rows

    def chunks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yields the rows of each chunk and their weights, which are overwritten when the next chunk is taken."""
        if self._in_place:
            yield slice(0, self.num_rows), self.parts[0].dequantize(self._dtype)
            return
        device = next(iter(self.parts[0].tensors.values())).device
        buffer_RI = torch.empty(self._rows_per_chunk, self.columns, dtype=self._dtype, device=device)
        for start in range(0, self.num_rows, self._rows_per_chunk):
            stop = min(start + self._rows_per_chunk, self.num_rows)
            self._dequantize_into(buffer_RI[: stop - start], start)
            yield slice(start, stop), buffer_RI[: stop - start]

    def _dequantize_into(self, chunk_RI: torch.Tensor, start: int) -> None:
        """Fills a chunk with the rows of the stack from ``start`` on."""
        stop, offset = start + len(chunk_RI), 0
        for part in self.parts:
            first, last = max(start, offset), min(stop, offset + part.rows)
            if first < last:
                rows_RI = chunk_RI[first - start : last - start]
                part.dequantize_into(rows_RI, first - offset, most_weights=self._piece_weights)
            offset += part.rows

    def _fit(self, chunk_bytes: int, scratch: int) -> int:
        """Returns the rows of equal chunks whose weights, and the scratch for a piece of them, fit into the budget."""
        piece_bytes = self._piece_weights * scratch
        row_bytes = self.columns * self._dtype.itemsize
        most = (chunk_bytes - piece_bytes) // row_bytes
        if most < 1:
            raise ValueError(
                f"frozen_matmul: {chunk_bytes} bytes for dequantised weights, but one row of {self.columns} columns "
                f"needs {piece_bytes + row_bytes}; raise the chunk budget"
            )
        num_chunks = -(-self.num_rows // most)
        return -(-self.num_rows // num_chunks)
