"""DeepSeek-V3 and Kimi-K2.5 in the trainer against transformers: log-probs, gradients of every adapter tensor, formats."""

import shutil

import pytest
import safetensors.torch
import torch
from transformers import AutoConfig

from orbit_kernels.families import DecoderArchitecture, read_architecture
from orbit_verl.config.keys import BaseSettings
from orbit_verl.model import latent_attention
from orbit_verl.model.tensors import open_checkpoint
from tests.support.engines import (
    load_reference,
    log_probs,
    make_batch,
    make_engine,
    max_difference,
    nll,
    randomise,
    reference_log_probs,
    sequences,
    train_step,
)
from tests.support.mixtures import (
    LATENT_TARGETS,
    assert_gradients,
    dequantized_moe_tensors,
    functional_call_log_probs,
    leaf_tensors,
    merged_nll,
    write_kimi,
)
from tests.support.quantized import change_config, quantize, weight_format
from tests.support.tiny_models import save_trained

PLAIN = BaseSettings(activations="none", experts_per_chunk=3)
WITHOUT_KEY_VALUE_UP = tuple(target for target in LATENT_TARGETS if target != "kv_b_proj")
ADAPTERS = {
    "oft-tied": {},
    "oft-split": {"fused": "split"},
    "lora": {"type": "lora", "target_modules": WITHOUT_KEY_VALUE_UP},
}


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    """Folder of the checkpoint by dtype."""
    root = tmp_path_factory.mktemp("deepseek")
    return {dtype: save_trained("deepseek_v3", root / str(dtype), dtype) for dtype in (torch.float32, torch.bfloat16)}


@pytest.fixture(params=["expanded", "absorbed"])
def path(request, monkeypatch):
    """Both ways of attending: verl's packed batches name their prompts, so that the server's is taken."""
    monkeypatch.setattr(latent_attention, "is_as_served", lambda: request.param == "absorbed")
    return request.param


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_log_probs_are_those_of_transformers(deepseek, packed, path):
    engine, tokens = engine_of(deepseek[torch.float32], packed=packed), sequences()
    expected = reference_log_probs(load_reference(deepseek[torch.float32], torch.float32), tokens)
    assert max_difference(log_probs(engine, tokens), expected) < 1e-5


def test_every_tensor_of_the_checkpoint_is_in_the_manifest(deepseek):
    engine = engine_of(deepseek[torch.bfloat16])
    stored = safetensors.torch.load_file(deepseek[torch.bfloat16] / "model.safetensors")
    assert engine.base_manifest().tensors.keys() == stored.keys()
    assert engine.module[0].decoder.layers[1].mlp.router.e_score_correction_bias.dtype == torch.float32


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_gradients_are_those_of_merged_weights(deepseek, adapter, path):
    engine, tokens = engine_of(deepseek[torch.float32], **ADAPTERS[adapter]), sequences()
    randomise(engine)
    reference = load_reference(deepseek[torch.float32], torch.float32)
    assert_like_merged(engine, reference, {name: p.float() for name, p in reference.named_parameters()}, tokens)


@pytest.mark.parametrize("name", ["int4", "fp8", "mxfp4", "nvfp4"])
def test_quantised(deepseek, name, path, tmp_path):
    original, stored_as = deepseek[torch.float32], weight_format(name, torch.float32)
    folder = quantize(original, tmp_path / "model", stored_as)
    engine, tokens = engine_of(folder), sequences()
    reference = load_reference(original, torch.float32)
    weights = dequantized_moe_tensors(folder, stored_as, reference)
    expected = [functional_call_log_probs(reference, weights, sequence).detach() for sequence in tokens]
    assert max_difference(log_probs(engine, tokens), expected) < 1e-5
    assert max_difference(log_probs(engine, tokens), reference_log_probs(reference, tokens)) > 1e-3
    randomise(engine)
    assert_like_merged(engine, reference, weights, tokens)


def test_absorbed_and_expanded_attention_are_two_roundings_of_one_function(tmp_path, monkeypatch):
    """In BF16 they differ, which is why the trainer takes the server's; and not by more than BF16 does."""
    folder = save_trained("deepseek_v3", tmp_path / "model", torch.bfloat16, initializer_range=0.05)
    engine, tokens = engine_of(folder), sequences()
    absorbed = log_probs(engine, tokens)
    monkeypatch.setattr(latent_attention, "is_as_served", lambda: False)
    difference = max_difference(absorbed, log_probs(engine, tokens))
    assert 0 < difference < 0.3


