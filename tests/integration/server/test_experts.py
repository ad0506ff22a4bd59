"""Qwen3-MoE inside SGLang: the stored bits of experts, what is computed with them, refusals."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from orbit_kernels.checkpoint.files import HFCheckpoint
from orbit_kernels.checkpoint.manifest import BaseManifest
from orbit_sglang.cpu.experts import ReferenceExperts
from orbit_sglang.startup.checkpoint_check import check_checkpoint
from tests.support import in_process, references, tiny_models
from tests.support.quantized import quantize

PROMPT = [4, 9, 33, 12, 50, 7, 7, 20]
STYLES = ("int4", "fp8", "mxfp4")
UP = "model.layers.1.mlp.experts.5.up_proj"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Folder of a BF16 checkpoint."""
    return tiny_models.save("qwen3_moe", tmp_path_factory.mktemp("moe") / "plain", torch.bfloat16)


def tensors_of_files(folder) -> dict:
    """Dtype, shape and digest of every tensor of a checkpoint."""
    checkpoint = HFCheckpoint(folder)
    return BaseManifest.of({}, ((name, checkpoint.tensor(name)) for name in checkpoint.specs)).tensors


def test_the_base_equals_transformers_per_token(plain):
    with in_process.served(plain, dtype="float32") as served:
        tokens, served_TV = served.greedy(PROMPT, 16)
        held = BaseManifest(**served.model.orbit_base)
    assert held.tensors.keys() == tensors_of_files(plain).keys()
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    assert (served_TV - references.logprobs(model, PROMPT, tokens)).abs().max() < 1e-4  # measured 6e-6


@pytest.mark.parametrize("style", STYLES)
def test_the_server_holds_the_bits_of_the_files_and_nothing_more(plain, tmp_path, style):
    folder = quantize(plain, tmp_path / style, style)
    check_checkpoint(str(folder), "cpu")
    with in_process.served(folder, dtype="bfloat16") as served:
        held = BaseManifest(**served.model.orbit_base)
        assert {name: entry for name, entry in tensors_of_files(folder).items() if ".experts." in name} == {
            name: entry for name, entry in held.tensors.items() if ".experts." in name
        }
        layers = [m for m in served.model.modules() if isinstance(getattr(m, "quant_method", None), ReferenceExperts)]
        held_bytes = sum(parameter.nbytes for layer in layers for parameter in layer.parameters())
    stored = load_file(folder / "model.safetensors")
    assert len(layers) == tiny_models.SIZES["num_hidden_layers"]
    assert held_bytes == sum(tensor.nbytes for name, tensor in stored.items() if ".experts." in name)


def drop(folder) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{UP}.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def make_dense_layers(folder) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"mlp_only_layers": [1]}))


@pytest.mark.parametrize(
    "damage, reason",
    [(drop, r"layers\.1\.mlp\.experts\.5\.up_proj\.weight: missing"), (make_dense_layers, r"mlp_only_layers \[1\]")],
)
def test_what_would_be_served_wrongly_is_refused(plain, tmp_path, damage, reason):
    folder = shutil.copytree(plain, tmp_path / "copy")
    damage(folder)
    with pytest.raises(ValueError, match=reason):
        check_checkpoint(str(folder), "cpu")


def test_mixed_formats_among_experts_are_refused(plain, tmp_path):
    folder = quantize(plain, tmp_path / "mixed", "int4", plain=("experts.5.",))
    with pytest.raises(ValueError, match="quantise them alike"):
        with in_process.served(folder, dtype="float32"):
            pass
