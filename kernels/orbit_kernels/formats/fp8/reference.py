"""This module is the plain-torch numerics of block-scaled FP8 (E4M3, ``torch.float8_e4m3fn``, largest value 448).

The dimension suffixes are: T tokens, O rows, I columns, P row blocks, Q column blocks; the last block of either may be
short.
"""

import functools

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
UE8M0_SMALLEST_EXPONENT = -127
# Inputs of smaller magnitude get this one's scale, as in SGLang 0.5.12's per_token_group_quant_fp8 (eps=1e-10).
SMALLEST_INPUT = 1e-10


def dequantize(
    weight_OI: torch.Tensor, scale_PQ: torch.Tensor, block: tuple[int, int], rows: slice, dtype: torch.dtype
) -> torch.Tensor:
    """Returns the rows [R, I] of ``weight * scale``, the scale repeated over its block, rounded once to ``dtype``."""
    start, stop, _ = rows.indices(weight_OI.shape[0])
    values_RI = decode(weight_OI[start:stop])
    row_blocks = torch.arange(start, stop, device=weight_OI.device) // block[0]
    scale_RQ = scale_PQ.float()[row_blocks]
    # Whole column blocks in one broadcast, then the short one at the edge.
    whole = weight_OI.shape[1] // block[1]
    edge = whole * block[1]
    if whole:
        values_RI[:, :edge].unflatten(1, (whole, block[1])).mul_(scale_RQ[:, :whole, None])
    if edge < weight_OI.shape[1]:
        values_RI[:, edge:].mul_(scale_RQ[:, whole:])
    return values_RI.to(dtype)


def quantize(
    weight_OI: torch.Tensor, block: tuple[int, int], *, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the E4M3 weight [O, I] and fp32 scale [P, Q] = largest magnitude of a block / 448.

    Args:
        weight_OI: any floating dtype.
        block: rows and columns of a block.
        power_of_two: round each scale up to a power of two, so that it fits UE8M0.
    """
    rows, columns = weight_OI.shape
    num_blocks = (-(-rows // block[0]), -(-columns // block[1]))
    padded = torch.zeros(num_blocks[0] * block[0], num_blocks[1] * block[1], device=weight_OI.device)
    padded[:rows, :columns] = weight_OI.float()
    blocks = padded.view(num_blocks[0], block[0], num_blocks[1], block[1])
    scale_PQ = _scale(blocks.abs().amax(dim=(1, 3)), power_of_two)
    codes = (blocks / scale_PQ[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return codes.view(padded.shape)[:rows, :columns].contiguous(), scale_PQ


def quantized_input(x_TI: torch.Tensor, group: int, *, power_of_two: bool) -> torch.Tensor:
    """Returns ``x`` after the deployed kernel's dynamic quantisation.

    Each token and ``group`` of columns has a scale. Columns beyond the last whole group form a group of their own.
    """
    columns = x_TI.shape[-1]
    padded = torch.nn.functional.pad(x_TI.float(), (0, -columns % group)).unflatten(-1, (-1, group))
    scale = _scale(padded.abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST_INPUT), power_of_two)
    codes = (padded / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return (decode(codes) * scale).flatten(-2)[..., :columns].to(x_TI.dtype)


def decode(codes: torch.Tensor) -> torch.Tensor:
    """Returns E4M3 values as fp32.

    On a CPU it goes through a table of all 256, four times as fast as torch 2.11's own conversion.
    """
    if codes.device.type != "cpu":
        return codes.float()
    index = codes.contiguous().view(torch.uint8).flatten().int()
    return torch.index_select(_values(), 0, index).view(codes.shape)


@functools.cache
def _values() -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(FP8).float()


def _scale(largest: torch.Tensor, power_of_two: bool) -> torch.Tensor:
    scale = largest / FP8_MAX
    if power_of_two:
        scale = _power_of_two_above(scale)
    # A block of zeros has no magnitude to go by; any scale stores it exactly.
    return torch.where(largest > 0, scale, torch.ones_like(scale))


def _power_of_two_above(scale: torch.Tensor) -> torch.Tensor:
    """Returns the least power of two that UE8M0 holds and that is not below ``scale``.

    It is exact, which a logarithm is not.
    """
    mantissa, exponent = torch.frexp(scale)  # the mantissa is in [0.5, 1)
    exponent = (exponent - (mantissa == 0.5).int()).clamp(min=UE8M0_SMALLEST_EXPONENT)
    return torch.ldexp(torch.ones_like(scale), exponent)
