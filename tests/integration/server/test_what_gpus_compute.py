"""Bases that are refused before a server allocates: those of which SGLang's GPU kernels would make another model."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from orbit_kernels.checkpoint.manifest import BaseManifest
from orbit_kernels.formats import Fp8Format, Nvfp4Format
from orbit_sglang.base import stored
from orbit_sglang.startup.checkpoint_check import _check_capability, check_checkpoint
from tests.support import in_process
from tests.support.quantized import difference_from_files, quantize, stored_weights

GLOBAL_SCALES = {"nvfp4": "weight_global_scale", "nvfp4_modelopt": "weight_scale_2"}


@pytest.fixture
def copied(checkpoints, tmp_path):
    """A writable ragged Qwen3 in a style, and a function that edits its tensors."""

    def copy(style):
        folder = quantize(checkpoints.ragged("qwen3"), tmp_path / style, style)

        def edit(change):
            tensors = load_file(folder / "model.safetensors")
            change(tensors)
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

        return folder, edit

    return copy


@pytest.mark.parametrize("style", GLOBAL_SCALES)
def test_fused_parts_of_different_global_scales_are_refused_on_a_gpu(copied, style):
    """SGLang 0.5.12 multiplies q, k and v by the largest of their global scales; the trainer does not."""
    folder, edit = copied(style)
    leaf = GLOBAL_SCALES[style]
    check_checkpoint(str(folder), "cpu")
    with pytest.raises(
        ValueError, match=rf"layers\.0\.self_attn\.q_proj\.{leaf} is .*k_proj.*v_proj.*one scale.*--device cpu"
    ):
        check_checkpoint(str(folder), "cuda")

    def unify(tensors):
        for name, tensor in tensors.items():
            if name.endswith(leaf):
                tensor.fill_(0.5)

    edit(unify)
    check_checkpoint(str(folder), "cuda")


def test_nvfp4_on_a_gpu_before_blackwell_is_refused_at_the_start():
    formats = {"model.layers.0.mlp.down_proj": Nvfp4Format()}
    with pytest.raises(ValueError, match=r"down_proj: NVFP4 on a GPU of compute capability 9\.0: .* need 10\.0"):
        _check_capability(formats, (9, 0))
    _check_capability(formats, (10, 0))
    _check_capability({"model.layers.0.mlp.down_proj": Fp8Format()}, (9, 0))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_an_unquantised_linear_stored_in_bytes_is_refused(checkpoints, tmp_path, dtype):
    """SGLang would convert the codes to numbers, without a scale."""
    folder = quantize(checkpoints.ragged("qwen3"), tmp_path / "int4", "int4", plain=("down_proj",))
    check_checkpoint(str(folder), "cpu")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"{name}: dtype {dtype}"):
        check_checkpoint(str(folder), "cpu")


@pytest.mark.parametrize("style", GLOBAL_SCALES)
def test_every_fused_part_overwrites_what_memory_held(checkpoints, monkeypatch, style):
    """The scales' memory is full of 1e9 when SGLang's loader starts.

    docs/field-cases.md: global scales of a fused linear.
    """
    filled = []

    def fill(model, scheme):
        for name, parameter in model.named_parameters():
            if parameter.dtype == torch.float32 and "scale" in name:
                parameter.data.fill_(1e9)
                filled.append((name, parameter.numel()))

    monkeypatch.setattr(stored, "invalidate_scales", fill)
    folder = checkpoints.quantized("qwen3", style)
    expected = stored_weights(folder)
    with in_process.served(folder, dtype="bfloat16") as served:
        assert difference_from_files(folder, BaseManifest(**served.model.orbit_base)) is None
        qkv = served.model.get_submodule("model.layers.0.self_attn.qkv_proj").orbit_reference.parts
    assert (f"model.layers.0.self_attn.qkv_proj.{GLOBAL_SCALES[style]}", 3) in filled
    for part, held in zip("qkv", qkv, strict=True):
        scale = held.tensors[GLOBAL_SCALES[style]]
        assert torch.equal(scale, expected[f"model.layers.0.self_attn.{part}_proj"].tensors[GLOBAL_SCALES[style]])
        assert scale.item() < 1e6
