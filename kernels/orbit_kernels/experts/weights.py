"""This module has the stored weights of a layer's experts, and the memory that holds a chunk of them dequantised.

The dimension suffixes are: E experts, O output width (rows), I input width (columns).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch

from orbit_kernels.formats.common.weight_format import WeightFormat
from orbit_kernels.frozen.product import StoredWeight
from orbit_kernels.linears.fusing import GATE_UP

GATE, UP = GATE_UP
DOWN = "down_proj"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StackedWeights(Sequence[StoredWeight]):
    """``StackedWeights`` are one projection of all experts, its stored tensors stacked by expert.

    Attributes:
        format: of every expert.
        rows: output width.
        columns: input width.
        tensors: [E, ...] by leaf name; each expert's are views of them.
    """

    format: WeightFormat
    rows: int
    columns: int
    tensors: Mapping[str, torch.Tensor]

    def __len__(self) -> int:
        return next(iter(self.tensors.values())).shape[0]

    def __getitem__(self, expert: int) -> StoredWeight:
        tensors = {leaf: tensor[expert] for leaf, tensor in self.tensors.items()}
        return StoredWeight(format=self.format, rows=self.rows, columns=self.columns, tensors=tensors)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FrozenExperts:
    """``FrozenExperts`` are the projections of a layer's experts, each a sequence over the experts.

    Items are asked for when an expert has tokens and not before, so that a sequence may make them on demand.

    Attributes:
        gate_proj, up_proj: weights [ffn, hidden], of one format.
        down_proj: weights [hidden, ffn].

    Raises:
        ValueError: the projections are of different numbers of experts.
    """

    gate_proj: Sequence[StoredWeight]
    up_proj: Sequence[StoredWeight]
    down_proj: Sequence[StoredWeight]

    def __post_init__(self):
        lengths = {GATE: len(self.gate_proj), UP: len(self.up_proj), DOWN: len(self.down_proj)}
        if len(set(lengths.values())) != 1 or not len(self):
            raise ValueError(f"experts of a layer: {lengths}; every projection must have the same experts")

    def __len__(self) -> int:
        return len(self.gate_proj)

    def stored(self, expert: int, projections: Sequence[str]) -> tuple[StoredWeight, ...]:
        """Returns the named projections of one expert."""
        return tuple(getattr(self, projection)[expert] for projection in projections)


class ChunkBuffer:
    """A ``ChunkBuffer`` is memory for the dequantised projections of a chunk of experts.

    It is kept and used again for every chunk of every layer. Dequantised weights are valid until the next
    ``dequantize``; only one thread may use it at a time. It grows to the largest chunk that it has held and never
    beyond ``num_experts`` of the largest projection.

    Args:
        num_experts: experts of one chunk.

    Raises:
        ValueError: no experts.
    """

    def __init__(self, num_experts: int):
        if num_experts < 1:
            raise ValueError(f"{num_experts} experts in a chunk: at least 1 is needed")
        self.num_experts = num_experts
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """Returns the bytes that it holds now."""
        return self._memory.nbytes

    def dequantize(
        self, weights: Sequence[Sequence[StoredWeight]], dtype: torch.dtype
    ) -> list[tuple[torch.Tensor, ...]]:
        """Returns the matrices of each expert whose outputs, side by side, are those of its parts.

        A quantised expert is one matrix [O, I] with its parts stacked by rows, and the matrices of a chunk stand one after
        another in memory. Unquantised parts of ``dtype`` are left where they are, a matrix each.

        Args:
            weights: parts of each expert, of one format.
            dtype: of the matrices.
        """
        if all(part.is_plain(dtype) for parts in weights for part in parts):
            return [tuple(part.dequantize(dtype) for part in parts) for parts in weights]
        first = weights[0]
        rows, columns = sum(part.rows for part in first), first[0].columns
        device = next(iter(first[0].tensors.values())).device
        chunk_EOI = self._take((len(weights), rows, columns), dtype, device)
        for matrix_OI, parts in zip(chunk_EOI, weights, strict=True):
            for rows_OI, part in zip(matrix_OI.split([part.rows for part in parts]), parts, strict=True):
                part.dequantize_into(rows_OI)
        return [(matrix_OI,) for matrix_OI in chunk_EOI]

    def _take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._memory.nbytes < num_bytes or self._memory.device != device:
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self._memory[:num_bytes].view(dtype).view(shape)
