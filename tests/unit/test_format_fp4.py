"""NVFP4 and MXFP4: values by hand, compressed-tensors' and torchao's own decompression, global scales, refusals."""

import pytest
import torch
from compressed_tensors.compressors import MXFP4PackedCompressor, NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams

from orbit_kernels.formats import Mxfp4Format, Nvfp4Format
from orbit_kernels.formats.common import e2m1, nibbles
from tests.support.formats import random_weight

NVFP4_ARGUMENTS = preset_name_to_scheme("NVFP4A16", ["Linear"]).weights
MXFP4_ARGUMENTS = preset_name_to_scheme("MXFP4A16", ["Linear"]).weights
# 0, 0.5, 1, 1.5, 2, 3, 4, 6 and the same negative, two codes a byte.
ALL_CODES = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)
ALL_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def _scheme(weights: QuantizationArgs) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=weights)


def test_every_code_is_its_value():
    assert nibbles.decode(ALL_CODES, e2m1.VALUES).tolist() == [ALL_VALUES]
    assert torch.equal(e2m1.encode(torch.tensor([ALL_VALUES])), ALL_CODES)


def test_rounding_takes_ties_to_even_and_saturates():
    values = [0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.01, 7.0, -0.75, -100.0, 2.49, 1.99]
    expected = [0.0, 0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0, -1.0, -6.0, 2.0, 2.0]
    assert e2m1.round_to_value(torch.tensor(values)).tolist() == expected


@pytest.mark.parametrize("style", ["modelopt", "compressed-tensors"])
def test_nvfp4_values_by_hand(style):
    """Scale 3 and a global scale of 0.5, which compressed-tensors stores as the divisor 2."""
    scale = torch.tensor([[3.0]]).to(torch.float8_e4m3fn)
    if style == "modelopt":
        tensors = {"weight": ALL_CODES, "weight_scale": scale, "weight_scale_2": torch.tensor(0.5)}
    else:
        tensors = {"weight_packed": ALL_CODES, "weight_scale": scale, "weight_global_scale": torch.tensor([2.0])}

    found = Nvfp4Format(style=style).dequantize(tensors, torch.float32)

    assert found.tolist() == [[1.5 * value for value in ALL_VALUES]]


def test_nvfp4_is_bitwise_equal_to_compressed_tensors():
    weight_format = Nvfp4Format(quantized_input=False)
    tensors = weight_format.quantize(random_weight(32, 256))
    theirs = NVFP4PackedCompressor.decompress(dict(tensors), _scheme(NVFP4_ARGUMENTS))["weight"]

    assert theirs.dtype == torch.bfloat16 and theirs.any()
    assert torch.equal(weight_format.dequantize(tensors, torch.bfloat16), theirs)


def test_nvfp4_is_stored_as_compressed_tensors_stores_it():
    weight = random_weight(32, 256).float()
    ours = Nvfp4Format(quantized_input=False).quantize(weight)
    groups = weight.unflatten(-1, (-1, 16))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), NVFP4_ARGUMENTS, ours["weight_global_scale"])
    state = {"weight": weight, "weight_scale": scale, "weight_global_scale": ours["weight_global_scale"]}
    theirs = NVFP4PackedCompressor.compress(state, _scheme(NVFP4_ARGUMENTS))

    same = (ours["weight_scale"].view(torch.uint8) == theirs["weight_scale"].view(torch.uint8)).float().mean()
    assert same > 0.99  # they divide in another order, so a scale on a boundary may fall to the other side
    assert (ours["weight_packed"] == theirs["weight_packed"]).float().mean() > 0.99


def test_nvfp4_styles_mean_the_same_weight():
    weight = random_weight(16, 64)
    ours = Nvfp4Format().quantize(weight, largest_input=3.0)
    modelopt = Nvfp4Format(style="modelopt").quantize(weight, largest_input=3.0)

    assert torch.equal(ours["weight_packed"], modelopt["weight"])
    assert ours["weight_global_scale"].item() == pytest.approx(1 / modelopt["weight_scale_2"].item())
    assert ours["input_global_scale"].item() == pytest.approx(1 / modelopt["input_scale"].item())
    assert modelopt["input_scale"].item() == pytest.approx(3.0 / (448 * 6))


