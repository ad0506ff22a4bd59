"""What holds for every weight format."""

import json

import pytest
import torch

from orbit_kernels.formats import Bf16Format, Int4Format, Nvfp4Format
from orbit_kernels.frozen.product import StoredWeight
from tests.support.formats import FORMATS, LARGEST_ERROR, quantize, random_weight

ROWS, COLUMNS = 256, 384
each_format = pytest.mark.parametrize("name", FORMATS)


@pytest.fixture(scope="module")
def weight_OI():
    return random_weight(ROWS, COLUMNS)


@pytest.fixture(scope="module")
def stored_tensors(weight_OI):
    return {name: quantize(weight_format, weight_OI) for name, weight_format in FORMATS.items()}


@each_format
def test_stored_tensors_are_what_the_specs_say(name, stored_tensors):
    specs = FORMATS[name].specs(ROWS, COLUMNS)

    assert stored_tensors[name].keys() == specs.keys()
    for leaf, spec in specs.items():
        tensor = stored_tensors[name][leaf]
        assert (tuple(tensor.shape), tensor.dtype, tensor.nbytes) == (spec.shape, spec.dtype, spec.nbytes), leaf


@each_format
def test_rounding_error_is_that_of_the_format(name, stored_tensors, weight_OI):
    error = FORMATS[name].dequantize(stored_tensors[name], torch.float32) - weight_OI.float()

    largest = (error.abs().max() / weight_OI.float().square().mean().sqrt()).item()
    assert largest <= LARGEST_ERROR[name]
    assert largest > LARGEST_ERROR[name] / 4 or name in ("bf16", "fp32")


@each_format
def test_dequantised_weights_are_stored_again_with_the_same_values(name, stored_tensors, weight_OI):
    """The exact inverse, where the format allows: what is representable is kept to the bit."""
    weight_format = FORMATS[name]
    once = weight_format.dequantize(stored_tensors[name], torch.float32)
    if isinstance(weight_format, Nvfp4Format):
        # Its own largest weight need not be the one that the global scale was made for.
        again = weight_format.quantize(once, largest_weight=weight_OI.abs().max().item(), largest_input=4.0)
    else:
        again = weight_format.quantize(once)

    twice = weight_format.dequantize(again, torch.float32)
    if isinstance(weight_format, Int4Format):
        # The largest of 16 codes is -8 of a group whose scale was made for 7.5: the scale is not found again.
        assert (twice - once).abs().max() <= (once.abs().max() / 7.5)
    else:
        assert torch.equal(twice, once)


@each_format
def test_lower_precision_is_one_rounding_of_fp32(name, stored_tensors):
    exact = FORMATS[name].dequantize(stored_tensors[name], torch.float32)
    assert torch.equal(FORMATS[name].dequantize(stored_tensors[name], torch.bfloat16), exact.bfloat16())


@each_format
@pytest.mark.parametrize("rows", [slice(0, 1), slice(13, 201), slice(255, 256), slice(128, 256)])
def test_some_rows_are_those_of_all(name, rows, stored_tensors):
    weight_format, tensors = FORMATS[name], stored_tensors[name]
    assert torch.equal(
        weight_format.dequantize(tensors, torch.float32, rows), weight_format.dequantize(tensors, torch.float32)[rows]
    )


@each_format
@pytest.mark.parametrize("start", [0, 128])
def test_a_shard_of_rows_is_a_slice_of_the_weight(name, start, stored_tensors):
    weight_format, tensors = FORMATS[name], stored_tensors[name]
    shard = weight_format.shard_rows(tensors, start, start + 128)

    assert StoredWeight(weight_format, 128, COLUMNS, shard)
    assert weight_format.problems(shard) == []
    assert torch.equal(
        weight_format.dequantize(shard, torch.float32),
        weight_format.dequantize(tensors, torch.float32)[start : start + 128],
    )


@each_format
@pytest.mark.parametrize("start", [0, 128, 256])
def test_a_shard_of_columns_is_a_slice_of_the_weight(name, start, stored_tensors):
    weight_format, tensors = FORMATS[name], stored_tensors[name]
    shard = weight_format.shard_columns(tensors, start, start + 128)

    assert StoredWeight(weight_format, ROWS, 128, shard)
    assert weight_format.problems(shard) == []
    assert torch.equal(
        weight_format.dequantize(shard, torch.float32),
        weight_format.dequantize(tensors, torch.float32)[:, start : start + 128],
    )


@each_format
@pytest.mark.parametrize("bounds", [(-1, 128), (128, 128), (0, ROWS + 1)])
def test_a_shard_outside_the_weight_is_refused(name, bounds, stored_tensors):
    with pytest.raises(ValueError, match="not a range inside"):
        FORMATS[name].shard_rows(stored_tensors[name], *bounds)


@pytest.mark.parametrize("name", [name for name, value in FORMATS.items() if not isinstance(value, Bf16Format)])
def test_a_shard_that_cuts_a_group_of_columns_is_refused(name, stored_tensors):
    with pytest.raises(ValueError, match="shard at multiples of"):
        FORMATS[name].shard_columns(stored_tensors[name], 0, 200)


@each_format
def test_sound_tensors_have_no_problems(name, stored_tensors):
    assert FORMATS[name].problems(stored_tensors[name]) == []


def test_descriptions_are_json_and_tell_the_formats_apart():
    texts = {json.dumps(weight_format.describe(), sort_keys=True) for weight_format in FORMATS.values()}
    assert len(texts) == len(FORMATS)


@each_format
def test_formats_are_equal_by_value(name):
    weight_format = FORMATS[name]
    assert hash(weight_format) == hash(type(weight_format)(**vars(weight_format)))
    assert weight_format == type(weight_format)(**vars(weight_format))


@each_format
def test_the_input_of_a_weight_only_format_is_left_alone(name, stored_tensors):
    x_TI = torch.linspace(-1, 1, 4 * COLUMNS).view(4, COLUMNS)
    quantizes = name.startswith("fp8") or name in ("nvfp4", "nvfp4_modelopt")

    fed = FORMATS[name].model_input(x_TI, [stored_tensors[name]])

    assert (fed is not x_TI) == quantizes
    assert (fed != x_TI).any() == quantizes
