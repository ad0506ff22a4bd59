"""This module defines what every weight format can do; one package beside this module implements each.

The dimension suffixes are: T tokens, O output width (rows of a weight), I input width (columns), E experts.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

Tensors = Mapping[str, torch.Tensor]
"""These are the stored tensors of one linear by their leaf name in a checkpoint.

Leaf names are, e.g., ``weight_packed`` and ``weight_scale``.
"""


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A ``TensorSpec`` gives the shape and dtype of a stored tensor.

    ``also`` lists dtypes that files hold as well and that convert to ``dtype`` without loss, bit for bit or value for
    value; a loader converts them.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    also: tuple[torch.dtype, ...] = ()

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the tensor in ``dtype``."""
        return math.prod(self.shape) * self.dtype.itemsize

    def accepts(self, dtype: torch.dtype) -> bool:
        """Returns whether a file may hold the tensor in this dtype."""
        return dtype == self.dtype or dtype in self.also


class WeightFormat(ABC):
    """A ``WeightFormat`` says how the weight [O, I] of one linear is stored, and what it means.

    Subclasses are frozen keyword-only dataclasses: equal and hashable by value. They hold no tensors, so one instance
    serves every linear that is stored alike. Tensors stay on the device that they are given on.
    """

    name: ClassVar[str]
    """The name is ``bf16``, ``fp8``, ``int4``, ``nvfp4`` or ``mxfp4``."""

    scratch_bytes_per_weight: ClassVar[int]
    """``dequantize`` allocates at most these temporary bytes for each weight that it returns, the result included."""

    value_leaves: ClassVar[tuple[str, ...]]
    """These are small stored tensors whose values ``problems`` can judge without the weight itself."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Returns the format as JSON values; equal descriptions mean equal formats."""

    @abstractmethod
    def specs(self, rows: int, columns: int) -> dict[str, TensorSpec]:
        """Returns the stored tensors of a weight [rows, columns] by leaf name.

        Raises:
            ValueError: a weight of this shape cannot be stored in the format.
        """

    def problems(self, tensors: Tensors) -> list[str]:
        """Returns values that no weight can have, each with its leaf name and what was found.

        The list is empty when there are none.

        Args:
            tensors: any of the stored tensors; those absent are not judged.
        """
        return []

    @abstractmethod
    def dequantize(self, tensors: Tensors, dtype: torch.dtype, rows: slice = slice(None)) -> torch.Tensor:
        """Returns the weight [rows, I], by fp32 arithmetic and then one rounding to ``dtype``.

        It may be a view; do not write to it.
        """

    @abstractmethod
    def quantize(self, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
        """Stores a weight of any floating dtype.

        It is rounded to nearest, and scales come from the largest magnitude of each group.

        Raises:
            ValueError: a weight of this shape cannot be stored in the format.
        """

    @abstractmethod
    def shard_rows(self, tensors: Tensors, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Returns the stored tensors of the rows [start, stop) of the weight, as views where possible.

        Raises:
            ValueError: the rows are out of range, or a boundary cuts a block of weights that are stored together.
        """

    @abstractmethod
    def shard_columns(self, tensors: Tensors, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Returns the stored tensors of the columns [start, stop) of the weight, as views where possible.

        Raises:
            ValueError: the columns are out of range, or a boundary cuts a block of weights that are stored together.
        """

    def model_input(self, x_TI: torch.Tensor, parts: Sequence[Tensors]) -> torch.Tensor:
        """Returns what the deployed kernel feeds its GEMM in place of ``x``, in the dtype of ``x``.

        That is ``x`` where it quantises none.

        Args:
            x_TI: input of a linear.
            parts: stored tensors of the linears that are fused into one GEMM.
        """
        return x_TI


def as_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the same bits where both dtypes have one byte, and else the same values.

    Files declare codes of one byte in several ways.
    """
    same_size = tensor.dtype.itemsize == dtype.itemsize == 1
    return tensor.view(dtype) if same_size else tensor.to(dtype)


def check_range(what: str, start: int, stop: int, size: int, block: int = 1) -> None:
    """Holds the bounds of a shard against the weight and against blocks that are stored together.

    Raises:
        ValueError: the range is empty or outside, or a bound inside the weight is not a multiple of ``block``.
    """
    if not 0 <= start < stop <= size:
        raise ValueError(f"{what} {start} to {stop}: not a range inside the {size} {what} of the weight")
    cuts = [bound for bound in (start, stop) if bound % block and bound != size]
    if cuts:
        raise ValueError(
            f"{what} {start} to {stop}: {cuts[0]} cuts a block of {block} {what} that share a scale or a word; "
            f"shard at multiples of {block}"
        )


def scale_problems(leaf: str, scale: torch.Tensor, *, zero_allowed: bool = False) -> list[str]:
    """Returns what is wrong with positive scales: NaN, infinity, negative, and zero unless allowed."""
    values = scale.float()
    found = {
        "NaN": values.isnan(),
        "infinite": values.isinf(),
        "negative": values < 0,
        "zero": torch.zeros_like(values, dtype=torch.bool) if zero_allowed else values == 0,
    }
    return [
        f"{leaf}: {int(mask.sum())} of {mask.numel()} scales are {what}, the first at {mask.nonzero()[0].tolist()}"
        for what, mask in found.items()
        if mask.any()
    ]
