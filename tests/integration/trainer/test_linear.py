"""One frozen linear: stored parts, rotations, rounded inputs and chunks against the same sums written out."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from orbit_kernels.formats import Bf16Format, Nvfp4Format
from orbit_kernels.linears.share import Share
from orbit_verl.config.keys import BaseSettings
from orbit_verl.model.linear import FrozenLinear
from tests.support.quantized import DIVISIBLE_FORMATS as FORMATS

ROWS, WIDTH, TOKENS = {"q_proj": 192, "k_proj": 64, "v_proj": 64}, 160, 12
ALL_FORMATS = {"bf16": Bf16Format(dtype=torch.float32)} | {
    name: found for name, found in FORMATS.items() if not name.startswith("int4")
}
ALL_FORMATS |= {name: FORMATS[name] for name in ("int4", "int4_asymmetric")}


def make_linear(name, rows=ROWS, width=WIDTH, **base):
    """A linear of random weights whose parts expect inputs of different size."""
    generator = torch.Generator().manual_seed(0)
    weight_format = ALL_FORMATS[name]
    shares = {part: Share.whole(leaf_rows, width) for part, leaf_rows in rows.items()}
    linear = FrozenLinear(
        width, sum(rows.values()), shares=shares, weight_format=weight_format, base=BaseSettings(**base), bias=False
    )
    for part, (leaf_rows, largest_input) in enumerate(zip(rows.values(), (3.0, 5.0, 4.0), strict=True)):
        options = {"largest_input": largest_input} if isinstance(weight_format, Nvfp4Format) else {}
        weight_OI = torch.randn(leaf_rows, width, generator=generator)
        stored = list(linear.stored_parts().values())[part]
        for leaf, tensor in weight_format.quantize(weight_OI, **options).items():
            stored.tensors[leaf].copy_(tensor)
    return linear


def make_input(width=WIDTH, tokens=TOKENS):
    return torch.randn(tokens, 1, width, generator=torch.Generator().manual_seed(1)).requires_grad_(True)


class Scaling(nn.Module):
    """Stands where an adapter stands: one factor for all parts, or one for each, whose gradient can be written out."""

    def __init__(self, *factors):
        super().__init__()
        self.factors = factors

    def inputs(self, x_SBI):
        return [x_SBI * factor for factor in self.factors]

    def output(self, x_SBI, y_SBO):
        return y_SBO


@pytest.mark.parametrize("activations", ("deployed", "none"))
@pytest.mark.parametrize("fused", ("plain", "tied", "split"))
@pytest.mark.parametrize("name", ALL_FORMATS)
def test_output_and_input_gradient_are_those_written_out(name, fused, activations):
    """A rounded input has the identity's gradient; its scale is one for all parts, whatever rotation each part has."""
    linear, x_SBI = make_linear(name, activations=activations), make_input()
    factors = {"plain": (1.0, 1.0, 1.0), "tied": (0.7, 0.7, 0.7), "split": (0.7, 1.0, 1.3)}[fused]
    if fused != "plain":
        linear.adapter = Scaling(*factors[: 1 if fused == "tied" else 3])
    grad_SBO = torch.randn(TOKENS, 1, sum(ROWS.values()), generator=torch.Generator().manual_seed(2))
    y_SBO, _ = linear(x_SBI)
    y_SBO.backward(grad_SBO)

    parts = list(linear.stored_parts().values())
    outputs, gradient_TI = [], torch.zeros(TOKENS, WIDTH)
    for part, factor, grad_TO in zip(parts, factors, grad_SBO[:, 0].split(list(ROWS.values()), dim=-1), strict=True):
        input_TI = x_SBI.detach()[:, 0] * factor
        if activations == "deployed":
            input_TI = part.format.model_input(input_TI, [other.tensors for other in parts])
        weight_OI = part.dequantize(torch.float32)
        outputs.append(input_TI @ weight_OI.T)
        gradient_TI += factor * (grad_TO @ weight_OI)
    torch.testing.assert_close(y_SBO[:, 0], torch.cat(outputs, dim=-1), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(x_SBI.grad[:, 0], gradient_TI, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ALL_FORMATS)
def test_backward_costs_one_product_of_the_forwards_size(name):
    linear, x_SBI = make_linear(name), make_input()
    with FlopCounterMode(display=False) as forward:
        y_SBO, _ = linear(x_SBI)
    with FlopCounterMode(display=False) as backward:
        y_SBO.sum().backward()
    assert forward.get_total_flops() == 2 * TOKENS * WIDTH * sum(ROWS.values())
    assert backward.get_total_flops() == forward.get_total_flops()


@pytest.mark.parametrize("name", ("fp8", "int4", "nvfp4", "mxfp4"))
def test_a_smaller_budget_makes_more_chunks_of_the_same_sum(name):
    rows = {"q_proj": 768, "k_proj": 320, "v_proj": 320}
    results = {}
    for megabytes in (64, 1):
        linear = make_linear(name, rows, 1024, dequant_chunk_mb=megabytes)
        x_SBI = make_input(1024)
        with counted_products() as products:
            y_SBO, _ = linear(x_SBI)
        y_SBO.square().sum().backward()
        results[megabytes] = y_SBO.detach(), x_SBI.grad, len(products)
    assert results[64][2] == 1 and results[1][2] > 5  # 5.8 MB of fp32 weights
    for chunked, whole in zip(results[1][:2], results[64][:2], strict=True):
        assert (chunked - whole).norm() <= 1e-6 * whole.norm()  # measured 3e-7


@contextlib.contextmanager
def counted_products():
    """The matrix products that the body makes, as they reach PyTorch's dispatcher."""
    found = []

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                found.append(func)
            return func(*args, **(kwargs or {}))

    with Counter():
        yield found


def test_unquantised_parts_share_one_buffer_and_packed_ones_do_not():
    assert len(make_linear("bf16").stacks) == 1
    assert len(make_linear("int4").stacks) == 3
    plain = make_linear("bf16")
    parts = plain.stored_parts()
    base = plain.stacks[0].weight
    assert parts["k_proj"].tensors["weight"].data_ptr() == base[ROWS["q_proj"]].data_ptr()
