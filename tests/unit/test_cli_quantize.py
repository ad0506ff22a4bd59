"""``orbit quantize`` on a small Qwen3: what it writes, who can read it, what it refuses."""

import json
import shutil
from collections import namedtuple

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from typer.testing import CliRunner

from orbit_cli import quantize as quantize_module
from orbit_cli.main import app
from orbit_cli.quantize import quantize_checkpoint
from orbit_kernels.checkpoint.files import HFCheckpoint
from orbit_kernels.formats import Int4Format, Mxfp4Format, read_base_scheme

GROUP_SIZES = {"fp8": 32, "int4": 32, "nvfp4": 16, "mxfp4": 32}
LAYERS = 2
LINEARS = {
    f"model.layers.{layer}.{name}"
    for layer in range(LAYERS)
    for name in (
        *(f"self_attn.{part}_proj" for part in "qkvo"),
        *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
    )
}
OTHER_FILES = {"tokenizer.json": "{}", "chat_template.jinja": "{{ messages }}", "generation_config.json": "{}"}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """Random weights, saved in several files; the tokeniser's files are only names here."""
    folder = tmp_path_factory.mktemp("bf16")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder, max_shard_size="60KB")
    for name, text in OTHER_FILES.items():
        (folder / name).write_text(text)
    assert (folder / "model.safetensors.index.json").exists()
    return folder


@pytest.fixture(scope="module")
def quantized(model_folder, tmp_path_factory):
    """Results by format, and the errors that were reported."""
    root = tmp_path_factory.mktemp("quantized")
    errors = {
        name: quantize_checkpoint(model_folder, root / name, format_name=name, group_size=size)
        for name, size in GROUP_SIZES.items()
    }
    return {name: root / name for name in GROUP_SIZES}, errors


