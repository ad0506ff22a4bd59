"""MXFP4 under the names of compressed-tensors and of DeepSeek-V4's experts.

| | packed codes | scales |
|---|---|---|
| compressed-tensors | ``weight_packed`` uint8 [O, I / 2] | ``weight_scale`` uint8 [O, I / 32] |
| deepseek | ``weight`` int8 [O, I / 2] | ``scale`` float8_e8m0fnu [O, I / 32] |

Both hold the same bits; they are kept as uint8.
"""

import dataclasses
from typing import Any, ClassVar

import torch

from orbit_kernels.formats.common.weight_format import Tensors, TensorSpec, WeightFormat, check_range
from orbit_kernels.formats.mxfp4 import reference
from orbit_kernels.formats.mxfp4.reference import BIAS, GROUP, NAN_BYTE

_STYLES = {"compressed-tensors": ("weight_packed", "weight_scale"), "deepseek": ("weight", "scale")}
# No trained weight has a group beyond 2^16, nor all of them below 2^-64: such exponents mean another bias.
_LARGEST_PLAUSIBLE, _SMALLEST_PLAUSIBLE = 16, -64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mxfp4Format(WeightFormat):
    """E2M1 in groups of 32 columns; weight-only, the input is not quantised.

    Args:
        style: whose names the file has, ``compressed-tensors`` or ``deepseek``.

    Raises:
        ValueError: an unknown style.
    """

    style: str = "compressed-tensors"

    name: ClassVar[str] = "mxfp4"
    scratch_bytes_per_weight: ClassVar[int] = 7

    def __post_init__(self):
        if self.style not in _STYLES:
            raise ValueError(f"MXFP4 style {self.style!r}: not one of {', '.join(_STYLES)}")

    @property
    def value_leaves(self) -> tuple[str, ...]:
        """See WeightFormat."""
        return (self._scale,)

    @property
    def _packed(self) -> str:
        return _STYLES[self.style][0]

    @property
    def _scale(self) -> str:
        return _STYLES[self.style][1]

    def describe(self) -> dict[str, Any]:
        """See WeightFormat."""
        return {
            "format": self.name,
            "style": self.style,
            "group_size": GROUP,
            "scale_dtype": "ue8m0",
            "scale_bias": BIAS,
        }

    def specs(self, rows: int, columns: int) -> dict[str, TensorSpec]:
        """See WeightFormat."""
        if columns % GROUP:
            raise ValueError(f"MXFP4 weight [{rows}, {columns}]: {columns} columns are no multiple of {GROUP}")
        return {
            self._packed: TensorSpec((rows, columns // 2), torch.uint8, also=(torch.int8,)),
            self._scale: TensorSpec((rows, columns // GROUP), torch.uint8, also=(torch.float8_e8m0fnu,)),
        }

    def problems(self, tensors: Tensors) -> list[str]:
        """Scales that are NaN, and exponents that only another bias than 127 can explain."""
        scale = tensors.get(self._scale)
        if scale is None:
            return []
        num_nan = int((scale.view(torch.uint8) == NAN_BYTE).sum())
        if num_nan:
            return [f"{self._scale}: {num_nan} of {scale.numel()} scales are NaN (byte {NAN_BYTE})"]
        largest = int(reference.exponent(scale).max())
        if _SMALLEST_PLAUSIBLE <= largest <= _LARGEST_PLAUSIBLE:
            return []
        return [
            f"{self._scale}: the largest scale is 2^{largest} with the bias {BIAS} of UE8M0, which no weight has; "
            "the file was written with another bias"
        ]

    def dequantize(self, tensors: Tensors, dtype: torch.dtype, rows: slice = slice(None)) -> torch.Tensor:
        """See WeightFormat."""
        return reference.dequantize(tensors[self._packed], tensors[self._scale], rows, dtype)

    def quantize(self, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
        """See WeightFormat; rounds as compressed-tensors does."""
        self.specs(*weight_OI.shape)
        packed, scale = reference.quantize(weight_OI)
        return {self._packed: packed, self._scale: scale}

    def shard_rows(self, tensors: Tensors, start: int, stop: int) -> dict[str, torch.Tensor]:
        """See WeightFormat; any boundary will do."""
        check_range("rows", start, stop, tensors[self._scale].shape[0])
        return {leaf: tensor[start:stop] for leaf, tensor in tensors.items()}

    def shard_columns(self, tensors: Tensors, start: int, stop: int) -> dict[str, torch.Tensor]:
        """See WeightFormat."""
        check_range("columns", start, stop, tensors[self._scale].shape[1] * GROUP, GROUP)
        return {
            self._packed: tensors[self._packed][:, start // 2 : stop // 2],
            self._scale: tensors[self._scale][:, start // GROUP : stop // GROUP],
        }
