import dataclasses
import math

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from torch.utils.flop_counter import FlopCounterMode

from orbit_kernels.adapters import OFTMethod
from orbit_kernels.adapters.config import tensor_name
from orbit_kernels.contract.payload import Adapter
from orbit_kernels.contract.peft_folder import read_peft_folder, write_peft_folder
from orbit_verl.model.naming import frozen_linears
from tests.support.engines import (
    load_reference,
    log_probs,
    make_batch,
    make_engine,
    max_difference,
    nll,
    randomise,
    reference_gradients,
    reference_log_probs,
    sequences,
    tensors_that_share,
    train_step,
)

FP32, BF16 = torch.float32, torch.bfloat16
METHODS = {
    "oft": {"type": "oft", "block_size": 16},
    "oft3": {"type": "oft", "block_size": 16, "cayley_neumann_terms": 3},
    "cayley": {"type": "oft", "block_size": 16, "cayley_neumann_terms": None},
    "lora": {"type": "lora", "rank": 4, "alpha": 6},
}


@pytest.fixture(params=("oft", "lora"))
def method(request):
    return METHODS[request.param]


def peft_model(engine, path, folder):
    """peft's own model with the engine's exported adapter, in fp32."""
    write_peft_folder(engine.export_adapter(), folder)
    return PeftModel.from_pretrained(load_reference(path, FP32), str(folder), is_trainable=True)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("fused", ("tied", "split"))
@pytest.mark.parametrize("kind", ("qwen3", "llama"))
def test_exported_adapter_gives_the_same_log_probs_in_peft(checkpoints, tmp_path, kind, fused, name):
    """The Cayley mode is part of the adapter and peft honours it. docs/field-cases.md: dtype and Cayley mode."""
    path, tokens = checkpoints[kind, FP32], sequences()
    engine = make_engine(path, fused=fused, **METHODS[name])
    base = log_probs(engine, tokens)
    randomise(engine)
    ours = log_probs(engine, tokens)
    with torch.no_grad():
        theirs = reference_log_probs(peft_model(engine, path, tmp_path / "adapter"), tokens)
    assert max_difference(ours, base) > 0.1
    assert max_difference(ours, theirs) <= 1e-4  # measured 3.8e-6


@pytest.mark.parametrize("packed", (True, False), ids=("packed", "padded"))
@pytest.mark.parametrize("fused", ("tied", "split"))
@pytest.mark.parametrize("kind", ("qwen3", "llama"))
def test_gradients_equal_autograd_through_peft(checkpoints, tmp_path, kind, fused, packed, method):
    path, tokens = checkpoints[kind, FP32], sequences()
    engine = make_engine(path, fused=fused, packed=packed, **method)
    randomise(engine)
    with engine.train_mode(zero_grad_on_exit=False):
        engine.forward_backward_batch(make_batch(tokens), nll)
    ours = engine.optimizer.gradients()

    theirs = reference_gradients(peft_model(engine, path, tmp_path / "adapter"), tokens)

    assert ours.keys() == engine.adapter.named_parameters().keys()
    for name, gradient in ours.items():
        expected = sum(theirs[part] for part in tensors_that_share(name, fused))
        assert expected.norm() > 0
        assert (gradient - expected).norm() <= 1e-5 * expected.norm()  # measured 1.4e-6


def test_only_targeted_modules_carry_an_adapter(checkpoints, method):
    engine = make_engine(checkpoints["qwen3", FP32], fused="split", target_modules=("q_proj", "down_proj"), **method)
    modules = {f"model.layers.{layer}.{part}" for layer in range(2) for part in ("self_attn.q_proj", "mlp.down_proj")}
    exported = engine.export_adapter()
    assert set(exported.modules()) == modules
    assert engine.adapter.named_parameters().keys() == exported.tensors.keys()
    trained = {id(p) for _, p in engine.module[0].named_parameters() if p.requires_grad}
    assert trained == {id(parameter) for parameter in engine.adapter.named_parameters().values()}
    assert sum(linear.adapter is not None for _, linear in frozen_linears(engine.module[0])) == len(modules)


def test_lora_on_some_parts_of_a_tied_projection(checkpoints, tmp_path):
    """A is shared by the targeted parts only; B is per part, so that the others keep the base's output."""
    path, tokens = checkpoints["qwen3", FP32], sequences()
    engine = make_engine(path, fused="tied", target_modules=("k_proj", "v_proj"), **METHODS["lora"])
    randomise(engine)
    exported = engine.export_adapter()
    assert exported.tensors.keys() == engine.adapter.named_parameters().keys()
    assert (len(exported.tensors), len(exported.untied().tensors)) == (2 * 3, 2 * 2 * 2)
    with torch.no_grad():
        theirs = reference_log_probs(peft_model(engine, path, tmp_path / "adapter"), tokens)
    assert max_difference(log_probs(engine, tokens), theirs) <= 1e-4


