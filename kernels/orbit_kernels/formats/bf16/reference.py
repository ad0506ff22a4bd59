"""This module is the plain-torch numerics of unquantised weights."""

import torch


def dequantize(weight_OI: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the weight itself, rounded once where the dtypes differ."""
    return weight_OI.to(dtype)


def quantize(weight_OI: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the weight rounded to the stored dtype."""
    return weight_OI.to(dtype).contiguous()