def test_kimi_is_deepseek_behind_a_prefix(deepseek, tmp_path):
    """Its adapter's names too; the tensors of what sees images are not read."""
    folder, tokens = write_kimi(tmp_path / "kimi", torch.float32), sequences()
    kimi, plain = engine_of(folder), engine_of(deepseek[torch.float32])
    assert all(map(torch.equal, log_probs(kimi, tokens), log_probs(plain, tokens)))
    names = [name.replace(".language_model.", ".") for name in kimi.export_adapter().tensors]
    assert names == list(plain.export_adapter().tensors) and ".language_model." in next(
        iter(kimi.export_adapter().tensors)
    )
    assert "language_model.model.layers.1.mlp.shared_experts.up_proj" in kimi.base_manifest().formats
    assert not any("vision" in name for name in kimi.base_manifest().tensors)


def test_kimi_k2_is_deepseek_by_another_name(deepseek, tmp_path):
    """transformers knows no such model type; a checkpoint's own Python files are not run."""
    folder, tokens = shutil.copytree(deepseek[torch.float32], tmp_path / "model"), sequences()
    change_config(folder, model_type="kimi_k2")
    assert all(
        map(torch.equal, log_probs(engine_of(folder), tokens), log_probs(engine_of(deepseek[torch.float32]), tokens))
    )


def test_a_training_step_changes_every_kind_of_adapter(deepseek):
    engine = engine_of(deepseek[torch.bfloat16])
    before, base = engine.export_adapter().untied().tensors, engine.base_digest()
    train_step(engine, sequences())
    after = engine.export_adapter().untied().tensors
    changed = {name.split(".")[-3] for name in after if not torch.equal(before[name], after[name])}
    assert changed == set(LATENT_TARGETS)
    assert engine.base_digest() == base


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    folder = save_trained("deepseek_v3", tmp_path / "model", torch.float32)
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(2, 2)
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    open_checkpoint(architecture_of(folder), folder)
    del tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    tensors["model.layers.2.self_attn.kv_b_proj.weight"] = torch.zeros(2, 2)
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError) as refused:
        open_checkpoint(architecture_of(folder), folder)
    assert "model.layers.1.mlp.gate.e_score_correction_bias: missing" in str(refused.value)
    assert "model.layers.2.self_attn.kv_b_proj.weight: shape (2, 2), expected (160, 32)" in str(refused.value)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("q_lora_rank", None, "q_lora_rank=None"),
        ("rope_interleave", False, "rope_interleave=False"),
        ("topk_group", 3, "topk_group=3"),
        ("n_group", 3, "n_group=3"),
        ("attention_bias", True, "attention_bias=True"),
    ],
)
def test_a_configuration_that_would_be_computed_otherwise_is_refused(deepseek, field, value, said):
    config = AutoConfig.from_pretrained(deepseek[torch.float32])
    setattr(config, field, value)
    with pytest.raises(ValueError, match=said):
        read_architecture(config)


def test_targets_may_leave_the_routed_experts_out(deepseek):
    """By what stands in front of a name, as peft reads it."""
    targets = ("q_b_proj", "shared_experts.up_proj", "shared_experts.gate_proj", "mlp.down_proj")
    names = set(engine_of(deepseek[torch.float32], target_modules=targets).export_adapter().untied().tensors)
    stems = {name.removeprefix("base_model.model.model.layers.").removesuffix(".oft_R.weight") for name in names}
    shared = {f"{layer}.mlp.shared_experts.{part}_proj" for layer in (1, 2) for part in ("gate", "up")}
    assert stems == {"0.mlp.down_proj", *shared, *(f"{layer}.self_attn.q_b_proj" for layer in range(3))}
    with pytest.raises(ValueError, match=r"\['shared_experts.q_proj'\] match no linear"):
        engine_of(deepseek[torch.float32], target_modules=("q_b_proj", "shared_experts.q_proj"))


def test_lora_on_the_absorbed_projection_is_refused(deepseek):
    with pytest.raises(ValueError, match=r"kv_b_proj.*absorbed.*use oft"):
        engine_of(deepseek[torch.float32], type="lora")


def engine_of(folder, **options):
    """An engine with an adapter on every linear."""
    return make_engine(folder, **{"base": PLAIN, "target_modules": LATENT_TARGETS} | options)


def architecture_of(folder) -> DecoderArchitecture:
    return read_architecture(AutoConfig.from_pretrained(folder))


def assert_like_merged(engine, reference, weights, tokens):
    trained, tensors = leaf_tensors(engine)
    merged_nll(reference, weights, engine, tensors, tokens).backward()
    with engine.train_mode(zero_grad_on_exit=False):
        engine.forward_backward_batch(make_batch(tokens), nll)
    assert_gradients(engine.optimizer.gradients(), trained)
