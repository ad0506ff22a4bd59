"""Quantised checkpoints that must not be trained on: refused with the tensor's name before anything is allocated."""

import json
import shutil

import pytest
import safetensors.torch
import torch
from transformers import AutoConfig

from orbit_kernels.families import read_architecture
from orbit_verl.model.naming import named_tensors
from orbit_verl.model.tensors import linear_formats, open_checkpoint
from orbit_verl.worker.base_manifest import base_manifest
from tests.support.engines import log_probs, make_engine, max_difference, sequences
from tests.support.quantized import change_config, quantize, weight_format

BF16 = torch.bfloat16
UP = "model.layers.1.mlp.up_proj"


@pytest.fixture
def copied(quantized, tmp_path):
    """A writable copy of the tiny Qwen3 in a format, and a function that edits its tensors."""

    def copy(name):
        folder = shutil.copytree(quantized("qwen3", name, BF16), tmp_path / "copy")

        def edit(change):
            file = folder / "model.safetensors"
            tensors = safetensors.torch.load_file(file)
            change(tensors)
            safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})

        return folder, edit

    return copy


def check(folder):
    """What a run does before Ray starts, and the engine before it allocates."""
    open_checkpoint(read_architecture(AutoConfig.from_pretrained(folder)), folder)


def fill(name, index, value):
    def change(tensors):
        raw = tensors[name]
        raw[index] = value

    return change


@pytest.mark.parametrize(
    ("name", "change", "message"),
    (
        ("int4", lambda t: t.pop(f"{UP}.weight_scale"), f"{UP}.weight_scale: missing"),
        ("int4", lambda t: t.update({f"{UP}.weight_g_idx": torch.zeros(64, dtype=torch.int32)}), "g_idx: superfluous"),
        (
            "int4",
            lambda t: t.update({f"{UP}.weight_scale": t[f"{UP}.weight_scale"].T.contiguous()}),
            rf"{UP}.weight_scale: shape \(2, 96\), expected \(96, 2\)",
        ),
        ("int4", fill(f"{UP}.weight_scale", (5, 1), torch.nan), rf"{UP}.weight_scale: 1 of 192 scales are NaN"),
        ("int4", fill(f"{UP}.weight_shape", 0, 95), rf"{UP}.weight_shape: \[95, 64\]"),
        ("fp8", lambda t: t.pop(f"{UP}.weight_scale_inv"), f"{UP}.weight_scale_inv: missing"),
        ("fp8", fill(f"{UP}.weight_scale_inv", (0, 0), -1.0), f"{UP}.weight_scale_inv: 1 of 1 scales are negative"),
        ("nvfp4", fill(f"{UP}.weight_global_scale", 0, torch.inf), f"{UP}.weight_global_scale: .* infinite"),
        ("nvfp4", lambda t: t.pop(f"{UP}.input_global_scale"), f"{UP}.input_global_scale: missing"),
        ("mxfp4", fill(f"{UP}.weight_scale", (0, 0), 255), f"{UP}.weight_scale: .*NaN"),
        (
            "mxfp4",
            lambda t: t.update({f"{UP}.weight_scale": t[f"{UP}.weight_scale"].float()}),
            f"{UP}.weight_scale: dtype torch.float32",
        ),
    ),
)
def test_impossible_tensors_are_refused_by_name(copied, name, change, message):
    folder, edit = copied(name)
    check(folder)
    edit(change)
    with pytest.raises(ValueError, match=message):
        check(folder)
    with pytest.raises(ValueError, match=message):
        make_engine(folder)


def test_a_truncated_file_names_the_tensors_that_are_cut(copied):
    folder, _ = copied("int4")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(
        ValueError, match="model.safetensors: truncated, the bytes of these tensors are missing: .*model"
    ):
        check(folder)