@pytest.mark.parametrize("style", ["modelopt", "compressed-tensors"])
def test_fused_parts_keep_their_own_global_scales(style):
    """Each part of a fused linear is dequantised with its scalar, whatever memory held before.

    docs/field-cases.md: global scales of a fused linear.
    """
    weight_format = Nvfp4Format(style=style)
    leaf = "weight_scale_2" if style == "modelopt" else "weight_global_scale"
    parts = [weight_format.quantize(random_weight(16, 64, seed) * 10**seed, largest_input=3.0) for seed in range(3)]
    assert len({part[leaf].item() for part in parts}) == 3

    for seed, part in enumerate(parts):
        memory = torch.full(part[leaf].shape, 1e9)
        loaded = part | {leaf: memory.copy_(part[leaf])}
        largest = weight_format.dequantize(loaded, torch.float32).abs().max().item()
        assert largest == pytest.approx(random_weight(16, 64, seed).abs().max().item() * 10**seed, rel=0.05)


@pytest.mark.parametrize("style", ["modelopt", "compressed-tensors"])
def test_nvfp4_input_takes_the_largest_stored_scale_of_the_parts(style):
    weight_format = Nvfp4Format(style=style)
    parts = [weight_format.quantize(random_weight(16, 64), largest_input=largest) for largest in (3.0, 12.0)]
    x_TI = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))

    together = weight_format.model_input(x_TI, parts)

    winner = parts[1] if style == "modelopt" else parts[0]
    assert torch.equal(together, weight_format.model_input(x_TI, [winner]))
    assert torch.equal(together, weight_format.model_input(x_TI, parts[::-1]))


def test_nvfp4_input_by_hand():
    """Global scale 1/448: a group's largest 6 gives the E4M3 scale 448, and values are E2M1's own."""
    tensors = Nvfp4Format(style="modelopt").quantize(random_weight(1, 16), largest_input=6.0)
    x_TI = torch.tensor([[6.0, 0.24, 0.26, -1.3, 5.1] + [0.0] * 11])
    found = Nvfp4Format(style="modelopt").model_input(x_TI, [tensors])
    torch.testing.assert_close(found[0, :5], torch.tensor([6.0, 0.0, 0.5, -1.5, 6.0]), rtol=1e-6, atol=0)


def test_nvfp4_input_beyond_the_calibrated_range_saturates():
    tensors = Nvfp4Format(style="modelopt").quantize(random_weight(1, 16), largest_input=6.0)
    found = Nvfp4Format(style="modelopt").model_input(torch.full((1, 16), 60.0), [tensors])
    torch.testing.assert_close(found, torch.full((1, 16), 6.0), rtol=1e-6, atol=0)


def test_nvfp4_needs_a_calibrated_input():
    with pytest.raises(ValueError, match="largest_input is missing"):
        Nvfp4Format().quantize(random_weight(16, 16))


def test_tiny_nvfp4_groups_are_zeros_without_nan():
    weight = random_weight(4, 64)
    weight[:, :16] = 1e-12
    weight[:, 16:32] = 0
    weight_format = Nvfp4Format(quantized_input=False)
    tensors = weight_format.quantize(weight)
    found = weight_format.dequantize(tensors, torch.float32)
    assert weight_format.problems(tensors) == []
    assert not found[:, :32].any() and found[:, 32:].any() and found.isfinite().all()


@pytest.mark.parametrize("leaf", ["weight_global_scale", "input_global_scale"])
@pytest.mark.parametrize(("value", "what"), [(0.0, "zero"), (float("inf"), "infinite"), (float("nan"), "NaN")])
def test_impossible_global_scales_are_named(leaf, value, what):
    tensors = Nvfp4Format().quantize(random_weight(16, 16), largest_input=1.0)
    tensors[leaf].fill_(value)
    assert Nvfp4Format().problems(tensors) == [f"{leaf}: 1 of 1 scales are {what}, the first at [0]"]


def test_nan_block_scales_are_named():
    tensors = Nvfp4Format().quantize(random_weight(16, 32), largest_input=1.0)
    tensors["weight_scale"].view(torch.uint8)[0, 1] = 0x7F
    assert Nvfp4Format().problems(tensors) == ["weight_scale: 1 of 32 scales are NaN, the first at [1]"]


