"""This module is the plain-torch numerics of MXFP4.

The value is ``E2M1 code * 2^(byte - 127)``, with a scale byte for each 32 columns.

The dimension suffixes are: O rows, R some of the rows, I columns, G groups of 32 columns, B bytes of two codes.
"""

import torch

from orbit_kernels.formats.common import e2m1, nibbles

GROUP = 32
BIAS = 127
NAN_BYTE = 255
# The scale maps a group's largest magnitude to the exponent of 6 = 1.5 * 2^2, E2M1's largest value.
_LARGEST_EXPONENT = 2
# Magnitudes from 1.75 * 2^e on would round beyond 6 and count as 2^(e + 1); frexp's mantissa is in [0.5, 1).
_ROUNDS_UP = 1.75 / 2


def dequantize(packed_OB: torch.Tensor, scale_OG: torch.Tensor, rows: slice, dtype: torch.dtype) -> torch.Tensor:
    """Returns the rows [R, I] of the weight; they are exact in BF16 but for subnormal results."""
    # Codes and powers of two are exact in BF16: the same bits for half the memory traffic.
    exact = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    values_RI = nibbles.decode(packed_OB[rows], e2m1.VALUES, exact)
    values_RI.unflatten(-1, (-1, GROUP)).mul_(decode_scale(scale_OG[rows]).to(exact)[..., None])
    return values_RI.to(dtype)


def decode_scale(scale: torch.Tensor) -> torch.Tensor:
    """Returns UE8M0 bytes as fp32 powers of two; 127 is 1 and 128 is 2."""
    return torch.ldexp(torch.ones_like(scale, dtype=torch.float32), exponent(scale))


def exponent(scale: torch.Tensor) -> torch.Tensor:
    """Returns the exponents int32 of UE8M0 bytes."""
    return scale.view(torch.uint8).int() - BIAS


def quantize(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns packed codes uint8 [O, B] and scale bytes [O, G] by compressed-tensors 0.20.1's rule for the exponent.

    Unlike section 6.3 of the OCP specification, which always rounds the exponent down, the rule rounds up a group whose
    largest magnitude would saturate.
    """
    groups = weight_OI.float().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(dim=-1)
    mantissa, floor_plus_one = torch.frexp(largest)
    exponents = floor_plus_one - 1 + (mantissa >= _ROUNDS_UP).int() - _LARGEST_EXPONENT
    # A group of zeros has no magnitude to go by; any scale stores it exactly.
    exponents = torch.where(largest > 0, exponents, 0).clamp(-BIAS, NAN_BYTE - 1 - BIAS)
    scale_OG = (exponents + BIAS).to(torch.uint8)
    values = e2m1.round_to_value(groups / decode_scale(scale_OG)[..., None])
    return e2m1.encode(values.flatten(-2)), scale_OG
