"""This module defines INT4 in groups.

A weight has packed codes int32 [O, I / 8], scales [O, I / group] and ``weight_shape`` int64 [2]. Asymmetric weights
have packed zero points int32 [ceil(O / 8), I / group] as well. Activation order that needs ``weight_g_idx`` is refused
with the configuration; orders that leave no trace in the file (``weight``, ``static``) are not.
"""

import dataclasses
from typing import Any, ClassVar

import torch

from orbit_kernels.formats.common.weight_format import Tensors, TensorSpec, WeightFormat, check_range, scale_problems
from orbit_kernels.formats.int4 import reference

SHAPE_LEAF = "weight_shape"
"""This leaf holds the rows and columns of the weight, whatever else is stored of it."""

SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int4Format(WeightFormat):
    """``Int4Format`` is four-bit integers with a scale, and if asymmetric a zero point, for each row and column group.

    Args:
        group_size: columns that share a scale; a multiple of 8.
        symmetric: no zero points.
        scale_dtype: dtype of the stored scales.

    Raises:
        ValueError: a group that does not fill whole words, or a scale dtype that no file has.
    """

    group_size: int = 32
    symmetric: bool = True
    scale_dtype: torch.dtype = torch.bfloat16

    name: ClassVar[str] = "int4"
    scratch_bytes_per_weight: ClassVar[int] = 7
    value_leaves: ClassVar[tuple[str, ...]] = ("weight_scale", SHAPE_LEAF)

    def __post_init__(self):
        if self.group_size <= 0 or self.group_size % reference.PER_WORD:
            raise ValueError(f"INT4 group size {self.group_size}: must be a positive multiple of {reference.PER_WORD}")
        if self.scale_dtype not in SCALE_DTYPES:
            raise ValueError(f"INT4 scale dtype {self.scale_dtype}: not one of {', '.join(map(str, SCALE_DTYPES))}")

    def describe(self) -> dict[str, Any]:
        """Does what WeightFormat says."""
        return {
            "format": self.name,
            "group_size": self.group_size,
            "scale_dtype": str(self.scale_dtype).removeprefix("torch."),
            "zero_point": not self.symmetric,
        }

    def specs(self, rows: int, columns: int) -> dict[str, TensorSpec]:
        """Does what WeightFormat says."""
        if columns % self.group_size:
            raise ValueError(f"INT4 weight [{rows}, {columns}]: {columns} columns are no multiple of {self.group_size}")
        num_groups = columns // self.group_size
        specs = {
            "weight_packed": TensorSpec((rows, columns // reference.PER_WORD), torch.int32),
            "weight_scale": TensorSpec((rows, num_groups), self.scale_dtype),
            SHAPE_LEAF: TensorSpec((2,), torch.int64, also=(torch.int32,)),
        }
        if not self.symmetric:
            specs["weight_zero_point"] = TensorSpec((-(-rows // reference.PER_WORD), num_groups), torch.int32)
        return specs

    def problems(self, tensors: Tensors) -> list[str]:
        """Returns impossible scales, and a ``weight_shape`` that contradicts the other tensors, as problems."""
        found = []
        scale = tensors.get("weight_scale")
        if scale is not None:
            found += scale_problems("weight_scale", scale)
        if scale is not None and SHAPE_LEAF in tensors:
            stored, actual = tensors[SHAPE_LEAF].tolist(), [scale.shape[0], scale.shape[1] * self.group_size]
            if stored != actual:
                found.append(f"weight_shape: {stored}, but scales of groups of {self.group_size} make it {actual}")
        return found

    def dequantize(self, tensors: Tensors, dtype: torch.dtype, rows: slice = slice(None)) -> torch.Tensor:
        """Does what WeightFormat says."""
        zero_point = None if self.symmetric else tensors["weight_zero_point"]
        return reference.dequantize(tensors["weight_packed"], tensors["weight_scale"], zero_point, rows, dtype)

    def quantize(self, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
        """Does what WeightFormat says; it rounds as compressed-tensors does."""
        self.specs(*weight_OI.shape)
        packed, scale, zero_point = reference.quantize(
            weight_OI, self.group_size, self.scale_dtype, symmetric=self.symmetric
        )
        tensors = {"weight_packed": packed, "weight_scale": scale, SHAPE_LEAF: torch.tensor(weight_OI.shape)}
        if zero_point is not None:
            tensors["weight_zero_point"] = zero_point
        return tensors

    def shard_rows(self, tensors: Tensors, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Does what WeightFormat says.

        Asymmetric weights can be cut only at multiples of 8 rows, which share a word of zero points.
        """
        rows, num_groups = tensors["weight_scale"].shape
        check_range("rows", start, stop, rows, 1 if self.symmetric else reference.PER_WORD)
        shard = {leaf: tensors[leaf][start:stop] for leaf in ("weight_packed", "weight_scale")}
        if not self.symmetric:
            words = slice(start // reference.PER_WORD, -(-stop // reference.PER_WORD))
            shard["weight_zero_point"] = tensors["weight_zero_point"][words]
        return shard | self._shape(tensors, stop - start, num_groups * self.group_size)

    def shard_columns(self, tensors: Tensors, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Does what WeightFormat says."""
        rows, num_groups = tensors["weight_scale"].shape
        check_range("columns", start, stop, num_groups * self.group_size, self.group_size)
        groups = slice(start // self.group_size, stop // self.group_size)
        words = slice(start // reference.PER_WORD, stop // reference.PER_WORD)
        shard = {
            "weight_packed": tensors["weight_packed"][:, words],
            "weight_scale": tensors["weight_scale"][:, groups],
        }
        if not self.symmetric:
            shard["weight_zero_point"] = tensors["weight_zero_point"][:, groups]
        return shard | self._shape(tensors, rows, stop - start)

    def _shape(self, tensors: Tensors, rows: int, columns: int) -> dict[str, torch.Tensor]:
        return {SHAPE_LEAF: tensors["weight_packed"].new_tensor((rows, columns), dtype=torch.int64)}
