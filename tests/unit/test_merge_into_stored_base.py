"""Adapters merged into a base that is stored in low precision."""

import pytest
import torch
from torch.nn import functional

from orbit_cli.rounding_errors import LinearError
from orbit_kernels.adapters import LoRAMethod, OFTMethod
from orbit_kernels.adapters.lora import reference as lora
from orbit_kernels.adapters.oft import reference as oft
from orbit_kernels.formats import Nvfp4Format
from orbit_kernels.frozen.product import StoredWeight, frozen_matmul
from tests.support.formats import FORMATS, stored

ROWS, COLUMNS, BUDGET = 128, 384, 64 << 20
METHODS = {"oft": OFTMethod(block_size=32), "lora": LoRAMethod(rank=4, alpha=8)}
LOW_PRECISION = [name for name in FORMATS if name not in ("bf16", "fp32")]


def trained(method):
    draw = torch.Generator().manual_seed(1)
    return {leaf: 0.1 * torch.randn(shape, generator=draw) for leaf, shape in method.shapes(ROWS, COLUMNS).items()}


def on_the_stored_base(method, x_TI, part, tensors):
    """What trainer and server compute: the adapter around the product with the stored weight."""
    if isinstance(method, OFTMethod):
        x_TI, update_TO = oft.rotate(x_TI, method.rotation(tensors)), 0
    else:
        update_TO = lora.update(x_TI, tensors["lora_A"], lora.scaled(tensors["lora_B"], method.scaling))
    return frozen_matmul(x_TI, [part], chunk_bytes=BUDGET, activations="none") + update_TO


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("name", LOW_PRECISION)
def test_merged_into_the_dequantised_base_it_is_the_adapter_on_the_stored_one(name, method):
    """Stored again, the rounding error is the one that ``orbit quantize`` reports.

    docs/field-cases.md: merge into a stored base.
    """
    part, tensors = stored(FORMATS[name], ROWS, COLUMNS), trained(method)
    x_TI = torch.randn(9, COLUMNS, generator=torch.Generator().manual_seed(2))
    base_OI = part.dequantize(torch.float32)
    merged_OI = method.merge(base_OI, tensors)

    adapted_TO = on_the_stored_base(method, x_TI, part, tensors)
    # Relative to the output: 4e-7 measured.
    error = (functional.linear(x_TI, merged_OI) - adapted_TO).norm() / adapted_TO.norm()
    assert error <= 2e-6
    assert (functional.linear(x_TI, base_OI) - adapted_TO).norm() > 0.1 * adapted_TO.norm()

    needs_input_scale = isinstance(part.format, Nvfp4Format) and part.format.quantized_input
    inputs = {"largest_input": 4.0} if needs_input_scale else {}
    again, report = StoredWeight(part.format, ROWS, COLUMNS, part.format.quantize(merged_OI, **inputs)), LinearError()
    report.count(merged_OI, again)
    exact = (again.dequantize(torch.float32) - merged_OI).norm() / merged_OI.norm()
    assert report.rms_relative == pytest.approx(exact.item(), rel=1e-4)
    assert 0.01 < report.rms_relative < 0.2
