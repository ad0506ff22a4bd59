"""This module is the plain-torch numerics of grouped INT4, in compressed-tensors' layout.

Stored codes are 0 to 15 and mean -8 to 7; eight of them share an int32 word, the first in the lowest bits. Zero points are
packed alike, but along the rows.

The dimension suffixes are: O rows, R some of the rows, I columns, G groups of columns, W words of eight codes.
"""

import torch

from orbit_kernels.formats.common import nibbles

PER_WORD = 8
_VALUES = tuple(float(code - 8) for code in range(16))


def dequantize(
    packed_OW: torch.Tensor,
    scale_OG: torch.Tensor,
    zero_point_WG: torch.Tensor | None,
    rows: slice,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Returns the rows [R, I] of ``(code - zero_point) * scale``, rounded once to ``dtype``."""
    start, stop, _ = rows.indices(packed_OW.shape[0])
    # Codes less zero points are exact in BF16, and torch multiplies BF16 in fp32 and rounds once: the same bits for half
    # the memory traffic.
    exact = torch.bfloat16 if dtype == scale_OG.dtype == torch.bfloat16 else torch.float32
    values_RI = nibbles.decode(packed_OW[start:stop], _VALUES, exact)
    groups = values_RI.unflatten(-1, (scale_OG.shape[-1], -1))
    if zero_point_WG is not None:
        groups -= unpack_zero_points(zero_point_WG, start, stop)[..., None].to(exact)
    groups *= scale_OG[start:stop, :, None].to(exact)
    return values_RI.to(dtype)


def unpack_zero_points(zero_point_WG: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Returns the zero points [R, G], fp32 in -8 to 7, of the rows [start, stop)."""
    first_word = start // PER_WORD
    # A copy, not contiguous(): that keeps the strides of a single word, which cannot be viewed as bytes.
    words_GW = zero_point_WG[first_word : -(-stop // PER_WORD)].T.clone(memory_format=torch.contiguous_format)
    offset = first_word * PER_WORD
    return nibbles.decode(words_GW, _VALUES)[:, start - offset : stop - offset].T


def quantize(
    weight_OI: torch.Tensor, group_size: int, scale_dtype: torch.dtype, *, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns packed codes [O, W], scales [O, G] and packed zero points [W, G] by compressed-tensors' own rounding.

    The codes are chosen for the scales as stored, after their rounding to ``scale_dtype``.
    """
    # compressed-tensors imports transformers: seconds that reading a checkpoint does without.
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationScheme,
        QuantizationStrategy,
        QuantizationType,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    weight = weight_OI.float()
    groups = weight.unflatten(-1, (-1, group_size))
    arguments = QuantizationArgs(
        num_bits=4,
        type=QuantizationType.INT,
        symmetric=symmetric,
        strategy=QuantizationStrategy.GROUP,
        group_size=group_size,
        zp_dtype=torch.int8,
    )
    scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
    state = PackedQuantizationCompressor.compress(
        {
            "weight": weight,
            "weight_scale": scale.to(scale_dtype).float(),
            "weight_zero_point": zero_point.to(torch.int8),
        },
        QuantizationScheme(targets=["Linear"], weights=arguments),
    )
    return state["weight_packed"], state["weight_scale"].to(scale_dtype), state.get("weight_zero_point")
