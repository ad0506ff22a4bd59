"""This module is low-rank adaptation (LoRA) in plain torch: the specification of every faster kernel.

A linear ``y = x W^T`` becomes ``y = x W^T + s (x A^T) B^T`` with A [R, I], B [O, R] and ``s = alpha / R``. The source
is Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv:2106.09685). Tensor layout and scaling are
peft's.

Trainer and server round alike: ``s B`` is formed in fp32; A and ``s B`` are rounded to the activations' dtype; ``x
A^T``, the update and the sum with the base's output are each rounded to it once. With BF16 activations SGLang's own
kernels scale the product instead of B, and peft multiplies in fp32 when its adapter is fp32: both differ from this by
rounding only.

The dimension suffixes are: T tokens, I input width, O output width, R rank.
"""

from collections.abc import Sequence

import torch
from torch.nn import functional as F


def scaled(b_OR: torch.Tensor, scaling: float) -> torch.Tensor:
    """Returns ``s B`` [O, R] in fp32 (fp64 for fp64 tensors), from B of any float dtype."""
    return b_OR.to(torch.promote_types(b_OR.dtype, torch.float32)) * scaling


def update(x_TI: torch.Tensor, a_RI: torch.Tensor, scaled_b_OR: torch.Tensor) -> torch.Tensor:
    """Returns what is added to the base's output, [..., O] in the dtype of ``x``; it is exactly zero where B is.

    Args:
        x_TI: activations [..., I].
        a_RI: A.
        scaled_b_OR: ``s B``, as ``scaled`` returns it.
    """
    return F.linear(F.linear(x_TI, a_RI.to(x_TI.dtype)), scaled_b_OR.to(x_TI.dtype))


def fused_update(x_TI: torch.Tensor, a_RI: Sequence[torch.Tensor], scaled_b_OR: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns ``update`` of the parts of a fused projection side by side.

    Args:
        x_TI: activations [..., I].
        a_RI: one A for all parts, or one for each.
        scaled_b_OR: ``s B`` of each part, in the order of their rows.
    """
    if len(a_RI) == 1:
        return update(x_TI, a_RI[0], torch.cat([b_OR.to(x_TI.dtype) for b_OR in scaled_b_OR]))
    return torch.cat([update(x_TI, a, b) for a, b in zip(a_RI, scaled_b_OR, strict=True)], dim=-1)


def merge(weight_OI: torch.Tensor, a_RI: torch.Tensor, b_OR: torch.Tensor, scaling: float) -> torch.Tensor:
    """Returns the weight ``W + s B A`` whose plain linear equals the adapted one, at least fp32."""
    delta_OI = scaled(b_OR, scaling) @ a_RI.to(torch.promote_types(a_RI.dtype, torch.float32))
    return weight_OI.to(delta_OI.dtype) + delta_OI