def test_another_group_size_than_the_files_is_refused(copied):
    """The configuration says 16 or 64, the tensors say 32. docs/field-cases.md: the same dequantised bits."""
    folder, _ = copied("int4")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    config["config_groups"]["group_0"]["weights"]["group_size"] = 16
    change_config(folder, quantization_config=config)
    with pytest.raises(ValueError, match=rf"{UP}.weight_scale: shape \(96, 2\), expected \(96, 4\)"):
        check(folder)
    config["config_groups"]["group_0"]["weights"]["group_size"] = 64
    change_config(folder, quantization_config=config)
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.down_proj: .*96 columns are no multiple of 64"):
        check(folder)


@pytest.mark.parametrize(
    ("quantization", "message"),
    (
        ({"quant_method": "gptq"}, "quant_method is 'gptq'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
        ({"quant_method": "fp8", "weight_block_size": None}, "weight_block_size"),
    ),
)
def test_unknown_quantisations_are_refused(copied, quantization, message):
    folder, _ = copied("fp8")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    change_config(folder, quantization_config=config | quantization)
    with pytest.raises(ValueError, match=message):
        check(folder)


def test_nothing_is_allocated_for_a_model_that_does_not_fit(copied):
    """Two petabytes, if the files were not checked first."""
    folder, _ = copied("int4")
    change_config(folder, intermediate_size=2**43)
    with pytest.raises(ValueError, match=rf"{UP}.weight_packed: shape \(96, 8\), expected \(8796093022208, 8\)"):
        make_engine(folder)


@pytest.mark.parametrize("name", ("fp8", "int4", "nvfp4", "nvfp4_modelopt", "mxfp4"))
def test_ignored_layers_stay_unquantised(checkpoints, tmp_path, name):
    ignored = ["model.layers.0.mlp.down_proj", *(f"model.layers.1.self_attn.{part}_proj" for part in "kqv")]
    path = quantize(checkpoints["qwen3", BF16], tmp_path / "model", name, plain=ignored)
    formats = linear_formats(read_architecture(AutoConfig.from_pretrained(path)))
    assert sorted(module for module, found in formats.items() if found.name == "bf16") == ignored
    held = dict(named_tensors(make_engine(path).module[0]))
    assert all(held[f"{module}.weight"].dtype == BF16 for module in ignored)


def test_fused_linears_of_two_formats_are_refused_by_name(checkpoints, tmp_path):
    path = quantize(checkpoints["qwen3", BF16], tmp_path / "model", "int4", plain=[UP])
    with pytest.raises(ValueError, match=rf"gate_proj is .*int4.*{UP} is .*bf16.*quantise them alike"):
        check(path)


def test_the_manifest_is_that_of_the_files(quantized):
    """Equal for two loads, and different in the one tensor whose bit was flipped."""
    path = quantized("qwen3", "nvfp4", BF16)
    first, second = (make_engine(path) for _ in range(2))
    assert first.base_manifest() == second.base_manifest()
    assert first.base_manifest() == base_manifest(first.module[0], first._architecture)
    stored = safetensors.torch.load_file(path / "model.safetensors")
    assert first.base_manifest().tensors.keys() == stored.keys()
    dict(named_tensors(second.module[0]))[f"{UP}.weight_packed"][3, 3] ^= 1
    changed = second.base_manifest().tensors
    assert [n for n, entry in first.base_manifest().tensors.items() if changed[n] != entry] == [f"{UP}.weight_packed"]


def test_int4_in_words_of_another_tool_gives_the_same_policy(copied):
    """``weight_shape`` may be int32 in files; it is held as int64 everywhere."""
    folder, edit = copied("int4")
    before = make_engine(folder)
    edit(lambda t: t.update({n: tensor.int() for n, tensor in t.items() if n.endswith("weight_shape")}))
    after = make_engine(folder)
    assert max_difference(log_probs(before, sequences()), log_probs(after, sequences())) == 0
    assert after.base_manifest() == before.base_manifest()
    assert weight_format("int4", BF16) == linear_formats(after._architecture)[UP]