def scheme_of(folder):
    return read_base_scheme(json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize("name", GROUP_SIZES)
def test_the_result_is_what_its_config_says(name, quantized, model_folder):
    folder = quantized[0][name]
    scheme, source, checkpoint = scheme_of(folder), HFCheckpoint(model_folder), HFCheckpoint(folder)
    formats = {module: scheme.format_of(module) for module in LINEARS}
    assert {weight_format.name for weight_format in formats.values()} == {name}
    expected = {n: spec for n, spec in source.specs.items() if n.removesuffix(".weight") not in LINEARS}
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.layers.1.self_attn.q_norm.weight"} <= expected.keys()
    for module, weight_format in formats.items():
        specs = weight_format.specs(*source.specs[f"{module}.weight"].shape)
        expected |= {f"{module}.{leaf}": spec for leaf, spec in specs.items()}

    checkpoint.check(expected)
    checkpoint.check_values(formats)

    for n in source.specs.keys() & expected.keys() - {f"{module}.weight" for module in LINEARS}:
        assert torch.equal(checkpoint.tensor(n), source.tensor(n)), n


@pytest.mark.parametrize("name", GROUP_SIZES)
def test_transformers_reads_the_same_weights(name, quantized, model_folder):
    """Bitwise: what transformers or compressed-tensors decompress is what trainer and server compute with."""
    folder = quantized[0][name]
    # transformers 5.9.0 dequantises FP8 to fp32 where there is no GPU, whatever dtype is asked for.
    dtype = torch.float32 if name == "fp8" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        logits = model(torch.arange(20)[None]).logits  # compressed-tensors decompresses at the first forward
    assert logits.isfinite().all()
    scheme, checkpoint, source = scheme_of(folder), HFCheckpoint(folder), HFCheckpoint(model_folder)
    for module in LINEARS:
        weight_format, theirs = scheme.format_of(module), model.get_submodule(module).weight
        stored = checkpoint.stored_weight(module, weight_format, *theirs.shape)
        assert torch.equal(weight_format.dequantize(stored, dtype), theirs), module
        assert not torch.equal(source.tensor(f"{module}.weight").to(dtype), theirs), module


@pytest.mark.parametrize("name", GROUP_SIZES)
def test_other_files_are_kept(name, quantized):
    for file, text in OTHER_FILES.items():
        assert (quantized[0][name] / file).read_text() == text


@pytest.mark.parametrize("name", GROUP_SIZES)
def test_the_index_lists_what_the_files_hold(name, quantized):
    folder = quantized[0][name]
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    held = {n: path.name for path, names in HFCheckpoint(folder).files().items() for n in names}
    assert index == held and len(set(held.values())) > 1


def test_reported_errors_are_those_of_the_files(quantized, model_folder):
    folders, errors = quantized
    rms = {name: errors[name]["up_proj"].rms_relative for name in GROUP_SIZES}
    assert 0 < rms["fp8"] < rms["int4"] < rms["mxfp4"] < 0.2  # 0.026, 0.094, 0.113 measured
    name, module = "int4", "model.layers.0.mlp.up_proj"
    weight_format = scheme_of(folders[name]).format_of(module)
    checkpoints = HFCheckpoint(folders[name]), HFCheckpoint(model_folder)
    difference, exact = [], []
    for layer in range(LAYERS):
        module = f"model.layers.{layer}.mlp.up_proj"
        exact.append(checkpoints[1].tensor(f"{module}.weight").float())
        stored = checkpoints[0].stored_weight(module, weight_format, *exact[-1].shape)
        difference.append(weight_format.dequantize(stored, torch.float32) - exact[-1])
    expected = torch.cat(difference).norm() / torch.cat(exact).norm()
    assert rms[name] == pytest.approx(expected.item(), rel=1e-5)
    assert errors[name]["up_proj"].num_linears == LAYERS


def test_fused_parts_share_nvfp4_global_scales(quantized):
    """Deployed kernels take one global scale for q, k and v, and one for gate and up."""
    checkpoint = HFCheckpoint(quantized[0]["nvfp4"])
    for leaf in ("weight_global_scale", "input_global_scale"):
        for prefix, parts in (("self_attn", "qkv"), ("mlp", ("gate", "up"))):
            values = {checkpoint.tensor(f"model.layers.0.{prefix}.{part}_proj.{leaf}").item() for part in parts}
            assert len(values) == 1
        others = {
            checkpoint.tensor(f"model.layers.0.{name}_proj.{leaf}").item() for name in ("self_attn.q", "mlp.down")
        }
        assert len(others) == 2


def test_nvfp4_inputs_are_calibrated_with_headroom(quantized, model_folder):
    """The calibrated range is twice what the synthetic sequences reach, so real inputs saturate rarely."""
    stored = HFCheckpoint(quantized[0]["nvfp4"]).tensor("model.layers.0.mlp.down_proj.input_global_scale")
    model, seen = AutoModelForCausalLM.from_pretrained(model_folder), []
    down_proj = model.get_submodule("model.layers.0.mlp.down_proj")
    down_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].abs().max().item()))
    with torch.no_grad():
        model(torch.arange(60)[None])
    assert seen[0] < 448 * 6 / stored.item() < 20 * seen[0]


def test_a_folder_that_holds_something_is_left_alone(model_folder, tmp_path):
    (tmp_path / "precious").write_text("data")
    with pytest.raises(ValueError, match="is not an empty folder"):
        quantize_checkpoint(model_folder, tmp_path, format_name="int4")
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_an_empty_folder_is_filled(model_folder, tmp_path):
    (tmp_path / "out").mkdir()
    quantize_checkpoint(model_folder, tmp_path / "out", format_name="int4")
    assert scheme_of(tmp_path / "out").format_of("model.layers.0.mlp.up_proj") == Int4Format()