def test_mxfp4_scale_bytes_by_hand():
    """Byte 127 is 1.0 and 128 is 2.0; 126 is a half. docs/field-cases.md: UE8M0 exponent bias."""
    packed = ALL_CODES.repeat(3, 2)
    tensors = {"weight_packed": packed, "weight_scale": torch.tensor([[127], [128], [126]], dtype=torch.uint8)}
    found = Mxfp4Format().dequantize(tensors, torch.float32)
    assert found[0].tolist() == ALL_VALUES * 2
    assert found[1].tolist() == [2 * value for value in ALL_VALUES] * 2
    assert found[2].tolist() == [value / 2 for value in ALL_VALUES] * 2


def test_mxfp4_extreme_scales_are_exact():
    tensors = {"weight_packed": ALL_CODES.repeat(2, 2), "weight_scale": torch.tensor([[0], [254]], dtype=torch.uint8)}
    found = Mxfp4Format().dequantize(tensors, torch.float32)
    assert found[0, 7] == 6 * 2.0**-127
    assert found[1, 2] == 2.0**127


def test_mxfp4_is_bitwise_equal_to_compressed_tensors():
    tensors = Mxfp4Format().quantize(random_weight(32, 256))
    theirs = MXFP4PackedCompressor.decompress(dict(tensors), _scheme(MXFP4_ARGUMENTS))["weight"]

    assert theirs.dtype == torch.bfloat16 and theirs.any()
    assert torch.equal(Mxfp4Format().dequantize(tensors, torch.bfloat16), theirs)


def test_mxfp4_is_stored_as_compressed_tensors_stores_it():
    weight = random_weight(32, 256).float()
    groups = weight.unflatten(-1, (-1, 32))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), MXFP4_ARGUMENTS)
    theirs = MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale}, _scheme(MXFP4_ARGUMENTS))

    ours = Mxfp4Format().quantize(weight)
    assert torch.equal(ours["weight_scale"], theirs["weight_scale"])
    assert torch.equal(ours["weight_packed"], theirs["weight_packed"])


def test_mxfp4_is_bitwise_equal_to_torchao():
    from torchao.prototype.mx_formats.mx_tensor import to_dtype

    tensors = Mxfp4Format().quantize(random_weight(32, 256))
    theirs = to_dtype(
        tensors["weight_packed"],
        tensors["weight_scale"].view(torch.float8_e8m0fnu),
        torch.float4_e2m1fn_x2,
        32,
        torch.float32,
    )
    assert theirs.any()
    assert torch.equal(Mxfp4Format().dequantize(tensors, torch.float32), theirs)


@pytest.mark.parametrize("bias", [0, 63, 255])
def test_mxfp4_with_another_bias_is_refused(bias):
    """Refused, not silently off. docs/field-cases.md: UE8M0 exponent bias."""
    tensors = Mxfp4Format().quantize(random_weight(32, 64))
    exponent = tensors["weight_scale"].int() - 127
    shifted = tensors | {"weight_scale": (exponent + bias).clamp(0, 254).to(torch.uint8)}
    (problem,) = Mxfp4Format().problems(shifted)
    assert problem.startswith("weight_scale: the largest scale is 2^") and "another bias" in problem


def test_mxfp4_nan_scales_are_named():
    tensors = Mxfp4Format().quantize(random_weight(2, 64))
    tensors["weight_scale"][1, 1] = 255
    assert Mxfp4Format().problems(tensors) == ["weight_scale: 1 of 4 scales are NaN (byte 255)"]


def test_other_scale_dtypes_are_not_accepted():
    spec = Mxfp4Format().specs(32, 64)["weight_scale"]
    assert spec.accepts(torch.uint8) and spec.accepts(torch.float8_e8m0fnu)
    assert not spec.accepts(torch.float8_e4m3fn) and not spec.accepts(torch.float32)
    assert not Nvfp4Format().specs(32, 64)["weight_scale"].accepts(torch.uint8)


@pytest.mark.parametrize("weight_format", [Nvfp4Format(), Mxfp4Format()])
def test_widths_that_do_not_divide_are_refused(weight_format):
    with pytest.raises(ValueError, match="40 columns are no multiple of"):
        weight_format.specs(8, 40)


def test_unknown_styles_are_refused():
    with pytest.raises(ValueError, match="style 'gguf'"):
        Nvfp4Format(style="gguf")
