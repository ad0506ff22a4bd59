import json
import shutil

import pytest
import safetensors.torch
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from transformers import AutoConfig
from verl.trainer.config import CheckpointConfig
from verl.workers.config import HFModelConfig, McoreOptimizerConfig

from orbit_kernels.families import read_architecture
from orbit_kernels.linears.fusing import GATE_UP
from orbit_verl.config.keys import BaseSettings
from orbit_verl.model.build import build_model, transformer_config
from orbit_verl.model.layout import ParallelLayout
from orbit_verl.model.modules import residual_sum
from orbit_verl.model.naming import named_tensors
from orbit_verl.worker.engine import OrbitEngine
from orbit_verl.worker.engine_config import OrbitEngineConfig
from tests.support.engines import (
    Tokenizer,
    load_reference,
    log_probs,
    make_batch,
    make_engine,
    max_difference,
    nll,
    randomise,
    sequences,
)
from tests.support.tiny_models import save_trained

FP32, BF16 = torch.float32, torch.bfloat16
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def copied(checkpoints, tmp_path):
    """A writable copy of a checkpoint, and a function that edits its tensors."""

    def copy(kind="qwen3", dtype=FP32):
        folder = shutil.copytree(checkpoints[kind, dtype], tmp_path / "model")

        def edit(change):
            file = folder / "model.safetensors"
            tensors = safetensors.torch.load_file(file)
            change(tensors)
            safetensors.torch.save_file(tensors, file)

        return folder, edit

    return copy


@pytest.mark.parametrize("dtype", (FP32, BF16))
@pytest.mark.parametrize("kind", ("qwen3", "llama"))
def test_the_frozen_bits_are_the_checkpoints(checkpoints, kind, dtype):
    path = checkpoints[kind, dtype]
    stored = safetensors.torch.load_file(path / "model.safetensors")
    model = make_engine(path).module[0]
    assert isinstance(model, GPTModel)
    held = dict(named_tensors(model))
    assert held.keys() == stored.keys()
    assert [name for name in stored if held[name].dtype != dtype or not torch.equal(held[name], stored[name])] == []


@pytest.mark.parametrize(
    ("change", "message"),
    (
        (lambda tensors: tensors.pop(DOWN), f"{DOWN}: missing"),
        (lambda tensors: tensors.update({"model.extra": torch.zeros(1)}), "model.extra: superfluous"),
        (
            lambda tensors: tensors.update({DOWN: torch.zeros(64, 32)}),
            rf"{DOWN}: shape \(64, 32\), expected \(64, 96\)",
        ),
    ),
)
def test_tensors_that_do_not_fit_are_refused_by_name(copied, change, message):
    folder, edit = copied()
    edit(change)
    with pytest.raises(ValueError, match=message):
        make_engine(folder)


def test_every_misfit_is_listed(copied):
    folder, edit = copied()
    edit(lambda tensors: [tensors.pop(name) for name in list(tensors) if "q_norm" in name])
    with pytest.raises(ValueError, match="layers.0.self_attn.q_norm.weight: missing; .*layers.1"):
        make_engine(folder)


def test_missing_files_are_refused(copied, tmp_path):
    architecture = read_architecture(AutoConfig.from_pretrained(copied()[0]))
    config = transformer_config(architecture, {})
    with pytest.raises(ValueError, match="no such folder"):
        build_model(architecture, BaseSettings(), config, tmp_path / "nowhere", torch.device("cpu"), ParallelLayout())
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"\*.safetensors not found"):
        build_model(architecture, BaseSettings(), config, tmp_path / "model", torch.device("cpu"), ParallelLayout())


def test_sharded_checkpoint_loads_and_a_missing_shard_is_named(checkpoints, tmp_path):
    path = checkpoints["qwen3", FP32]
    load_reference(path, FP32).save_pretrained(tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    ours = log_probs(make_engine(tmp_path), sequences())
    assert max_difference(ours, log_probs(make_engine(path), sequences())) == 0
    shards[1].unlink()
    with pytest.raises(ValueError, match=shards[1].name):
        make_engine(tmp_path)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    (
        ("qwen3", "attention_bias", True),
        ("llama", "mlp_bias", True),
        ("llama", "hidden_act", "gelu"),
        ("qwen3", "architectures", ["MixtralForCausalLM"]),
        ("qwen3", "dtype", "float16"),
        ("qwen3", "layer_types", ["full_attention", "sliding_attention"]),
        ("llama", "rope_type", "yarn"),
    ),
)
def test_configurations_that_cannot_be_represented_are_refused_by_field(checkpoints, kind, field, value):
    config = AutoConfig.from_pretrained(checkpoints[kind, FP32])
    if field == "rope_type":
        config.rope_parameters["rope_type"] = value
    else:
        setattr(config, field, value)
    with pytest.raises(ValueError, match=field):
        read_architecture(config)


def test_bf16_checkpoint_can_be_widened_but_fp32_is_never_narrowed(copied):
    folder, _ = copied(dtype=BF16)
    wide = make_engine(folder, engine={"override_transformer_config": {"params_dtype": "float32"}})
    assert {tensor.dtype for _, tensor in named_tensors(wide.module[0])} == {FP32}
    shutil.rmtree(folder)
    folder, _ = copied(dtype=FP32)
    with pytest.raises(ValueError, match="dtype torch.float32, expected torch.bfloat16"):
        make_engine(folder, engine={"override_transformer_config": {"params_dtype": "bfloat16"}})


