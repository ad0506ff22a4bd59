"""Scales of quantised inputs, against what SGLang's kernels compute; fused parts that share one stored scalar."""

import pytest
import torch

from orbit_kernels.formats import Fp8Format, Nvfp4Format
from orbit_kernels.formats.fp8 import reference
from tests.support.formats import random_weight


@pytest.mark.parametrize("exponent", [-100, -30, -10, 0, 10, 100])
def test_a_ue8m0_scale_is_rounded_up_however_close_to_a_power_of_two(exponent):
    """SGLang's kernel looks at the mantissa's bits; a logarithm in fp32 rounds the difference away."""
    exact = 448 * 2.0**exponent
    weight_OI = torch.full((2, 2), exact)
    weight_OI[1, 1] *= 1 + 2**-20
    _, scale = reference.quantize(weight_OI, (1, 2), power_of_two=True)
    assert scale.flatten().tolist() == [2.0**exponent, 2.0 ** (exponent + 1)]


def test_ue8m0_scales_fit_their_byte_at_both_ends():
    smallest, largest = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    weight_format = Fp8Format(block_rows=1, block_columns=2, scale_dtype="ue8m0")
    tensors = weight_format.quantize(torch.tensor([[smallest, 0.0], [largest, 0.0], [0.0, 0.0]]))
    assert weight_format.problems(tensors) == []
    stored = tensors["weight_scale_inv"].to(torch.float8_e8m0fnu).float()
    assert torch.equal(stored, tensors["weight_scale_inv"])


@pytest.mark.parametrize("style", ["modelopt", "compressed-tensors"])
def test_fused_rows_with_one_scalar_give_it_to_every_part(style):
    """Memory that held 1e9 is overwritten by the scalar, and q, k and v all get it.

    docs/field-cases.md: global scales of a fused linear.
    """
    weight_format, rows = Nvfp4Format(style=style), {"q": 32, "k": 16, "v": 16}
    weight_OI = random_weight(sum(rows.values()), 64)
    fused = weight_format.quantize(weight_OI, largest_input=3.0)
    scalars = [leaf for leaf, spec in weight_format.specs(64, 64).items() if spec.shape in ((), (1,))]
    assert len(scalars) == 2
    held = {
        leaf: torch.full_like(tensor, 1e9) if leaf in scalars else torch.empty_like(tensor)
        for leaf, tensor in fused.items()
    }
    parts, start = {}, 0
    for part, num_rows in rows.items():  # views of the memory, taken before it is filled
        parts[part] = weight_format.shard_rows(held, start, start + num_rows)
        start += num_rows
    for leaf, tensor in held.items():
        tensor.copy_(fused[leaf])

    for leaf in scalars:
        assert [part[leaf].item() for part in parts.values()] == [fused[leaf].item()] * 3
    together = torch.cat([weight_format.dequantize(part, torch.float32) for part in parts.values()])
    assert torch.equal(together, weight_format.dequantize(fused, torch.float32))
    assert (together - weight_OI.float()).abs().max() < 0.02
