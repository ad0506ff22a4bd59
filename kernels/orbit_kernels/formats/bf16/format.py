"""This module defines BF16, which has one stored tensor, ``weight`` [O, I]."""

import dataclasses
from typing import Any, ClassVar

import torch

from orbit_kernels.formats.bf16 import reference
from orbit_kernels.formats.common.weight_format import Tensors, TensorSpec, WeightFormat, check_range

DTYPES = (torch.bfloat16, torch.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bf16Format(WeightFormat):
    """``Bf16Format`` stores weights as they are.

    Raises:
        ValueError: ``dtype`` is neither bfloat16 nor float32.
    """

    dtype: torch.dtype = torch.bfloat16

    name: ClassVar[str] = "bf16"
    scratch_bytes_per_weight: ClassVar[int] = 4
    value_leaves: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise ValueError(f"unquantised weights of dtype {self.dtype}: use one of {', '.join(map(str, DTYPES))}")

    def describe(self) -> dict[str, Any]:
        """Does what WeightFormat says."""
        return {"format": self.name, "dtype": str(self.dtype).removeprefix("torch.")}

    def specs(self, rows: int, columns: int) -> dict[str, TensorSpec]:
        """Does what WeightFormat says; every shape can be stored."""
        return {"weight": TensorSpec((rows, columns), self.dtype)}

    def problems(self, tensors: Tensors) -> list[str]:
        """Returns NaN and infinite weights as problems."""
        weight = tensors.get("weight")
        if weight is None or weight.isfinite().all():
            return []
        return [f"weight: {int((~weight.isfinite()).sum())} of {weight.numel()} values are NaN or infinite"]

    def dequantize(self, tensors: Tensors, dtype: torch.dtype, rows: slice = slice(None)) -> torch.Tensor:
        """Does what WeightFormat says; the result is a view when the dtypes are equal."""
        return reference.dequantize(tensors["weight"][rows], dtype)

    def quantize(self, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
        """Does what WeightFormat says."""
        return {"weight": reference.quantize(weight_OI, self.dtype)}

    def shard_rows(self, tensors: Tensors, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Does what WeightFormat says; any boundary will do."""
        check_range("rows", start, stop, tensors["weight"].shape[0])
        return {"weight": tensors["weight"][start:stop]}

    def shard_columns(self, tensors: Tensors, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Does what WeightFormat says; any boundary will do."""
        check_range("columns", start, stop, tensors["weight"].shape[1])
        return {"weight": tensors["weight"][:, start:stop]}