@pytest.mark.parametrize("where", ["config.json", "hf_quant_config.json"])
def test_a_quantised_model_is_not_quantised_again(where, model_folder, quantized, tmp_path):
    source = shutil.copytree(quantized[0]["int4"] if where == "config.json" else model_folder, tmp_path / "source")
    if where != "config.json":
        (source / where).write_text("{}")
    with pytest.raises(ValueError, match="is quantised already"):
        quantize_checkpoint(source, tmp_path / "out", format_name="fp8")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "group_size", "message"),
    [
        ("int4", 128, r"model.layers.0.mlp.down_proj: INT4 weight \[64, 96\]: 96 columns are no multiple of 128"),
        ("fp8", 64, r"self_attn.k_proj: 32 rows are no multiple of the block of 64, which SGLang needs"),
        ("nvfp4", 32, "nvfp4 has groups of 16 by definition"),
        ("mxfp4", 16, "mxfp4 has groups of 32 by definition"),
        ("int4", 12, "INT4 group size 12"),
        ("gguf", None, "--format gguf: not one of fp8, int4, nvfp4, mxfp4"),
    ],
)
def test_what_does_not_fit_is_refused_before_writing(name, group_size, message, model_folder, tmp_path):
    with pytest.raises(ValueError, match=message):
        quantize_checkpoint(model_folder, tmp_path / "out", format_name=name, group_size=group_size)
    assert list(tmp_path.iterdir()) == []


def test_too_small_a_disk_is_refused(model_folder, tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(quantize_module.shutil, "disk_usage", lambda path: usage(1000))
    with pytest.raises(ValueError, match=r"bytes are needed and 1000 are free"):
        quantize_checkpoint(model_folder, tmp_path / "out", format_name="int4")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_run_leaves_nothing(model_folder, tmp_path, monkeypatch):
    original, calls = Int4Format.quantize, []

    def interrupted(self, weight_OI):
        calls.append(weight_OI)
        if len(calls) == 5:
            assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]
            raise KeyboardInterrupt
        return original(self, weight_OI)

    monkeypatch.setattr(Int4Format, "quantize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(model_folder, tmp_path / "out", format_name="int4")
    assert list(tmp_path.iterdir()) == []


def test_the_command_prints_a_table(model_folder, tmp_path):
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["quantize", "--model", str(model_folder), "--format", "mxfp4", "--out", str(out)])
    assert result.exit_code == 0, result.output
    for word in ("up_proj", "down_proj", "all", "14"):
        assert word in result.output
    assert scheme_of(out).format_of("model.layers.0.mlp.up_proj") == Mxfp4Format()


def test_the_command_says_what_is_wrong(model_folder, tmp_path):
    arguments = ["quantize", "--model", str(tmp_path), "--format", "fp8", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "error:" in result.output and "safetensors" in result.output
    assert CliRunner().invoke(app, [*arguments[:3], "--format", "gptq", "--out", "x"]).exit_code == 2


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A random DeepSeek-V3 with a dense first layer and a shared expert."""
    folder = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        num_attention_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
    )
    DeepseekV3ForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def test_experts_only_leaves_everything_else_as_it_is(mixture, tmp_path):
    quantize_checkpoint(mixture, tmp_path / "out", format_name="int4", experts_only=True)
    before, after = HFCheckpoint(mixture), HFCheckpoint(tmp_path / "out")
    packed = {name.removesuffix(".weight_packed") for name in after.specs if name.endswith(".weight_packed")}
    assert packed == {name.removesuffix(".weight") for name in before.specs if ".mlp.experts." in name}
    kept = [name for name in before.specs if ".mlp.experts." not in name]
    assert all(torch.equal(before.tensor(name), after.tensor(name)) for name in kept)
    scheme = scheme_of(tmp_path / "out")
    modules = {name.removesuffix(".weight") for name in kept if name.endswith("_proj.weight") or "with_mqa" in name}
    assert "model.layers.1.self_attn.kv_a_proj_with_mqa" in modules
    assert {scheme.format_of(module).name for module in modules} == {"bf16"}
    assert {scheme.format_of(module).name for module in packed} == {"int4"}


def test_latent_projections_are_linears_like_any_other(mixture, tmp_path):
    quantize_checkpoint(mixture, tmp_path / "out", format_name="int4")
    assert "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_packed" in HFCheckpoint(tmp_path / "out").specs


def test_experts_only_of_a_dense_model_is_refused(model_folder, tmp_path):
    with pytest.raises(ValueError, match="no routed experts.*leave --experts-only out"):
        quantize_checkpoint(model_folder, tmp_path / "out", format_name="int4", experts_only=True)
    assert not (tmp_path / "out").exists()
