"""A run's tokeniser and checkpoint, looked at before Ray starts."""

import pytest
import safetensors.torch
import torch

from orbit_kernels.formats import Int4Format
from orbit_kernels.formats.scheme.write import quantization_config
from orbit_verl.driver.run_config import (
    resolve,
)
from tests.support.run_configs import edit_config


def test_wrong_tokenisers_are_refused(run_config, model):
    edit_config(model, vocab_size=16)
    with pytest.raises(ValueError, match="has 32 tokens, the model 16: it belongs to another model"):
        resolve(run_config())
    edit_config(model, vocab_size=64)
    (model / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="no chat template"):
        resolve(run_config())
    (model / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="no tokeniser can be loaded"):
        resolve(run_config())


def test_checkpoints_that_do_not_hold_what_they_say_are_refused(run_config, model):
    edit_config(model, intermediate_size=128)
    with pytest.raises(ValueError, match=r"mlp.up_proj.weight: shape \(96, 64\), expected \(128, 64\)"):
        resolve(run_config())
    edit_config(model, intermediate_size=96)
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match="model.safetensors: truncated, the bytes of these tensors are missing: model"):
        resolve(run_config())
    file.unlink()
    with pytest.raises(ValueError, match="safetensors not found"):
        resolve(run_config())


def test_scales_of_a_quantised_checkpoint_are_checked(run_config, model):
    """What no weight can have is refused by name before Ray starts.

    docs/field-cases.md: zero points and activation order; blocks that do not fit.
    """
    weight_format = Int4Format(group_size=32, scale_dtype=torch.float32)
    tensors = safetensors.torch.load_file(model / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        stored = weight_format.quantize(tensors.pop(name))
        tensors |= {f"{name.removesuffix('weight')}{leaf}": tensor for leaf, tensor in stored.items()}
    edit_config(model, quantization_config=quantization_config(weight_format, ["lm_head"]))
    safetensors.torch.save_file(tensors, model / "model.safetensors")
    resolve(run_config())
    tensors["model.layers.0.mlp.up_proj.weight_scale"][3, 1] = torch.nan
    safetensors.torch.save_file(tensors, model / "model.safetensors")
    with pytest.raises(ValueError, match="model.layers.0.mlp.up_proj.weight_scale: 1 of 192 scales are NaN"):
        resolve(run_config())
    edit_config(model, quantization_config={"quant_method": "awq"})
    with pytest.raises(ValueError, match="quant_method is 'awq'"):
        resolve(run_config())
