"""``orbit quantize`` on weights that no format can hold."""

import json

import pytest
import torch
from safetensors.torch import save_file

from orbit_cli.quantize import quantize_checkpoint
from tests.support.formats import random_weight

UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["fp8", "int4", "mxfp4"])
def test_a_weight_that_is_not_finite_is_refused_by_name(name, value, tmp_path):
    """Rounded like any other number, it would become a wrong and finite weight, or spoil the scale of its group."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    weight_OI = random_weight(128, 256)
    weight_OI[5, 7] = value
    save_file({f"{UP}.weight": weight_OI}, source / "model.safetensors")

    with pytest.raises(ValueError, match=rf"{UP}\.weight: 1 of 32768 values are NaN or infinite"):
        quantize_checkpoint(source, tmp_path / "out", format_name=name)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