def test_tied_head_may_be_stored_but_not_differ(copied):
    """One matrix with two names. docs/field-cases.md: tied embeddings."""
    folder, edit = copied("llama")
    plain = log_probs(make_engine(folder), sequences())
    edit(lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert max_difference(plain, log_probs(make_engine(folder), sequences())) == 0
    edit(lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(ValueError, match="tie_word_embeddings=true"):
        make_engine(folder)


def test_derived_rotary_tensors_are_ignored(copied):
    folder, edit = copied("llama")
    edit(lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    make_engine(folder)


def test_residual_is_normalised_before_it_is_rounded(checkpoints):
    """The server's order (srt/layers/layernorm.py::RMSNorm.forward_native), written out; rounding first would change most rows."""
    layer = make_engine(checkpoints["qwen3", BF16]).module[0].decoder.layers[0]
    generator = torch.Generator().manual_seed(0)
    residual, attention, mlp = (torch.randn(5, 2, 64, generator=generator).to(BF16) for _ in range(3))
    add = residual_sum(training=True, fused=False)
    after_attention = add((attention, None), residual, 0.0)
    after_mlp = add((mlp, None), after_attention, 0.0)

    total = attention.float() + residual.float()
    norm = layer.pre_mlp_layernorm
    scaled = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(norm(after_attention), (scaled * norm.weight.float()).to(BF16))
    assert torch.equal(after_mlp, mlp.float() + total.to(BF16).float())
    assert not torch.equal(norm(after_attention), norm(total.to(BF16)))


def test_padding_before_a_token_is_refused(checkpoints):
    model = make_engine(checkpoints["qwen3", FP32]).module[0]
    tokens = torch.stack([sequences()[0][:10]] * 2)
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[1, :3] = False
    with pytest.raises(ValueError, match="pad on the right"):
        model(input_ids=tokens, position_ids=None, attention_mask=mask)


def build_engine(path, engine=None, checkpoint=None):
    model_config = HFModelConfig(path=str(path), load_tokenizer=False)
    model_config.tokenizer = Tokenizer()
    config = OrbitEngineConfig(**(engine or {}))
    return OrbitEngine(model_config, config, McoreOptimizerConfig(), CheckpointConfig(**(checkpoint or {})))


@pytest.mark.parametrize(
    ("options", "message"),
    (
        ({"engine": {"use_fused_kernels": True}}, "use_fused_kernels=True"),
        ({"engine": {"use_megatron_fsdp": True}}, "use_megatron_fsdp=True"),
        ({"checkpoint": {"save_contents": ["model", "hf_model"]}}, r"checkpoint.save_contents=\['hf_model', 'model'\]"),
        ({"checkpoint": {"load_contents": ["optimizer"]}}, r"checkpoint.load_contents=\['optimizer'\]"),
    ),
)
def test_options_that_are_not_implemented_are_refused(checkpoints, options, message):
    with pytest.raises(ValueError, match=message):
        build_engine(checkpoints["qwen3", FP32], **options)


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"orbit": {}}, r"override_transformer_config \['orbit'\]"),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]},
            r"recompute_modules \['moe'\]: .* choose from \['core_attn', 'mlp'\]",
        ),
    ],
)
def test_transformer_overrides_without_an_effect_are_refused(checkpoints, overrides, message):
    with pytest.raises(ValueError, match=message):
        build_engine(checkpoints["qwen3", FP32], {"override_transformer_config": overrides})


@pytest.mark.parametrize("field", ["sequence_parallel", "context_parallel_size", "pipeline_model_parallel_layout"])
def test_what_follows_from_the_sizes_is_no_transformer_override(checkpoints, field):
    with pytest.raises(ValueError, match=rf"override_transformer_config \['{field}'\]: follow from the sizes"):
        build_engine(checkpoints["qwen3", FP32], {"override_transformer_config": {field: 2}})


def test_recomputed_mlps_have_gradients_where_attention_has_no_adapter(checkpoints):
    """Neither frozen embeddings nor frozen attention give the first layer's MLP an input with a gradient."""
    found = []
    for overrides in ({}, {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}):
        options = {"engine": {"override_transformer_config": overrides}, "target_modules": GATE_UP}
        engine = make_engine(checkpoints["qwen3", FP32], **options)
        randomise(engine)
        with engine.train_mode(zero_grad_on_exit=False):
            engine.forward_backward_batch(make_batch(sequences()), nll)
        found.append(engine.optimizer.gradients())
    kept, recomputed = found
    assert recomputed.keys() == kept.keys()
    for name, gradient in kept.items():
        assert gradient.any() and (recomputed[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_forward_only_engine_infers_without_an_optimizer(checkpoints):
    path = checkpoints["qwen3", FP32]
    engine = make_engine(path, engine={"forward_only": True})
    assert engine.optimizer is None
    assert max_difference(log_probs(engine, sequences()), log_probs(make_engine(path), sequences())) == 0


def test_offload_flags_are_reported_and_move_nothing_on_a_cpu(checkpoints):
    engine = make_engine(checkpoints["qwen3", FP32], engine={"param_offload": True, "optimizer_offload": True})
    assert engine.is_param_offload_enabled and engine.is_optimizer_offload_enabled
    before = [tensor.data_ptr() for _, tensor in named_tensors(engine.module[0])]
    log_probs(engine, sequences())
    assert [tensor.data_ptr() for _, tensor in named_tensors(engine.module[0])] == before


def test_head_dim_may_differ_from_the_hidden_sizes_share(tmp_path):
    path = save_trained("llama", tmp_path / "wide", FP32, head_dim=32)
    assert json.loads((path / "config.json").read_text())["head_dim"] == 32
    assert named_shape(make_engine(path), "model.layers.0.self_attn.o_proj.weight") == (64, 128)


def named_shape(engine, name):
    return tuple(dict(named_tensors(engine.module[0]))[name].shape)
