"""Every low-precision format inside SGLang's own classes: the stored bits, what is computed with them, refusals."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang.srt.layers.linear import LinearBase

from orbit_kernels.checkpoint.files import HFCheckpoint
from orbit_kernels.checkpoint.manifest import BaseManifest
from orbit_kernels.frozen.product import frozen_matmul
from orbit_sglang.model.naming import part_names
from orbit_sglang.startup.checkpoint_check import check_checkpoint
from tests.support import in_process, references
from tests.support.adapters import RAGGED_LINEARS, random_adapter
from tests.support.quantized import FORMATS, change_config, difference_from_files, quantize, stored_weights
from tests.support.references import assert_close, peft_model, transformers_model
from tests.support.server import PROMPT

STYLES = list(FORMATS)
FAMILIES = ("qwen3", "llama")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CHUNK_BYTES = 64 << 20


def linears(model: torch.nn.Module) -> dict[str, LinearBase]:
    """The quantised linears of a served model."""
    modules = model.named_modules()
    return {name: module for name, module in modules if isinstance(module, LinearBase) and "lm_head" not in name}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("style", STYLES)
def test_the_server_holds_the_bits_of_the_files_and_nothing_more(checkpoints, family, style):
    """Parts that end inside a block; three global scales in one fused projection.

    docs/field-cases.md: the same dequantised bits; blocks that do not fit; global scales of a fused linear.
    """
    folder = checkpoints.quantized(family, style)
    expected = stored_weights(folder)
    with in_process.served(folder, dtype="bfloat16") as served:
        assert difference_from_files(folder, BaseManifest(**served.model.orbit_base)) is None
        for name, layer in linears(served.model).items():
            for part, held in zip(part_names(name), layer.orbit_reference.parts, strict=True):
                weight_OI = expected[part].dequantize(torch.bfloat16)
                assert torch.equal(held.dequantize(torch.bfloat16), weight_OI) and weight_OI.std() > 0
        checkpoint = HFCheckpoint(folder)
        stored_bytes = sum(checkpoint.tensor(name).nbytes for name in checkpoint.specs)
        assert resident_bytes(served.model) <= 1.1 * stored_bytes


def resident_bytes(model: torch.nn.Module) -> int:
    """Bytes of distinct storages behind the parameters and behind what the linears compute with."""
    tensors = list(model.parameters())
    for layer in linears(model).values():
        tensors += [tensor for part in layer.orbit_reference.parts for tensor in part.tensors.values()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("activations", ["deployed", "none"])
@pytest.mark.parametrize("style", STYLES)
def test_a_linear_computes_bitwise_what_the_trainer_computes(checkpoints, style, activations, dtype):
    folder = checkpoints.quantized("qwen3", style)
    expected = stored_weights(folder)
    with in_process.served(folder, dtype=dtype, orbit_base_activations=activations) as served:
        for name, layer in linears(served.model).items():
            x_TI = torch.randn(5, layer.input_size).to(DTYPES[dtype])
            parts = [expected[part] for part in part_names(name)]
            y_TO = frozen_matmul(x_TI, parts, chunk_bytes=CHUNK_BYTES, activations=activations)
            assert torch.equal(layer(x_TI)[0], y_TO) and y_TO.std() > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    "dtype, mean, largest",
    [("float32", 1e-5, 1e-4), ("bfloat16", 5e-3, 0.1)],  # measured 2e-7 and 1e-6; 2e-3 and 9e-3
)
def test_equals_transformers_on_the_dequantised_weights_per_token(
    checkpoints, tmp_path, family, style, dtype, mean, largest
):
    """Over the whole vocabulary at each of 16 greedy tokens, with the base and with an adapter."""
    folder = checkpoints.quantized(family, style)
    adapter = random_adapter(1, scale=0.1, linears=RAGGED_LINEARS)
    with in_process.served(folder, dtype=dtype, orbit_base_activations="none") as served:
        served.stage(adapter)
        base_tokens, base_TV = served.greedy(PROMPT, 16)
        tokens, served_TV = served.greedy(PROMPT, 16, in_process.ADAPTED_SLOT)
    model = transformers_model(folder, DTYPES[dtype])
    assert_close(base_TV, references.logprobs(model, PROMPT, base_tokens), mean, largest)
    without_TV = references.logprobs(model, PROMPT, tokens)
    model = peft_model(model, adapter)
    assert_close(served_TV, references.logprobs(model, PROMPT, tokens), mean, largest)
    assert (served_TV - without_TV).abs().mean() > 10 * mean


@pytest.mark.parametrize("style", ["fp8", "nvfp4"])
def test_deployed_activations_are_those_of_the_format(checkpoints, style):
    """The median: a code that rounds the other way moves a few tokens by 0.1."""
    folder = checkpoints.quantized("qwen3", style)
    with in_process.served(folder, dtype="float32") as served:
        tokens, deployed_TV = served.greedy(PROMPT, 16)
    plain = transformers_model(folder, torch.float32)
    modelled = transformers_model(folder, torch.float32, deployed=True)
    plain_TV, modelled_TV = (references.logprobs(model, PROMPT, tokens) for model in (plain, modelled))
    assert (deployed_TV - modelled_TV).abs().median() <= 1e-5 < 1e-3 < (deployed_TV - plain_TV).abs().median()


@pytest.mark.parametrize("style", ["fp8", "int4", "nvfp4_modelopt"])
def test_linears_that_are_left_out_stay_plain(checkpoints, style):
    """All parts of a fused projection by their own names, as checkpoints name them."""
    folder = checkpoints.quantized("qwen3", style, plain="self_attn")
    with in_process.served(folder, dtype="bfloat16") as served:
        assert difference_from_files(folder, BaseManifest(**served.model.orbit_base)) is None
        computing = {name for name, layer in linears(served.model).items() if hasattr(layer, "orbit_reference")}
    assert {name.split(".", 3)[3] for name in computing} == {"mlp.gate_up_proj", "mlp.down_proj"}


@pytest.mark.parametrize("style", ["fp8", "int4", "nvfp4_modelopt"])
def test_a_fused_projection_of_two_formats_is_refused_by_name(checkpoints, style):
    folder = checkpoints.quantized("qwen3", style, plain="up_proj")
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.gate_proj .*layers\.0\.mlp\.up_proj .*quantise them alike"):
        check_checkpoint(str(folder), "cpu")


@pytest.mark.parametrize("style", ["int4_asymmetric", "nvfp4_weight_only", "mxfp4"])
def test_what_only_the_reference_computes_is_refused_on_a_gpu(checkpoints, style):
    with pytest.raises(ValueError, match=r"layers\.0\..*no kernel for it on cuda"):
        check_checkpoint(str(checkpoints.quantized("qwen3", style)), "cuda")


def test_a_tensor_that_sglang_does_not_load_stops_the_start(checkpoints, monkeypatch):
    """SGLang looks the block scales of a Llama up under another name, warns, and would serve uninitialised ones."""
    monkeypatch.setattr("orbit_sglang.base.quantization._rename", lambda layer, old, new: None)
    with pytest.raises(ValueError, match=r"q_proj\.weight_scale_inv: 4 of 4 scales are NaN"):
        with in_process.served(checkpoints.quantized("llama", "fp8"), dtype="bfloat16"):
            pass


FIRST = "model.layers.0.self_attn.k_proj"


def truncate(folder) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def change_scale(change):
    def apply(folder) -> None:
        tensors = load_file(folder / "model.safetensors")
        name = next(name for name in tensors if name.startswith(FIRST) and "scale" in name)
        tensors[name] = change(tensors[name].clone())
        save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")

    return apply


def poison(scale: torch.Tensor) -> torch.Tensor:
    scale.view(-1)[0] = torch.nan
    return scale


def change_quantization(**fields):
    def apply(folder) -> None:
        config = json.loads((folder / "config.json").read_text())["quantization_config"]
        change_config(folder, quantization_config=config | fields)

    return apply


def change_group_size(folder) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"group_size": 32', '"group_size": 16'))


@pytest.mark.parametrize(
    "style, damage, reason",
    [
        ("fp8", truncate, r"truncated, the bytes of these tensors are missing: .*\.weight"),
        ("fp8", change_scale(lambda scale: None), FIRST + r"\.weight_scale_inv: missing"),
        ("fp8", change_scale(lambda scale: scale.T.contiguous()), FIRST + r"\.weight_scale_inv: shape \(2, 1\)"),
        ("fp8", change_scale(poison), FIRST + r"\.weight_scale_inv: 1 of 2 scales are NaN"),
        ("int4", change_group_size, FIRST + r"\.weight_scale: shape \(80, 5\), expected \(80, 10\)"),
        ("int4", change_quantization(version="9.0.0"), "version 9.0.0"),
        ("int4", change_quantization(format="marlin-24"), "'marlin-24'"),
        ("fp8", change_quantization(quant_method="fp9"), "'fp9'"),
        ("mxfp4", change_scale(lambda scale: scale + 100), FIRST + r"\.weight_scale: .* another bias"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_the_name_of_its_tensor(checkpoints, tmp_path, style, damage, reason):
    """A mismatched group size, and another bias, among them.

    docs/field-cases.md: the same dequantised bits; UE8M0 exponent bias.
    """
    folder = quantize(checkpoints.ragged("qwen3"), tmp_path / style, style)
    check_checkpoint(str(folder), "cpu")
    damage(folder)
    with pytest.raises(ValueError, match=reason):
        check_checkpoint(str(folder), "cpu")
