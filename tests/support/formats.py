"""Formats and stored weights that the tests of ``orbit_kernels.formats`` share."""

import torch

from orbit_kernels.formats import Bf16Format, Fp8Format, Int4Format, Mxfp4Format, Nvfp4Format, WeightFormat
from orbit_kernels.frozen.product import StoredWeight

FORMATS = {
    "bf16": Bf16Format(),
    "fp32": Bf16Format(dtype=torch.float32),
    "fp8": Fp8Format(),
    "fp8_ue8m0": Fp8Format(scale_dtype="ue8m0"),
    "fp8_block_64": Fp8Format(block_rows=64, block_columns=64),
    "int4_32": Int4Format(group_size=32),
    "int4_128": Int4Format(group_size=128),
    "int4_asymmetric": Int4Format(group_size=32, symmetric=False),
    "nvfp4": Nvfp4Format(),
    "nvfp4_weight_only": Nvfp4Format(quantized_input=False),
    "nvfp4_modelopt": Nvfp4Format(style="modelopt"),
    "mxfp4": Mxfp4Format(),
}
# Largest error over the RMS of normally distributed weights, as measured, and a third more.
LARGEST_ERROR = {
    "bf16": 0.012,
    "fp32": 0.0,
    "fp8": 0.2,
    "fp8_ue8m0": 0.2,
    "fp8_block_64": 0.2,
    "int4_32": 0.4,
    "int4_128": 0.4,
    "int4_asymmetric": 0.4,
    "nvfp4": 0.9,
    "nvfp4_weight_only": 0.9,
    "nvfp4_modelopt": 0.9,
    "mxfp4": 1.2,
}


def random_weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Weights [rows, columns] in BF16, normally distributed with RMS 0.02."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * 0.02).bfloat16()


def quantize(weight_format: WeightFormat, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
    """Stored tensors; inputs up to 4 where the format quantises them with a static scale."""
    if isinstance(weight_format, Nvfp4Format) and weight_format.quantized_input:
        return weight_format.quantize(weight_OI, largest_input=4.0)
    return weight_format.quantize(weight_OI)


def stored(weight_format: WeightFormat, rows: int, columns: int, seed: int = 0) -> StoredWeight:
    """A random weight as stored."""
    return StoredWeight(weight_format, rows, columns, quantize(weight_format, random_weight(rows, columns, seed)))
