"""This module defines FP4 E2M1, which has one bit of sign, two of exponent and one of mantissa.

The source is OCP Microscaling Formats 1.0, table 5.
"""

import torch

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The table has the value of each code."""

MAX = 6.0

# Code of a magnitude by twice its value, 0 to 12; -1 where there is none.
_CODES = (0, 1, 2, 3, 4, -1, 5, -1, 6, -1, -1, -1, 7)


def round_to_value(values: torch.Tensor) -> torch.Tensor:
    """Returns the nearest E2M1 values as fp32: ties go to even, 6 saturates, and signed zeros are kept."""
    magnitude = values.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    # torch.round takes ties to even multiples of the step, which are the codes with an even mantissa.
    return (values / step).round_().mul_(step).clamp_(-MAX, MAX)


def encode(values: torch.Tensor) -> torch.Tensor:
    """Packs E2M1 values [..., n] into codes uint8 [..., n / 2], the first of a pair in the low half of the byte."""
    table = torch.tensor(_CODES, dtype=torch.int8, device=values.device).view(torch.uint8)
    codes = table[(values.abs() * 2).int()] | (torch.signbit(values).to(torch.uint8) << 3)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)