def test_the_initial_a_depends_on_seed_and_module_alone(checkpoints):
    """Every rank, and a run on other targets, starts from the same tensors; the policy is the base until B moves."""
    path, lora = checkpoints["qwen3", FP32], METHODS["lora"]
    engine, again, other, few = (
        make_engine(path, fused="split", **lora, **settings)
        for settings in ({}, {}, {"init_seed": 1}, {"target_modules": ("down_proj",)})
    )
    tensors = engine.export_adapter().tensors
    assert engine.export_adapter().digest() == again.export_adapter().digest()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in few.export_adapter().tensors.items())
    a = {name: tensor for name, tensor in tensors.items() if "lora_A" in name}
    assert all(not torch.equal(tensor, other.export_adapter().tensors[name]) for name, tensor in a.items())
    assert len({tensor.sum().item() for tensor in a.values()}) == len(a) == 14
    with engine.disable_adapter():
        base = log_probs(engine, sequences())
    assert max_difference(log_probs(engine, sequences()), base) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    (
        ({"target_modules": ("q_proj",)}, "fused='tied' with only"),
        ({"target_modules": ("query",)}, r"target_modules \['query'\] match no linear"),
        ({"block_size": 24}, "width 64 is not a multiple of the OFT block size 24"),
        ({"type": "lora", "rank": 0}, r"orbit\.adapter\.rank=0: must be at least 1, e\.g\. 16"),
        ({"type": "lora", "target_modules": ("lm_head",)}, "tied to the embeddings shares their matrix"),
    ),
)
def test_targets_that_cannot_work_are_refused(checkpoints, settings, message):
    """docs/field-cases.md: tied embeddings; width and block size."""
    with pytest.raises(ValueError, match=message):
        make_engine(checkpoints["qwen3", FP32], **settings)


def test_backward_forms_no_base_gradient(checkpoints, method):
    """The base costs one GEMM of the forward's size in backward; a trained weight would cost a second one."""
    engine = make_engine(checkpoints["qwen3", FP32], **method)
    randomise(engine)
    model, tokens = engine.module[0], torch.cat(sequences())[None]
    with engine.adapter.disabled():
        base = count_flops(lambda: model(input_ids=tokens, position_ids=None))
    logits = []
    adapted = count_flops(lambda: logits.append(model(input_ids=tokens, position_ids=None)))
    backward = count_flops(lambda: logits[0].sum().backward())
    # torch counts no flops for SDPA's CPU kernel, so that the base is its GEMMs. The first linear's input is the embedding,
    # which needs no gradient: OFT saves the product of [T, 64] with blocks of 16, LoRA those with A and with the base.
    first = model.decoder.layers[0].self_attention.linear_qkv
    saved = 16 if method["type"] == "oft" else method["rank"] + sum(first.parts.values())
    assert base == 2 * tokens.numel() * sum(weight.numel() for weight in multiplied_weights(model))
    assert adapted > base
    assert backward == base + 2 * (adapted - base) - 2 * tokens.numel() * 64 * saved
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(buffer.requires_grad for buffer in model.buffers())


