"""This module is the plain-torch numerics of NVFP4.

The value is ``E2M1 code * E4M3 scale of its group of 16 * fp32 global scale``.

The dimension suffixes are: O rows, R some of the rows, I columns, G groups of 16 columns, T tokens.
"""

import torch

from orbit_kernels.formats.common import e2m1, nibbles
from orbit_kernels.formats.fp8.reference import FP8, FP8_MAX
from orbit_kernels.formats.fp8.reference import decode as decode_e4m3

GROUP = 16


def dequantize(
    packed_OB: torch.Tensor, scale_OG: torch.Tensor, global_scale: torch.Tensor, rows: slice, dtype: torch.dtype
) -> torch.Tensor:
    """Returns the rows [R, I] of the weight, rounded once to ``dtype``.

    Args:
        packed_OB: uint8 [O, I / 2].
        scale_OG: float8_e4m3fn.
        global_scale: fp32 scalar that multiplies.
        rows: which rows.
        dtype: of the result.
    """
    return _multiply(packed_OB[rows], decode_e4m3(scale_OG[rows]) * global_scale, dtype)


def dequantize_divided(
    packed_OB: torch.Tensor, scale_OG: torch.Tensor, divisor: torch.Tensor, rows: slice, dtype: torch.dtype
) -> torch.Tensor:
    """Dequantises with a global scale that divides: to the bit, the result is that of compressed-tensors' division."""
    return _multiply(packed_OB[rows], decode_e4m3(scale_OG[rows]) / divisor, dtype)


def quantize(weight_OI: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns packed codes uint8 [O, I / 2] and E4M3 scales [O, G] for a given global scale.

    The global scale is an fp32 scalar that multiplies.
    """
    values, scale_OG = _round(weight_OI, global_scale)
    return e2m1.encode(values.flatten(-2)), scale_OG


def quantized_input(x_TI: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """Returns ``x`` after the deployed kernel's quantisation with a static global scale and dynamic group scales.

    The deployed GEMM multiplies by the global scale at its end; here it is part of the value, rounded to ``x``'s dtype.
    """
    values, scale_TG = _round(x_TI, global_scale)
    return (values * (decode_e4m3(scale_TG) * global_scale)[..., None]).flatten(-2).to(x_TI.dtype)


def _round(values: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns E2M1 values [..., G, 16], fp32, and E4M3 scales [..., G].

    A group whose scale rounds to zero is all zeros.
    """
    groups = values.float().unflatten(-1, (-1, GROUP))
    scale = (groups.abs().amax(dim=-1) / (e2m1.MAX * global_scale)).clamp(max=FP8_MAX).to(FP8)
    effective = (decode_e4m3(scale) * global_scale)[..., None]
    return e2m1.round_to_value(torch.where(effective > 0, groups / effective, 0.0)), scale


def _multiply(packed_RB: torch.Tensor, scale_RG: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    values_RI = nibbles.decode(packed_RB, e2m1.VALUES)
    # In place: with an ``out`` of another dtype torch makes a hidden fp32 copy.
    values_RI.unflatten(-1, (-1, GROUP)).mul_(scale_RG[..., None])
    return values_RI.to(dtype)
