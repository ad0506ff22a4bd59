"""This module decodes two 4-bit codes in a byte, of which the first is in the low half.

INT4 words (little-endian) and FP4 bytes have this in common.
"""

import functools

import torch

# An integer as wide as two values, so that a lookup moves a pair.
_PAIR_DTYPES = {torch.float32: torch.int64, torch.bfloat16: torch.int32}


def decode(packed: torch.Tensor, values: tuple[float, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns the values [..., n] of codes that are packed along the last dimension.

    One lookup decodes a byte: the table has the pair of values of each of the 256 bytes.

    Args:
        packed: uint8 [..., n / 2] or int32 [..., n / 8].
        values: value of each of the 16 codes.
        dtype: of the result, fp32 or bf16; must hold the values exactly.
    """
    packed_bytes = packed.view(torch.uint8)
    index = packed_bytes.flatten().int()
    pairs = torch.index_select(_pairs(values, dtype, packed.device), 0, index)
    return pairs.view(dtype).view(*packed_bytes.shape[:-1], 2 * packed_bytes.shape[-1])


@functools.cache
def _pairs(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    table = torch.tensor(values, dtype=dtype)
    byte = torch.arange(256)
    pairs = torch.stack((table[byte & 15], table[byte >> 4]), dim=1)
    return pairs.view(_PAIR_DTYPES[dtype]).flatten().to(device)
