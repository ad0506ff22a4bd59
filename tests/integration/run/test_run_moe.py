"""Runs of mixtures of experts on INT4 bases: adapters on attention and on every expert reach the server."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_run_async import ASYNC
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3Config, Qwen3MoeConfig

from orbit_cli.quantize import quantize_checkpoint
from recipes.tiny_arithmetic.tokenizer import build_tokenizer

pytestmark = pytest.mark.slow

SYNC = (
    "trainer.v1.trainer_mode=sync",
    "trainer.total_training_steps=3",
    "trainer.save_freq=3",
    "trainer.resume_mode=disable",
    "orbit.seed=0",
    "orbit.base.experts_per_chunk=3",
)
TWO_TRAINER_RANKS = (
    "trainer.n_gpus_per_node=2",
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size=2",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
    "trainer.total_training_steps=3",
    "trainer.save_freq=3",
)
EXPERTS, LAYERS = 8, 2


FAMILIES = {
    "qwen3": (
        Qwen3MoeConfig,
        {"num_experts": EXPERTS, "norm_topk_prob": True, "num_key_value_heads": 2, "head_dim": 16},
    ),
    "deepseek": (
        DeepseekV3Config,
        {
            "n_routed_experts": EXPERTS,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 0,
        },
    ),
}
LATENT_TARGETS = (
    "orbit.adapter.target_modules=[q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj,gate_proj,up_proj,down_proj]"
)
OVERRIDES = {
    "qwen3": (),
    "kimi": (LATENT_TARGETS,),
    "deepseek": (LATENT_TARGETS,),
}
# Built by SGLang and never run.
VISION = {
    **{
        "hidden_size": 32,
        "vt_hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    },
    **{"init_pos_emb_height": 4, "init_pos_emb_width": 4, "text_hidden_size": 64},
}
# The first layer that has experts, and a target outside of them.
EXPECTED = {"qwen3": (0, "self_attn.q_proj"), "kimi": (1, "language_model.model.layers.0.self_attn.kv_b_proj")}


def save_model(family: str, folder: Path) -> Path:
    """A random model whose experts are in INT4."""
    tokenizer = build_tokenizer(64)
    torch.manual_seed(0)
    config, fields = FAMILIES[family]
    model = AutoModelForCausalLM.from_config(
        config(
            **fields,
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            moe_intermediate_size=64,
            num_experts_per_tok=2,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            max_position_embeddings=64,
            initializer_range=0.2,
            tie_word_embeddings=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.to(torch.bfloat16).save_pretrained(folder / "bf16")
    tokenizer.save_pretrained(folder / "bf16")
    quantize_checkpoint(folder / "bf16", folder / "int4", format_name="int4", experts_only=family == "deepseek")
    assert AutoTokenizer.from_pretrained(folder / "int4").eos_token_id == tokenizer.eos_token_id
    return folder / "int4"


def save_kimi(folder: Path) -> Path:
    """The same as the language model of a Kimi-K2.5, whose vision tower is in no file."""
    model = save_model("deepseek", folder)
    for file in model.glob("*.safetensors"):
        tensors = {f"language_model.{name}": tensor for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    text = json.loads((model / "config.json").read_text()) | {"model_type": "kimi_k2"}
    text["quantization_config"]["ignore"] = [
        name if name == "lm_head" else f"language_model.{name}" for name in text["quantization_config"]["ignore"]
    ]
    names = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "dtype": text["dtype"]}
    (model / "config.json").write_text(json.dumps({**names, "text_config": text, "vision_config": VISION}))
    return model


def test_a_run_whose_trainer_divides_the_experts(train, tmp_path):
    """Two trainer ranks with half of the experts each: one base, one adapter, the served policy to the bit of one rank."""
    model = save_model("deepseek", tmp_path / "model")
    run = train(model, tmp_path / "run", *ASYNC, *OVERRIDES["deepseek"], *TWO_TRAINER_RANKS)
    assert run.status == 0, run.log[-3000:]
    assert re.search(r"orbit: \d+ tensors of the base are equal, trainer ranks: 2, servers: 1", run.log)
    assert re.search(r"orbit: base unchanged \([0-9a-f]{64}\)", run.log)
    assert [step["orbit/version/served"] for step in run.steps] == [2, 3, 4]
    assert max(run.parity("mean")) <= 5e-3
    adapter = load_file(run.folder / "checkpoints" / "adapter" / "adapter_model.safetensors")
    trained = {name for name, tensor in adapter.items() if tensor.any()}
    for expert in (0, EXPERTS - 1):
        assert any(f".mlp.experts.{expert}." in name for name in trained)


@pytest.mark.parametrize("family", ["qwen3", "kimi"])
def test_a_short_run(train, family, tmp_path):
    model = save_kimi(tmp_path / "model") if family == "kimi" else save_model(family, tmp_path / "model")
    run = train(model, tmp_path / "run", *SYNC, *OVERRIDES[family])
    assert run.status == 0, run.log[-3000:]
    for number, step in enumerate(run.steps, start=1):
        assert step["orbit/version/trainer"] == step["orbit/version/served"] == number + 1
        assert step["orbit/parity/num_tokens"] > 0
        assert step["orbit/parity/logprob_abs_diff_mean"] <= 5e-3
        assert step["orbit/parity/logprob_abs_diff_max"] <= 0.1
    adapter = load_file(run.folder / "checkpoints" / "adapter" / "adapter_model.safetensors")
    first, other_target = EXPECTED[family]
    layers = range(first, LAYERS)
    names = [f"layers.{layer}.mlp.experts.{expert}.down_proj" for layer in layers for expert in range(EXPERTS)]
    trained = [name for name, tensor in adapter.items() if tensor.any()]
    assert sum(any(name in tensor for tensor in adapter) for name in names) == len(names)
    assert sum(any(name in tensor for tensor in trained) for name in names) > len(names) // 2
    assert any(other_target in name for name in trained)
