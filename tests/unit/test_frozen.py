"""The frozen matmul: right, bitwise repeatable, no gradient but the input's, one GEMM each way."""

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from orbit_kernels.formats import Bf16Format, Int4Format
from orbit_kernels.frozen.product import StoredWeight, frozen_matmul
from tests.support.formats import FORMATS, random_weight, stored

MIB = 2**20
COLUMNS, ROWS = 384, (256, 128, 128)
TOKENS = 24
each_format = pytest.mark.parametrize("name", FORMATS)


def inputs(dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(TOKENS, COLUMNS, generator=generator).to(dtype).requires_grad_()


def fused(name: str) -> list[StoredWeight]:
    return [stored(FORMATS[name], rows, COLUMNS, seed) for seed, rows in enumerate(ROWS)]


def dense(parts: list[StoredWeight], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([part.dequantize(dtype) for part in parts])


@each_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_chunk_is_one_linear_to_the_bit(name, dtype):
    parts, x_TI = fused(name), inputs(dtype)
    weight_OI = dense(parts, dtype)
    gradient = torch.randn(TOKENS, sum(ROWS)).to(dtype)

    y_TO = frozen_matmul(x_TI, parts, chunk_bytes=64 * MIB, activations="none")
    y_TO.backward(gradient)

    assert torch.equal(y_TO, functional.linear(x_TI, weight_OI))
    assert torch.equal(x_TI.grad, gradient @ weight_OI)


@each_format
@pytest.mark.parametrize("chunk_kib", [40, 130, 333])
def test_chunks_give_the_same_product(name, chunk_kib):
    """The rows of a chunk cross the parts; in fp32 only the order of sums may differ."""
    parts, x_TI = fused(name), inputs(torch.float32)
    weight_OI = dense(parts, torch.float32)
    gradient = torch.randn(TOKENS, sum(ROWS))

    y_TO = frozen_matmul(x_TI, parts, chunk_bytes=chunk_kib * 1024, activations="none")
    y_TO.backward(gradient)

    torch.testing.assert_close(y_TO, functional.linear(x_TI, weight_OI), rtol=0, atol=1e-6)  # 2e-7 measured
    torch.testing.assert_close(x_TI.grad, gradient @ weight_OI, rtol=0, atol=2e-6)  # 5e-7 measured


@each_format
def test_equal_calls_are_bitwise_equal(name):
    """What makes trainer and server agree: same parts, order and budget give the same bits."""
    parts, x_TI = fused(name), inputs(torch.bfloat16)
    first = frozen_matmul(x_TI, parts, chunk_bytes=MIB // 4)
    assert torch.equal(first, frozen_matmul(x_TI.clone(), fused(name), chunk_bytes=MIB // 4))
    assert not torch.equal(first, frozen_matmul(x_TI, parts[::-1], chunk_bytes=MIB // 4))


@each_format
def test_deployed_activations_quantise_forward_and_pass_the_gradient(name):
    parts, x_TI = fused(name), inputs(torch.float32)
    plain = frozen_matmul(x_TI, parts, chunk_bytes=64 * MIB, activations="none")
    plain.backward(torch.ones_like(plain))
    gradient, x_TI.grad = x_TI.grad, None

    deployed = frozen_matmul(x_TI, parts, chunk_bytes=64 * MIB, activations="deployed")
    deployed.backward(torch.ones_like(deployed))

    fed = FORMATS[name].model_input(x_TI.detach(), [part.tensors for part in parts])
    assert torch.equal(deployed, functional.linear(fed, dense(parts, torch.float32)))
    assert torch.equal(x_TI.grad, gradient)


def test_backward_in_bf16_does_not_depend_on_the_budget_beyond_rounding():
    """Sums over chunks are kept in fp32: the error against fp64 is that of one GEMM, not of one a chunk."""
    parts = fused("int4_32")
    gradient = torch.randn(TOKENS, sum(ROWS)).bfloat16()
    exact = gradient.double() @ dense(parts, torch.bfloat16).double()
    errors = []
    for chunk_bytes in (64 * MIB, 40 * 1024):
        x_TI = inputs(torch.bfloat16)
        frozen_matmul(x_TI, parts, chunk_bytes=chunk_bytes).backward(gradient)
        errors.append((x_TI.grad.double() - exact).norm().item())
    assert 0 < errors[1] < 1.5 * errors[0]


@each_format
def test_backward_is_one_gemm_of_forwards_size(name):
    parts = fused(name)
    for chunk_bytes in (64 * MIB, 130 * 1024):
        x_TI = inputs(torch.bfloat16)
        with FlopCounterMode(display=False) as forward:
            y_TO = frozen_matmul(x_TI, parts, chunk_bytes=chunk_bytes)
        with FlopCounterMode(display=False) as backward:
            y_TO.backward(torch.ones_like(y_TO))
        assert forward.get_total_flops() == backward.get_total_flops() == 2 * TOKENS * COLUMNS * sum(ROWS)


def test_weights_receive_no_gradient_and_nothing_is_saved():
    """Autograd keeps no tensor for backward: the weight is dequantised again, the input is not needed."""
    saved = []
    parts, x_TI = fused("int4_32"), inputs(torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        frozen_matmul(x_TI, parts, chunk_bytes=MIB).sum().backward()
    assert saved == []
    assert all(tensor.grad is None for part in parts for tensor in part.tensors.values())


def test_a_plain_weight_is_read_in_place():
    weight = random_weight(256, COLUMNS)
    part = StoredWeight(Bf16Format(), 256, COLUMNS, {"weight": weight})
    x_TI = inputs(torch.bfloat16)

    # A budget of one byte holds no row: nothing may be dequantised.
    y_TO = frozen_matmul(x_TI, [part], chunk_bytes=1)
    y_TO.backward(torch.ones_like(y_TO))

    assert torch.equal(y_TO, functional.linear(x_TI, weight))


def test_a_budget_below_one_row_is_refused():
    with pytest.raises(ValueError, match=r"3000 bytes .* raise the chunk budget"):
        frozen_matmul(inputs(torch.bfloat16), fused("int4_32"), chunk_bytes=3000)


def test_parts_of_different_formats_are_refused():
    parts = [stored(FORMATS["int4_32"], 128, COLUMNS), stored(FORMATS["int4_128"], 128, COLUMNS)]
    with pytest.raises(ValueError, match="different formats.*quantise all parts"):
        frozen_matmul(inputs(torch.bfloat16), parts, chunk_bytes=MIB)


def test_half_precision_inputs_are_multiplied_in_half_precision():
    part, x_TI = stored(FORMATS["int4_32"], 128, COLUMNS), inputs(torch.float16)
    y_TO = frozen_matmul(x_TI, [part], chunk_bytes=MIB)
    assert torch.equal(y_TO, functional.linear(x_TI, part.dequantize(torch.float16)))


def test_inputs_of_another_width_or_shape_are_refused():
    parts = fused("int4_32")
    for x in (torch.zeros(3, COLUMNS + 32), torch.zeros(2, 3, COLUMNS)):
        with pytest.raises(ValueError, match="frozen_matmul: input"):
            frozen_matmul(x, parts, chunk_bytes=MIB)
    with pytest.raises(ValueError, match="no parts"):
        frozen_matmul(torch.zeros(3, COLUMNS), [], chunk_bytes=MIB)


def test_a_stored_weight_must_be_what_its_format_says():
    """A mismatched group size is an error. docs/field-cases.md: the same dequantised bits."""
    tensors = dict(stored(Int4Format(group_size=32), 128, COLUMNS).tensors)
    with pytest.raises(ValueError, match=r"weight_scale of int4 weight .*\(128, 12\), must be .*\(128, 3\)"):
        StoredWeight(Int4Format(group_size=128), 128, COLUMNS, tensors)
    with pytest.raises(ValueError, match="weight_scale of int4 weight .* must be torch.bfloat16"):
        float_scale = tensors | {"weight_scale": tensors["weight_scale"].float()}
        StoredWeight(Int4Format(group_size=32), 128, COLUMNS, float_scale)
    with pytest.raises(ValueError, match="needs .*weight_zero_point"):
        StoredWeight(Int4Format(group_size=32, symmetric=False), 128, COLUMNS, tensors)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@each_format
def test_a_gpu_dequantises_to_the_same_bits(name):
    part = stored(FORMATS[name], 256, COLUMNS)
    moved = StoredWeight(part.format, 256, COLUMNS, {leaf: tensor.cuda() for leaf, tensor in part.tensors.items()})
    x_TI = inputs(torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(moved.dequantize(dtype).cpu(), part.dequantize(dtype))
    fed = part.format.model_input(x_TI.detach(), [part.tensors])
    assert torch.equal(moved.format.model_input(x_TI.detach().cuda(), [moved.tensors]).cpu(), fed)
    on_gpu = frozen_matmul(x_TI.detach().cuda(), [moved], chunk_bytes=MIB // 4).cpu()
    torch.testing.assert_close(on_gpu, frozen_matmul(x_TI, [part], chunk_bytes=MIB // 4), rtol=2e-2, atol=2e-2)
