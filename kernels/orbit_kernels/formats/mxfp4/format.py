"""This module defines MXFP4 as compressed-tensors stores it.

Codes are in ``weight_packed`` uint8 [O, I / 2], scales in ``weight_scale`` uint8 [O, I / 32].
"""

import dataclasses
from typing import Any, ClassVar

import torch

from orbit_kernels.formats.common.weight_format import Tensors, TensorSpec, WeightFormat, check_range
from orbit_kernels.formats.mxfp4 import reference
from orbit_kernels.formats.mxfp4.reference import BIAS, GROUP, NAN_BYTE

_PACKED, _SCALE = "weight_packed", "weight_scale"
# No trained weight has a group beyond 2^16, nor all of them below 2^-64: such exponents mean another bias.
_LARGEST_PLAUSIBLE, _SMALLEST_PLAUSIBLE = 16, -64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mxfp4Format(WeightFormat):
    """``Mxfp4Format`` is E2M1 in groups of 32 columns; it is weight-only, so the input is not quantised."""

    name: ClassVar[str] = "mxfp4"
    scratch_bytes_per_weight: ClassVar[int] = 7
    value_leaves: ClassVar[tuple[str, ...]] = (_SCALE,)

    def describe(self) -> dict[str, Any]:
        """Does what WeightFormat says."""
        return {
            "format": self.name,
            "group_size": GROUP,
            "scale_dtype": "ue8m0",
            "scale_bias": BIAS,
        }

    def specs(self, rows: int, columns: int) -> dict[str, TensorSpec]:
        """Does what WeightFormat says."""
        if columns % GROUP:
            raise ValueError(f"MXFP4 weight [{rows}, {columns}]: {columns} columns are no multiple of {GROUP}")
        return {
            _PACKED: TensorSpec((rows, columns // 2), torch.uint8, also=(torch.int8,)),
            _SCALE: TensorSpec((rows, columns // GROUP), torch.uint8, also=(torch.float8_e8m0fnu,)),
        }

    def problems(self, tensors: Tensors) -> list[str]:
        """Returns scales that are NaN, and exponents that only another bias than 127 can explain, as problems."""
        scale = tensors.get(_SCALE)
        if scale is None:
            return []
        num_nan = int((scale.view(torch.uint8) == NAN_BYTE).sum())
        if num_nan:
            return [f"{_SCALE}: {num_nan} of {scale.numel()} scales are NaN (byte {NAN_BYTE})"]
        largest = int(reference.exponent(scale).max())
        if _SMALLEST_PLAUSIBLE <= largest <= _LARGEST_PLAUSIBLE:
            return []
        return [
            f"{_SCALE}: the largest scale is 2^{largest} with the bias {BIAS} of UE8M0, which no weight has; "
            "the file was written with another bias"
        ]

    def dequantize(self, tensors: Tensors, dtype: torch.dtype, rows: slice = slice(None)) -> torch.Tensor:
        """Does what WeightFormat says."""
        return reference.dequantize(tensors[_PACKED], tensors[_SCALE], rows, dtype)

    def quantize(self, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
        """Does what WeightFormat says; it rounds as compressed-tensors does."""
        self.specs(*weight_OI.shape)
        packed, scale = reference.quantize(weight_OI)
        return {_PACKED: packed, _SCALE: scale}

    def shard_rows(self, tensors: Tensors, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Does what WeightFormat says; any boundary will do."""
        check_range("rows", start, stop, tensors[_SCALE].shape[0])
        return {leaf: tensor[start:stop] for leaf, tensor in tensors.items()}

    def shard_columns(self, tensors: Tensors, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Does what WeightFormat says."""
        check_range("columns", start, stop, tensors[_SCALE].shape[1] * GROUP, GROUP)
        return {
            _PACKED: tensors[_PACKED][:, start // 2 : stop // 2],
            _SCALE: tensors[_SCALE][:, start // GROUP : stop // GROUP],
        }
