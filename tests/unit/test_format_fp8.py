"""FP8 with block scales: values by hand, ragged edges, sharding, the deployed kernel's input."""

import pytest
import torch

from orbit_kernels.formats import Fp8Format
from orbit_kernels.formats.fp8.reference import decode
from tests.support.formats import random_weight

FP8 = torch.float8_e4m3fn


def test_every_code_is_decoded_as_torch_does():
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    assert torch.equal(decode(codes).nan_to_num(7777.0), codes.float().nan_to_num(7777.0))


def test_values_by_hand():
    """Blocks of 2x2 on 3x3: the last row and column of blocks are short."""
    weight = torch.tensor([[1.0, -2.0, 3.0], [0.5, 448.0, -1.5], [4.0, 5.0, 6.0]]).to(FP8)
    scale = torch.tensor([[2.0, 0.5], [10.0, 0.25]])

    found = Fp8Format(block_rows=2, block_columns=2).dequantize(
        {"weight": weight, "weight_scale_inv": scale}, torch.float32
    )

    assert found.tolist() == [[2.0, -4.0, 1.5], [1.0, 896.0, -0.75], [40.0, 50.0, 1.5]]


def test_ragged_rows_of_deepseek():
    """10944x2048 has a grid of 86x16 whose last row of blocks covers 64 rows.

    docs/field-cases.md: blocks that do not fit.
    """
    rows, columns = 10944, 2048
    weight_format = Fp8Format()
    assert weight_format.specs(rows, columns)["weight_scale_inv"].shape == (86, 16)
    weight = torch.randint(0, 127, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tensors = {"weight": weight.view(FP8), "weight_scale_inv": torch.arange(1.0, 86 * 16 + 1).view(86, 16)}

    last = weight_format.dequantize(tensors, torch.float32, slice(10816, 10944))

    scale = tensors["weight_scale_inv"].repeat_interleave(128, 0)[10816:10944].repeat_interleave(128, 1)
    assert torch.equal(last, tensors["weight"][10816:].float() * scale)
    assert (last[-64:] != tensors["weight"][-64:].float() * scale[:64]).any()


def test_a_shard_may_end_in_the_ragged_block():
    weight_format = Fp8Format()
    tensors = weight_format.quantize(random_weight(320, 200))
    shard = weight_format.shard_rows(tensors, 256, 320)
    assert shard["weight_scale_inv"].shape == (1, 2)
    assert torch.equal(
        weight_format.dequantize(shard, torch.float32), weight_format.dequantize(tensors, torch.float32)[256:]
    )
    columns = weight_format.shard_columns(tensors, 128, 200)
    assert torch.equal(
        weight_format.dequantize(columns, torch.float32), weight_format.dequantize(tensors, torch.float32)[:, 128:]
    )


def test_a_rank_that_would_cut_a_block_is_refused():
    """768 rows at TP 4 are 192 a rank, one and a half blocks. docs/field-cases.md: blocks that do not fit."""
    tensors = Fp8Format().quantize(random_weight(768, 128))
    for rank in range(4):
        with pytest.raises(ValueError, match=r"cuts a block of 128 rows.*shard at multiples of 128"):
            Fp8Format().shard_rows(tensors, 192 * rank, 192 * (rank + 1))
    assert Fp8Format().shard_rows(tensors, 384, 768)["weight_scale_inv"].shape == (3, 1)


def test_ue8m0_scales_are_powers_of_two():
    tensors = Fp8Format(scale_dtype="ue8m0").quantize(random_weight(256, 256))
    assert (torch.frexp(tensors["weight_scale_inv"]).mantissa == 0.5).all()
    assert Fp8Format(scale_dtype="ue8m0").problems(tensors) == []

    odd = tensors | {"weight_scale_inv": tensors["weight_scale_inv"] * 1.5}
    assert Fp8Format(scale_dtype="ue8m0").problems(odd) == [
        "weight_scale_inv: not all powers of two, although scale_fmt is ue8m0"
    ]
    assert Fp8Format().problems(odd) == []


@pytest.mark.parametrize(
    ("value", "what"), [(float("nan"), "NaN"), (float("inf"), "infinite"), (-1.0, "negative"), (0.0, "zero")]
)
def test_impossible_scales_are_named(value, what):
    tensors = Fp8Format().quantize(random_weight(256, 256))
    tensors["weight_scale_inv"][1, 0] = value
    assert Fp8Format().problems(tensors) == [f"weight_scale_inv: 1 of 4 scales are {what}, the first at [1, 0]"]


def test_nan_codes_are_counted():
    tensors = Fp8Format().quantize(random_weight(8, 8))
    tensors["weight"].view(torch.uint8)[0, :2] = torch.tensor([0x7F, 0xFF], dtype=torch.uint8)
    assert Fp8Format().problems(tensors) == ["weight: 2 of 64 values are NaN"]


def test_a_block_of_zeros_is_stored_exactly():
    weight = random_weight(256, 128)
    weight[:128] = 0
    tensors = Fp8Format().quantize(weight)
    assert Fp8Format().problems(tensors) == []
    assert not Fp8Format().dequantize(tensors, torch.float32)[:128].any()


def test_the_input_has_a_scale_for_each_token_and_group():
    """By hand: 448 -> 448 with scale 1; 1.0 of a group whose largest is 448 keeps 3 bits of mantissa."""
    x_TI = torch.zeros(2, 256)
    x_TI[0, :3] = torch.tensor([448.0, 1.07, -0.3])
    x_TI[0, 128:131] = torch.tensor([0.448, 0.00107, -0.0003])
    x_TI[1, 0] = 1.0

    fed = Fp8Format().model_input(x_TI, [])

    assert fed[0, :3].tolist() == [448.0, 1.125, -0.3125]
    torch.testing.assert_close(fed[0, 128:131], torch.tensor([0.448, 0.001125, -0.0003125]), rtol=1e-6, atol=0)
    assert fed[1, 0] == 1.0 and not fed[1, 1:].any()


def test_a_token_is_quantised_alone():
    x_TI = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    fed = Fp8Format().model_input(x_TI, [])
    assert fed.dtype == torch.bfloat16
    for token in range(5):
        assert torch.equal(Fp8Format().model_input(x_TI[token : token + 1], [])[0], fed[token])
    relative = ((fed - x_TI).float().norm() / x_TI.float().norm()).item()
    assert 0.01 < relative < 0.04  # 0.027 measured


def test_ue8m0_inputs_have_scales_of_powers_of_two():
    """A largest input of 448.5 needs a scale of 2, with which 1.0 becomes 0.5: exact."""
    x_TI = torch.tensor([[449.0, 1.0] + [0.0] * 126])
    assert Fp8Format(scale_dtype="ue8m0").model_input(x_TI, [])[0, :2].tolist() == [448.0, 1.0]


@pytest.mark.parametrize("arguments", [{"block_rows": 0}, {"scale_dtype": "bfloat16"}])
def test_impossible_settings_are_refused(arguments):
    with pytest.raises(ValueError, match="FP8"):
        Fp8Format(**arguments)