def count_flops(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def multiplied_weights(model):
    """The weights of the linears and of the head."""
    return [buffer for name, buffer in model.named_buffers() if name.endswith("weight")] + [model.output_layer.weight]


def test_training_lowers_the_loss_and_leaves_the_base_alone(checkpoints, method):
    engine = make_engine(checkpoints["llama", BF16], dtype="bf16", **method)
    before, tokens = engine.base_digest(), sequences()
    losses = [train_step(engine, tokens)[0] for _ in range(6)]
    assert losses[-1] < losses[0] - 0.3
    assert engine.base_digest() == before
    with torch.no_grad():
        engine.module[0].decoder.layers[1].mlp.linear_fc2.stacks[0].weight[0, 0] += 1.0
    assert engine.base_digest() != before


@pytest.mark.parametrize("adapter_dtype", ("bf16", "fp32"))
@pytest.mark.parametrize("base_dtype", (BF16, FP32))
def test_outputs_keep_the_inputs_dtype(checkpoints, base_dtype, adapter_dtype, method):
    """docs/field-cases.md: dtype and Cayley mode."""
    engine = make_engine(checkpoints["qwen3", base_dtype], dtype=adapter_dtype, **method)
    randomise(engine)
    linear = engine.module[0].decoder.layers[0].self_attention.linear_qkv
    output, _ = linear(torch.randn(3, 1, 64).to(base_dtype))
    assert output.dtype == base_dtype
    expected = BF16 if adapter_dtype == "bf16" else FP32
    assert {tensor.dtype for tensor in engine.export_adapter().tensors.values()} == {expected}


@pytest.mark.parametrize("fused", ("tied", "split"))
def test_disabled_adapter_is_the_base_bit_for_bit(checkpoints, fused, method):
    tokens = sequences()
    engine = make_engine(checkpoints["qwen3", BF16], fused=fused, target_modules=targets(fused), **method)
    plain = make_engine(checkpoints["qwen3", BF16])
    plain.adapter.disabled().__enter__()
    randomise(engine)
    with engine.disable_adapter():
        reference = log_probs(engine, tokens)
    assert max_difference(reference, log_probs(plain, tokens)) == 0
    assert max_difference(reference, log_probs(engine, tokens)) > 0.01


def targets(fused):
    """A partly targeted fused projection where that is possible."""
    everything = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    return everything if fused == "tied" else ("k_proj", "gate_proj", "o_proj")


@pytest.mark.parametrize("reference", ("base", "init"))
def test_adapter_is_back_when_the_reference_pass_raises(checkpoints, tmp_path, reference):
    """docs/field-cases.md: reference policy."""
    engine = make_engine(checkpoints["qwen3", FP32], **started_from_adapter(checkpoints, tmp_path, reference))
    train_step(engine, sequences())
    before = log_probs(engine, sequences())
    with pytest.raises(RuntimeError, match="in the reference pass"), engine.disable_adapter():
        raise RuntimeError("in the reference pass")
    assert max_difference(before, log_probs(engine, sequences())) == 0


@pytest.mark.parametrize("reference", ("base", "init"))
def test_kl_starts_at_zero_against_the_chosen_reference(checkpoints, tmp_path, reference):
    """A run that starts from an adapter refers to it, and keeps doing so while it trains.

    docs/field-cases.md: reference policy.
    """
    engine = make_engine(checkpoints["qwen3", FP32], **started_from_adapter(checkpoints, tmp_path, reference))
    plain = make_engine(checkpoints["qwen3", FP32])
    tokens = sequences()
    start, base = log_probs(engine, tokens), log_probs(plain, tokens)
    assert max_difference(start, base) > 0.1
    expected = base if reference == "base" else start
    for _ in range(2):
        with engine.disable_adapter():
            assert max_difference(log_probs(engine, tokens), expected) == 0
        train_step(engine, tokens)
    assert max_difference(log_probs(engine, tokens), start) > 0.01


def started_from_adapter(checkpoints, tmp_path, reference):
    """Settings of a run that starts from a random adapter in peft's format."""
    donor = make_engine(checkpoints["qwen3", FP32])
    randomise(donor)
    write_peft_folder(donor.export_adapter(), tmp_path / "init")
    return {"init_path": str(tmp_path / "init"), "reference": reference}


def test_export_is_a_copy_that_loads_back(checkpoints, method):
    engine, other = (make_engine(checkpoints["qwen3", FP32], **method) for _ in range(2))
    randomise(engine)
    exported = Adapter.decode(engine.export_adapter().encode())
    tensors, peft = engine.get_per_tensor_param()
    streamed = dict(tensors)
    before = exported.digest()
    train_step(engine, sequences())
    assert Adapter(streamed, exported.config).digest() == exported.untied().digest()
    assert engine.export_adapter().digest() != before
    assert peft == exported.config.to_peft()
    other.adapter.load(exported)
    assert other.export_adapter().digest() == before


def test_an_export_that_is_taken_after_a_step_is_refused(checkpoints, method):
    """It would be of the later state, or of both."""
    engine = make_engine(checkpoints["qwen3", FP32], **method)
    train_step(engine, sequences())
    (tensors, _), state = engine.get_per_tensor_param(), engine.optimizer.whole_state()
    copies = engine.optimizer.state_tensors()
    begun = engine.optimizer.whole_state()
    first, taken = next(begun)
    kept = taken.clone()
    train_step(engine, sequences())
    for late in (tensors, state, begun):
        with pytest.raises(RuntimeError, match="has changed since its copies were asked for; take all of them before"):
            list(late)
    assert torch.equal(kept, taken) and torch.equal(copies[first], taken)
    assert not torch.equal(copies[first], engine.optimizer.state_tensors()[first])


@pytest.mark.parametrize("fused", ("tied", "split"))
def test_an_export_holds_what_is_trained(checkpoints, fused, method):
    """No more: what parts share is gathered, digested and sent once; a run of the other kind takes it all the same."""
    engine = make_engine(checkpoints["qwen3", FP32], fused=fused, **method)
    randomise(engine)
    exported = engine.export_adapter()
    assert exported.tied == (fused == "tied")
    assert list(exported.tensors) == list(engine.adapter.named_parameters())
    assert exported.num_bytes == engine.adapter.num_bytes
    split = make_engine(checkpoints["qwen3", FP32], fused="split", **method)
    split.adapter.load(exported)
    assert split.export_adapter().digest() == exported.untied().digest()
    assert max_difference(log_probs(split, sequences()), log_probs(engine, sequences())) <= 1e-5


def test_load_refuses_what_it_cannot_hold(checkpoints):
    engine = make_engine(checkpoints["qwen3", FP32])
    randomise(engine)
    good = engine.export_adapter()
    name = tensor_name("model.layers.1.self_attn.k_proj")
    parts = good.untied().tensors
    differing = Adapter({**parts, name: parts[name] + 1}, good.config)
    with pytest.raises(ValueError, match="layers.1.self_attn.k_proj.* differs from .*q_proj"):
        engine.adapter.load(differing)
    with pytest.raises(ValueError, match="layers.1.self_attn.k_proj.*missing"):
        engine.adapter.load(Adapter({n: t for n, t in parts.items() if n != name}, good.config))
    exact = dataclasses.replace(good.config, method=OFTMethod(block_size=16, cayley_neumann_terms=None))
    with pytest.raises(ValueError, match="differs from the run's"):
        engine.adapter.load(Adapter(parts, exact))
    rounded = make_engine(checkpoints["qwen3", FP32], dtype="bf16")
    with pytest.raises(ValueError, match="orbit.adapter.dtype=fp32"):
        rounded.adapter.load(good)
    assert engine.export_adapter().digest() == good.digest()


def test_snapshot_survives_training(checkpoints, method):
    """verl saves the old policy and brings it back; on a CPU `.cpu()` would alias the live tensors."""
    engine, tokens = make_engine(checkpoints["qwen3", FP32], **method), sequences()
    train_step(engine, tokens)
    old, snapshot = log_probs(engine, tokens), engine.snapshot_adapter()
    train_step(engine, tokens)
    new, current = log_probs(engine, tokens), engine.snapshot_adapter()
    assert max_difference(old, new) > 1e-3
    engine.restore_adapter(snapshot)
    assert max_difference(log_probs(engine, tokens), old) == 0
    engine.restore_adapter(current)
    assert max_difference(log_probs(engine, tokens), new) == 0
    with pytest.raises(ValueError, match="snapshot of 0 tensors"):
        engine.restore_adapter({})


@pytest.mark.parametrize("name", METHODS)
def test_peft_folder_round_trip(checkpoints, tmp_path, name):
    """docs/field-cases.md: exported adapter."""
    engine = make_engine(checkpoints["llama", FP32], **METHODS[name])
    randomise(engine)
    write_peft_folder(engine.export_adapter(), tmp_path)
    read, before = read_peft_folder(tmp_path), engine.export_adapter()
    assert not read.tied and read.digest() == before.untied().digest()
    randomise(engine, seed=6)
    engine.adapter.load(read)
    assert engine.export_adapter().digest() == before.digest()
    with pytest.raises(ValueError, match="no adapter_config.json and no adapter_model.safetensors"):
        read_peft_folder(tmp_path / "nowhere")


@pytest.mark.parametrize("name", METHODS)
def test_peft_finds_the_base_of_a_folder(checkpoints, tmp_path, name):
    folder = checkpoints["llama", FP32]
    engine, tokens = make_engine(folder, **METHODS[name]), sequences()
    randomise(engine)
    write_peft_folder(engine.export_adapter(), tmp_path, engine.model_config.path)
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path, dtype=FP32)
    assert max_difference(log_probs(engine, tokens), reference_log_probs(model, tokens)) < 1e-5


def test_orthogonality_is_reported_and_warned_about(checkpoints, caplog):
    """docs/field-cases.md: Neumann series."""
    engine = make_engine(checkpoints["qwen3", FP32])
    assert engine.adapter.metrics() == {"orbit/oft/orthogonality_error_max": 0}
    assert "orthogonality error" not in caplog.text
    randomise(engine, scale=0.3)
    assert engine.adapter.metrics()["orbit/oft/orthogonality_error_max"] > 0.5
    assert "orthogonality error" in caplog.text
    caplog.clear()
    *_, last = engine.adapter.named_parameters().values()
    last.data[0] = float("nan")
    assert math.isnan(engine.adapter.metrics()["orbit/oft/orthogonality_error_max"])
    assert "orthogonality error nan" in caplog.text
    assert make_engine(checkpoints["qwen3", FP32], **METHODS["lora"]).adapter.metrics() == {}
