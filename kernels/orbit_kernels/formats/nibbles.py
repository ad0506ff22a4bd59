"""Two 4-bit codes in a byte, the first in the low half: what INT4 words (little-endian) and FP4 bytes have in common."""

import functools

import torch


def decode(packed: torch.Tensor, values: tuple[float, ...]) -> torch.Tensor:
    """The fp32 values [..., n] of codes that are packed along the last dimension.

    One lookup decodes a byte: the table has the pair of values of each of the 256 bytes.

    Args:
        packed: uint8 [..., n / 2] or int32 [..., n / 8].
        values: value of each of the 16 codes.
    """
    packed_bytes = packed.view(torch.uint8)
    index = packed_bytes.flatten().int()
    pairs = torch.index_select(_pairs(values, packed.device), 0, index)
    return pairs.view(torch.float32).view(*packed_bytes.shape[:-1], 2 * packed_bytes.shape[-1])


@functools.cache
def _pairs(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    table = torch.tensor(values, dtype=torch.float32)
    byte = torch.arange(256)
    return torch.stack((table[byte & 15], table[byte >> 4]), dim=1).view(torch.int64).flatten().to(device)
