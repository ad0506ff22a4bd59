"""INT4: values by hand, compressed-tensors' own decompression, zero points, refusals."""

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from orbit_kernels.formats import Int4Format
from tests.support.formats import random_weight


def _tensors(codes: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None = None):
    """Stored tensors of unsigned codes and zero points, 0 to 15, packed by compressed-tensors."""
    tensors = {
        "weight_packed": pack_to_int32((codes - 8).to(torch.int8), 4),
        "weight_scale": scale.bfloat16(),
        "weight_shape": torch.tensor(codes.shape),
    }
    if zero_point is not None:
        tensors["weight_zero_point"] = pack_to_int32((zero_point - 8).to(torch.int8), 4, packed_dim=0)
    return tensors


def test_symmetric_values_by_hand():
    """Codes 0 to 7 mean -8 to -1: the first of a word is in its lowest bits."""
    words = torch.tensor([[0x76543210], [0x0F0F0F08]], dtype=torch.int64).to(torch.int32)
    tensors = {
        "weight_packed": words,
        "weight_scale": torch.tensor([[0.5], [2.0]], dtype=torch.bfloat16),
        "weight_shape": torch.tensor([2, 8]),
    }
    found = Int4Format(group_size=8).dequantize(tensors, torch.float32)
    assert found.tolist() == [
        [-4.0, -3.5, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5],
        [0.0, -16.0, 14.0, -16.0, 14.0, -16.0, 14.0, -16.0],
    ]


def test_zero_points_by_hand():
    """Zero points 3 and 12, scales 0.5 and 2, (code - zero point) * scale.

    docs/field-cases.md: zero points and activation order.
    """
    codes = torch.tensor([[0, 3, 5, 15, 3, 3, 3, 4] + [0, 12, 15, 1, 12, 12, 12, 13]])
    tensors = _tensors(codes, torch.tensor([[0.5, 2.0]]), torch.tensor([[3, 12]]))

    found = Int4Format(group_size=8, symmetric=False).dequantize(tensors, torch.float32)

    assert found.tolist() == [[-1.5, 0.0, 1.0, 6.0, 0.0, 0.0, 0.0, 0.5] + [-24.0, 0.0, 6.0, -22.0, 0.0, 0.0, 0.0, 2.0]]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, 128])
# From 9 rows on: compressed-tensors 0.20.1 itself cannot unpack a single word of zero points.
@pytest.mark.parametrize("rows", [9, 17, 64])
def test_bitwise_equal_to_compressed_tensors(symmetric, group_size, rows):
    weight_format = Int4Format(group_size=group_size, symmetric=symmetric)
    tensors = weight_format.quantize(random_weight(rows, 256))
    arguments = QuantizationArgs(num_bits=4, symmetric=symmetric, strategy="group", group_size=group_size)
    theirs = PackedQuantizationCompressor.decompress(
        dict(tensors), QuantizationScheme(targets=["Linear"], weights=arguments)
    )["weight"]

    assert theirs.dtype == torch.bfloat16 and theirs.any()
    assert torch.equal(weight_format.dequantize(tensors, torch.bfloat16), theirs)


@pytest.mark.parametrize("symmetric", [True, False])
def test_every_code_survives_packing(symmetric):
    """The exact inverse: with each group's extremes present, quantising finds codes and scales again."""
    codes = torch.arange(16).repeat(24, 4) if symmetric is False else torch.arange(1, 16).repeat(24, 5)[:, :64]
    scale = torch.full((24, 2), 0.25)
    zero_point = torch.arange(48).view(24, 2) % 16 if not symmetric else None
    weight_format = Int4Format(group_size=32, symmetric=symmetric)
    tensors = _tensors(codes, scale, zero_point)

    values = weight_format.dequantize(tensors, torch.float32)

    offset = 8 if zero_point is None else zero_point.repeat_interleave(32, 1)
    assert torch.equal(values, (codes - offset) * 0.25)
    if not symmetric:
        again = weight_format.quantize(values)
        assert all(torch.equal(again[leaf], tensors[leaf]) for leaf in tensors)


def test_a_mismatched_group_size_is_an_error():
    """config.json says 128, the file has groups of 32. docs/field-cases.md: the same dequantised bits."""
    tensors = Int4Format(group_size=32).quantize(random_weight(16, 256))
    assert Int4Format(group_size=128).specs(16, 256)["weight_scale"].shape != tensors["weight_scale"].shape
    assert Int4Format(group_size=128).problems(tensors) == [
        "weight_shape: [16, 256], but scales of groups of 128 make it [16, 1024]"
    ]


def test_a_width_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="576 columns are no multiple of 128"):
        Int4Format(group_size=128).quantize(random_weight(8, 576))


def test_asymmetric_rows_are_split_at_words_of_zero_points():
    weight_format = Int4Format(group_size=32, symmetric=False)
    tensors = weight_format.quantize(random_weight(20, 64))
    assert weight_format.shard_rows(tensors, 8, 20)["weight_zero_point"].shape == (2, 2)
    with pytest.raises(ValueError, match="12 cuts a block of 8 rows"):
        weight_format.shard_rows(tensors, 0, 12)
    symmetric = Int4Format(group_size=32)
    assert symmetric.shard_rows(symmetric.quantize(random_weight(20, 64)), 3, 12)["weight_shape"].tolist() == [9, 64]


def test_a_nan_scale_is_named():
    tensors = Int4Format().quantize(random_weight(4, 64))
    tensors["weight_scale"][2, 1] = float("nan")
    assert Int4Format().problems(tensors) == ["weight_scale: 1 of 8 scales are NaN, the first at [2, 1]"]


@pytest.mark.parametrize("arguments", [{"group_size": 12}, {"group_size": 0}, {"scale_dtype": torch.int8}])
def test_impossible_settings_are_refused(arguments):
    with pytest.raises(ValueError, match="INT4"):
        Int4Format(**arguments)
