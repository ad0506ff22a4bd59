"""This module defines FP8 blocks: ``weight`` is E4M3 [O, I], ``weight_scale_inv`` fp32 [ceil(O / 128), ceil(I / 128)].

In spite of its name ``weight_scale_inv`` multiplies (DeepSeek-V3, Qwen3-FP8). Qwen3-FP8's files hold it in BF16, whose
values fp32 keeps.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from orbit_kernels.formats.common.weight_format import Tensors, TensorSpec, WeightFormat, check_range, scale_problems
from orbit_kernels.formats.fp8 import reference

SCALE_DTYPES = ("float32", "ue8m0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Format(WeightFormat):
    """``Fp8Format`` is E4M3 with a scale for each block of weights, and for each token and group of inputs.

    The group of inputs has ``block_columns``.

    Args:
        block_rows: rows of a block.
        block_columns: columns of a block; also the deployed kernel's group of inputs.
        scale_dtype: ``float32``, or ``ue8m0``: powers of two, stored as fp32 values (``scale_fmt`` of config.json).

    Raises:
        ValueError: a block that is not positive, or an unknown scale dtype.
    """

    block_rows: int = 128
    block_columns: int = 128
    scale_dtype: str = "float32"

    name: ClassVar[str] = "fp8"
    scratch_bytes_per_weight: ClassVar[int] = 9
    value_leaves: ClassVar[tuple[str, ...]] = ("weight_scale_inv",)

    def __post_init__(self):
        if min(self.block) <= 0:
            raise ValueError(f"FP8 block {self.block}: both sizes must be positive, e.g. 128 and 128")
        if self.scale_dtype not in SCALE_DTYPES:
            raise ValueError(f"FP8 scale dtype {self.scale_dtype!r}: not one of {', '.join(SCALE_DTYPES)}")

    @property
    def block(self) -> tuple[int, int]:
        """Returns the rows and columns of a block."""
        return self.block_rows, self.block_columns

    def describe(self) -> dict[str, Any]:
        """Does what WeightFormat says."""
        return {
            "format": self.name,
            "weight_dtype": "float8_e4m3fn",
            "block": list(self.block),
            "scale_dtype": self.scale_dtype,
        }

    def specs(self, rows: int, columns: int) -> dict[str, TensorSpec]:
        """Does what WeightFormat says; blocks at the edges may be short, so every shape can be stored."""
        grid = (-(-rows // self.block_rows), -(-columns // self.block_columns))
        ue8m0 = self.scale_dtype == "ue8m0"
        also = (torch.bfloat16, torch.float8_e8m0fnu) if ue8m0 else (torch.bfloat16,)
        return {
            "weight": TensorSpec((rows, columns), torch.float8_e4m3fn),
            "weight_scale_inv": TensorSpec(grid, torch.float32, also),
        }

    def problems(self, tensors: Tensors) -> list[str]:
        """Returns impossible scales, UE8M0 scales that are no power of two, and NaN codes as problems."""
        found = []
        scale = tensors.get("weight_scale_inv")
        if scale is not None:
            found += scale_problems("weight_scale_inv", scale)
            if not found and self.scale_dtype == "ue8m0" and (torch.frexp(scale.float()).mantissa != 0.5).any():
                found.append("weight_scale_inv: not all powers of two, although scale_fmt is ue8m0")
        weight = tensors.get("weight")
        if weight is not None:
            num_nan = int(((weight.view(torch.uint8) & 0x7F) == 0x7F).sum())
            found += [f"weight: {num_nan} of {weight.numel()} values are NaN"] if num_nan else []
        return found

    def dequantize(self, tensors: Tensors, dtype: torch.dtype, rows: slice = slice(None)) -> torch.Tensor:
        """Does what WeightFormat says."""
        return reference.dequantize(tensors["weight"], tensors["weight_scale_inv"], self.block, rows, dtype)

    def quantize(self, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
        """Does what WeightFormat says."""
        weight, scale = reference.quantize(weight_OI, self.block, power_of_two=self.scale_dtype == "ue8m0")
        return {"weight": weight, "weight_scale_inv": scale}

    def shard_rows(self, tensors: Tensors, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Does what WeightFormat says."""
        check_range("rows", start, stop, tensors["weight"].shape[0], self.block_rows)
        grid = slice(start // self.block_rows, -(-stop // self.block_rows))
        return {"weight": tensors["weight"][start:stop], "weight_scale_inv": tensors["weight_scale_inv"][grid]}

    def shard_columns(self, tensors: Tensors, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Does what WeightFormat says."""
        check_range("columns", start, stop, tensors["weight"].shape[1], self.block_columns)
        grid = slice(start // self.block_columns, -(-stop // self.block_columns))
        return {
            "weight": tensors["weight"][:, start:stop],
            "weight_scale_inv": tensors["weight_scale_inv"][:, grid],
        }

    def model_input(self, x_TI: torch.Tensor, parts: Sequence[Tensors]) -> torch.Tensor:
        """Does what WeightFormat says, with E4M3 and a dynamic scale for each token and group of ``block_columns``."""
        return reference.quantized_input(x_TI, self.block_columns, power_of_two=self.scale_dtype == "ue8m0")
