"""This module defines NVFP4 under the names of ModelOpt and of compressed-tensors.

| | packed codes | E4M3 scales | fp32 global scale | fp32 global scale of the input |
|---|---|---|---|---|
| modelopt | ``weight`` | ``weight_scale`` | ``weight_scale_2`` [], multiplies | ``input_scale`` [], multiplies |
| compressed-tensors | ``weight_packed`` | ``weight_scale`` | ``weight_global_scale`` [1], divides | ``input_global_scale`` [1], divides |
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from orbit_kernels.formats.common import e2m1
from orbit_kernels.formats.common.weight_format import Tensors, TensorSpec, WeightFormat, check_range, scale_problems
from orbit_kernels.formats.nvfp4 import reference
from orbit_kernels.formats.nvfp4.reference import FP8_MAX, GROUP


@dataclasses.dataclass(frozen=True)
class _Names:
    packed: str
    global_scale: str
    input_scale: str
    scalar_shape: tuple[int, ...]
    divides: bool


_STYLES = {
    "modelopt": _Names("weight", "weight_scale_2", "input_scale", (), False),
    "compressed-tensors": _Names("weight_packed", "weight_global_scale", "input_global_scale", (1,), True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nvfp4Format(WeightFormat):
    """``Nvfp4Format`` is E2M1 in groups of 16 columns.

    Args:
        style: whose names and conventions the file follows, ``modelopt`` or ``compressed-tensors``.
        quantized_input: the deployed kernel quantises its input as well (W4A4), with a static global scale.

    Raises:
        ValueError: an unknown style.
    """

    style: str = "compressed-tensors"
    quantized_input: bool = True

    name: ClassVar[str] = "nvfp4"
    scratch_bytes_per_weight: ClassVar[int] = 7

    def __post_init__(self):
        if self.style not in _STYLES:
            raise ValueError(f"NVFP4 style {self.style!r}: not one of {', '.join(_STYLES)}")

    @property
    def value_leaves(self) -> tuple[str, ...]:
        """Returns what WeightFormat says."""
        inputs = (self._names.input_scale,) if self.quantized_input else ()
        return ("weight_scale", self._names.global_scale, *inputs)

    @property
    def global_scale_leaf(self) -> str:
        """Returns the name of the stored global scale of the weight."""
        return self._names.global_scale

    @property
    def _names(self) -> _Names:
        return _STYLES[self.style]

    def describe(self) -> dict[str, Any]:
        """Does what WeightFormat says."""
        return {
            "format": self.name,
            "style": self.style,
            "group_size": GROUP,
            "scale_dtype": "float8_e4m3fn",
            "global_scale_dtype": "float32",
            "quantized_input": self.quantized_input,
        }

    def specs(self, rows: int, columns: int) -> dict[str, TensorSpec]:
        """Does what WeightFormat says."""
        if columns % GROUP:
            raise ValueError(f"NVFP4 weight [{rows}, {columns}]: {columns} columns are no multiple of {GROUP}")
        scalar = TensorSpec(self._names.scalar_shape, torch.float32)
        specs = {
            self._names.packed: TensorSpec((rows, columns // 2), torch.uint8),
            "weight_scale": TensorSpec((rows, columns // GROUP), torch.float8_e4m3fn),
            self._names.global_scale: scalar,
        }
        return specs | ({self._names.input_scale: scalar} if self.quantized_input else {})

    def problems(self, tensors: Tensors) -> list[str]:
        """Returns impossible scales as problems.

        The scale of a group may be zero, which is how tiny groups are stored.
        """
        return [
            problem
            for leaf in self.value_leaves
            if leaf in tensors
            for problem in scale_problems(leaf, tensors[leaf].reshape(-1), zero_allowed=leaf == "weight_scale")
        ]

    def dequantize(self, tensors: Tensors, dtype: torch.dtype, rows: slice = slice(None)) -> torch.Tensor:
        """Does what WeightFormat says; the scales are multiplied with, or divided by, the global scale first."""
        dequantize = reference.dequantize_divided if self._names.divides else reference.dequantize
        global_scale = tensors[self._names.global_scale].reshape(())
        return dequantize(tensors[self._names.packed], tensors["weight_scale"], global_scale, rows, dtype)

    def quantize(
        self,
        weight_OI: torch.Tensor,
        *,
        largest_weight: float | None = None,
        largest_input: float | None = None,
    ) -> dict[str, torch.Tensor]:
        """Does what WeightFormat says.

        Args:
            weight_OI: the weight.
            largest_weight: magnitude that the global scale makes representable; by default the weight's own. Linears that are
                fused into one GEMM must be given the same, because deployed kernels take one global scale for all.
            largest_input: the same for the input; needed when ``quantized_input`` is set.

        Raises:
            ValueError: the shape cannot be stored, or ``largest_input`` is missing.
        """
        self.specs(*weight_OI.shape)
        if largest_weight is None:
            largest_weight = weight_OI.abs().max().item()
        global_scale = self._stored_scale(largest_weight)
        packed, scale = reference.quantize(weight_OI, self._factor(global_scale))
        tensors = {self._names.packed: packed, "weight_scale": scale}
        tensors[self._names.global_scale] = global_scale.reshape(self._names.scalar_shape)
        if self.quantized_input:
            if largest_input is None:
                raise ValueError("NVFP4 with quantised input: largest_input is missing, calibrate or use W4A16")
            tensors[self._names.input_scale] = self._stored_scale(largest_input).reshape(self._names.scalar_shape)
        return tensors

    def shard_rows(self, tensors: Tensors, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Does what WeightFormat says; any boundary will do, and the global scales are every shard's."""
        check_range("rows", start, stop, tensors["weight_scale"].shape[0])
        split = {leaf: tensors[leaf][start:stop] for leaf in (self._names.packed, "weight_scale")}
        return dict(tensors) | split

    def shard_columns(self, tensors: Tensors, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Does what WeightFormat says; the global scales are every shard's."""
        check_range("columns", start, stop, tensors["weight_scale"].shape[1] * GROUP, GROUP)
        return dict(tensors) | {
            self._names.packed: tensors[self._names.packed][:, start // 2 : stop // 2],
            "weight_scale": tensors["weight_scale"][:, start // GROUP : stop // GROUP],
        }

    def model_input(self, x_TI: torch.Tensor, parts: Sequence[Tensors]) -> torch.Tensor:
        """Does what WeightFormat says: E2M1 has dynamic E4M3 scales and the largest of the parts' stored global scales.

        SGLang 0.5.12 takes the same (modelopt_quant.py::ModelOptFp4LinearMethod.process_weights_after_loading,
        compressed_tensors_w4a4_nvfp4.py::CompressedTensorsW4A4Fp4.process_weights_after_loading).
        """
        if not self.quantized_input:
            return x_TI
        stored = torch.stack([tensors[self._names.input_scale].reshape(()) for tensors in parts]).max()
        return reference.quantized_input(x_TI, self._factor(stored))

    def _factor(self, stored: torch.Tensor) -> torch.Tensor:
        return 1 / stored if self._names.divides else stored

    def _stored_scale(self, largest: float) -> torch.Tensor:
        factor = max(largest, torch.finfo(torch.float32).tiny) / (FP8_MAX * e2m1.MAX)
        return torch.tensor(1 / factor if self._names.divides else factor, dtype=torch.float32)
