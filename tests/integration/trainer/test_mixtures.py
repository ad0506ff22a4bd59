"""Qwen3-MoE in the trainer against transformers: log-probs, gradients of every adapter tensor, quantised experts."""

import pytest
import safetensors.torch
import torch
from transformers import AutoConfig

from orbit_kernels.families import read_architecture
from orbit_verl.config.keys import BaseSettings
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
    EXPERTS,
    assert_gradients,
    dequantized_moe_tensors,
    functional_call_log_probs,
    leaf_tensors,
    merged_nll,
)
from tests.support.quantized import quantize, weight_format
from tests.support.tiny_models import save_trained

PLAIN = BaseSettings(activations="none", experts_per_chunk=3)


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    """Folder of the checkpoint by dtype."""
    root = tmp_path_factory.mktemp("moe")
    return {dtype: save_trained("qwen3_moe", root / str(dtype), dtype) for dtype in (torch.float32, torch.bfloat16)}


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_log_probs_are_those_of_transformers(moe, packed):
    engine, tokens = make_engine(moe[torch.float32], packed=packed, base=PLAIN), sequences()
    expected = reference_log_probs(load_reference(moe[torch.float32], torch.float32), tokens)
    assert max_difference(log_probs(engine, tokens), expected) < 1e-5  # measured 3e-6


def test_every_tensor_of_the_checkpoint_is_in_the_manifest(moe):
    engine = make_engine(moe[torch.float32])
    stored = safetensors.torch.load_file(moe[torch.float32] / "model.safetensors")
    manifest = engine.base_manifest()
    assert manifest.tensors.keys() == stored.keys()
    assert "model.layers.2.mlp.experts.7.down_proj" in manifest.formats


@pytest.mark.parametrize("type", ["oft", "lora"])
@pytest.mark.parametrize("fused", ["tied", "split"])
def test_gradients_are_those_of_merged_weights(moe, fused, type):
    engine, tokens = make_engine(moe[torch.float32], fused=fused, type=type, base=PLAIN), sequences()
    randomise(engine)
    reference = load_reference(moe[torch.float32], torch.float32)
    trained, tensors = leaf_tensors(engine)
    loss = merged_nll(reference, {name: p.float() for name, p in reference.named_parameters()}, engine, tensors, tokens)
    loss.backward()
    with engine.train_mode(zero_grad_on_exit=False):
        engine.forward_backward_batch(make_batch(tokens), nll)
    assert_gradients(engine.optimizer.gradients(), trained)


def test_an_adapter_that_experts_share_rotates_before_dispatch(moe):
    """Its gradients and log-probs are those of the same rotation in every expert; the router reads the plain input."""
    engine, tokens = make_engine(moe[torch.float32], experts="common", base=PLAIN), sequences()
    randomise(engine)
    assert "base_model.model.model.layers.0.mlp.experts.gate_proj.oft_R.weight" in engine.adapter.named_parameters()
    assert not any(".experts.0." in name for name in engine.export_adapter().tensors)
    reference = load_reference(moe[torch.float32], torch.float32)
    trained, tensors = leaf_tensors(engine)
    for module in [module for module in tensors if ".mlp.experts." in module]:
        prefix, _, projection = module.rpartition(".")
        leaves = tensors.pop(module)
        tensors |= {f"{prefix}.{expert}.{projection}": leaves for expert in range(EXPERTS)}
    weights = {name: p.float() for name, p in reference.named_parameters()}
    loss = merged_nll(reference, weights, engine, tensors, tokens)
    loss.backward()
    with engine.train_mode(zero_grad_on_exit=False):
        output = engine.forward_backward_batch(make_batch(tokens), nll)
    assert sum(output["loss"]) == pytest.approx(loss.item(), abs=1e-5)
    actual = engine.optimizer.gradients()
    assert actual.keys() == trained.keys()
    assert_gradients(actual, trained)
    with engine.disable_adapter():
        base = log_probs(engine, tokens)
    assert max_difference(base, reference_log_probs(reference, tokens)) < 1e-5


@pytest.mark.parametrize("name", ["int4", "fp8", "mxfp4", "nvfp4"])
def test_quantised_experts(moe, name, tmp_path):
    original, stored_as = moe[torch.float32], weight_format(name, torch.float32)
    folder = quantize(original, tmp_path / "model", stored_as)
    engine, tokens = make_engine(folder, base=PLAIN), sequences()
    reference = load_reference(original, torch.float32)
    weights = dequantized_moe_tensors(folder, stored_as, reference)
    expected = [functional_call_log_probs(reference, weights, sequence) for sequence in tokens]
    assert max_difference(log_probs(engine, tokens), [row.detach() for row in expected]) < 1e-5
    assert max_difference(log_probs(engine, tokens), reference_log_probs(reference, tokens)) > 1e-3
    randomise(engine)
    trained, tensors = leaf_tensors(engine)
    merged_nll(reference, weights, engine, tensors, tokens).backward()
    with engine.train_mode(zero_grad_on_exit=False):
        engine.forward_backward_batch(make_batch(tokens), nll)
    assert_gradients(engine.optimizer.gradients(), trained)
    held = sum(tensor.nbytes for chunk in engine.module for tensor in chunk.buffers())
    file = sum(t.nbytes for n, t in safetensors.torch.load_file(folder / "model.safetensors").items() if "_proj" in n)
    assert held <= 1.1 * file


def test_a_training_step_and_the_chunk_size(moe):
    """An update equals that of another chunk size, bit for bit; adapters of experts without tokens stay."""
    exports = []
    for chunk in (1, 5):
        engine = make_engine(moe[torch.bfloat16], base=BaseSettings(experts_per_chunk=chunk), fused="split")
        randomise(engine, scale=0.02)
        before = engine.export_adapter().tensors
        train_step(engine, sequences())
        exports.append(engine.export_adapter().tensors)
    changed = [name for name, tensor in exports[0].items() if not torch.equal(tensor, before[name])]
    assert any(".experts.3." in name for name in changed)
    assert all(torch.equal(tensor, exports[1][name]) for name, tensor in exports[0].items())


@pytest.mark.parametrize("targets", [("experts.3.down_proj",), ("q_proj", "0.gate_proj", "0.up_proj")])
def test_adapters_on_single_experts_are_refused(moe, targets):
    with pytest.raises(ValueError, match=r"match only some experts of model\.layers\.0\.mlp\.experts"):
        make_engine(moe[torch.float32], target_modules=targets, fused="split")


def test_a_missing_expert_is_named(moe, tmp_path):
    folder = save_trained("qwen3_moe", tmp_path / "broken", torch.float32)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.experts.5.up_proj.weight"]
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.layers\.2\.mlp\.experts\.5\.up_proj\.weight: missing"):
        open_checkpoint(read_architecture(AutoConfig.from_pretrained(folder)), folder)
