import pytest
import torch
from peft.tuners.oft.layer import OFTRotationModule

from orbit_kernels.adapters import OFTMethod
from orbit_kernels.adapters.config import AdapterConfig
from orbit_kernels.adapters.oft import reference as oft
from orbit_kernels.adapters.oft.method import num_blocks, num_entries

BLOCK, WIDTH = 16, 64
MODES = (2, 3, 4, 5, 8, None)


def entries(scale, dtype=torch.float64, blocks=WIDTH // BLOCK, block=BLOCK):
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(blocks, num_entries(block), generator=generator, dtype=torch.float64) * scale).to(dtype)


def peft_rotation(values, terms):
    """peft's own rotation module with the same entries."""
    module = OFTRotationModule(
        WIDTH // BLOCK,
        num_entries(BLOCK),
        BLOCK,
        WIDTH,
        use_cayley_neumann=terms is not None,
        num_cayley_neumann_terms=terms or 5,
    )
    module.weight.data = values.clone()
    return module


@pytest.mark.parametrize("terms", MODES)
def test_rotation_and_its_gradient_equal_pefts(terms):
    values = entries(0.1, torch.float32).requires_grad_(True)
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)
    theirs = peft_rotation(values.detach(), terms)
    ours = oft.rotate(x, oft.rotation(values, BLOCK, terms))
    expected = theirs(x)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    weight = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2))
    grad_values, grad_x = torch.autograd.grad((ours * weight).sum(), (values, x))
    expected_values, expected_x = torch.autograd.grad((expected * weight).sum(), (theirs.weight, x))
    torch.testing.assert_close(grad_values, expected_values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad_x, expected_x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("terms", (3, 5, None))
def test_backward_equals_finite_differences(terms):
    values = entries(0.1, blocks=2, block=4).requires_grad_(True)
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v, t: oft.rotate(t, oft.rotation(v, 4, terms)), (values, x))


def test_blocks_are_skew_symmetric_row_by_row():
    q = oft.skew_symmetric(torch.tensor([[1.0, 2.0, 3.0]]), 3)[0]
    assert q.tolist() == [[0, 1, 2], [-1, 0, 3], [-2, -3, 0]]


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("terms", MODES)
def test_zero_entries_are_the_identity_bit_for_bit(terms, dtype):
    x = torch.randn(7, WIDTH).to(dtype)
    assert torch.equal(oft.rotate(x, oft.rotation(entries(0.0, dtype), BLOCK, terms)), x)


@pytest.mark.parametrize("entries_dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("input_dtype", (torch.bfloat16, torch.float32))
def test_output_dtype_is_the_inputs(input_dtype, entries_dtype):
    """docs/field-cases.md: dtype and Cayley mode."""
    r = oft.rotation(entries(0.1, entries_dtype), BLOCK, 5)
    assert r.dtype == torch.float32
    assert oft.rotate(torch.randn(3, WIDTH).to(input_dtype), r).dtype == input_dtype


def test_cayley_mode_is_stored_and_honoured():
    """docs/field-cases.md: dtype and Cayley mode."""
    values = entries(0.3)
    results = []
    for terms in (5, 8, None):
        config = AdapterConfig.from_peft_json(
            AdapterConfig(method=OFTMethod(cayley_neumann_terms=terms)).to_peft_json()
        )
        assert config.method.cayley_neumann_terms == terms
        results.append(oft.rotation(values, BLOCK, config.method.cayley_neumann_terms))
    assert (results[0] - results[1]).abs().max() > 1e-2
    assert (results[1] - results[2]).abs().max() > 1e-2


@pytest.mark.parametrize("terms", (5, None))
def test_merge_equals_the_rotated_forward(terms):
    """docs/field-cases.md: merged adapter."""
    generator = torch.Generator().manual_seed(3)
    weight, x = torch.randn(48, WIDTH, generator=generator), torch.randn(9, WIDTH, generator=generator)
    r = oft.rotation(entries(0.1, torch.float32), BLOCK, terms)
    merged = oft.merge(weight, r)
    assert (merged - weight).abs().max() > 0.1
    torch.testing.assert_close(x @ merged.T, oft.rotate(x, r) @ weight.T, rtol=0, atol=1e-5 * weight.norm().item())


@pytest.mark.parametrize("peft_type", ("ADALORA", "BOFT", None))
def test_an_unknown_format_is_refused(peft_type):
    """docs/field-cases.md: merged adapter."""
    with pytest.raises(ValueError, match=f"peft_type {peft_type!r}"):
        AdapterConfig.from_peft({"peft_type": peft_type})


@pytest.mark.parametrize(("width", "block"), ((37, 8), (10944 // 4, 32)))
def test_a_block_that_does_not_divide_is_refused(width, block):
    """10944 columns on four ranks are 85.5 blocks of 32 on each. docs/field-cases.md: width and block size."""
    with pytest.raises(ValueError, match=f"down_proj: width {width} is not a multiple of the OFT block size {block}"):
        num_blocks(width, block, "down_proj")
    assert num_blocks(10944, 32) == 342


@pytest.mark.parametrize(("norm", "expected"), ((0.16, 2e-3), (0.37, 5e-2), (0.60, 0.36), (1.43, 13.0)))
def test_orthogonality_error_of_the_series_grows_with_q(norm, expected):
    """One block of 16, entries scaled to a spectral norm of Q. docs/field-cases.md: Neumann series."""
    values = entries(1.0, blocks=1)
    values *= norm / torch.linalg.matrix_norm(oft.skew_symmetric(values, BLOCK), 2).item()
    error = oft.orthogonality_error(oft.rotation(values, BLOCK, 5)).item()
    assert expected / 2 < error < expected * 2
    assert oft.orthogonality_error(oft.rotation(values, BLOCK, None)).item() < 1e-12


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_rotation_on_cuda_is_the_one_on_cpu(dtype, tolerance):
    """Against fp64 on the CPU; BF16 rounds inputs, blocks and outputs to 8 bits."""
    generator = torch.Generator().manual_seed(0)
    entries = torch.randn(8, num_entries(32), generator=generator) * 0.02
    x = torch.randn(64, 256, generator=generator)
    expected = oft.rotate(x.double(), oft.rotation(entries.double(), 32, 5))
    got = oft.rotate(x.cuda().to(dtype), oft.rotation(entries.cuda(), 32, 5)).cpu().double()
    assert (got - expected).abs().max() < tolerance * expected.abs().max()
