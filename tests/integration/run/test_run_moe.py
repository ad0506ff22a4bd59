"""A run of a mixture of experts on an INT4 base: adapters on attention and on every expert reach the server."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

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
EXPERTS, LAYERS = 8, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    tokenizer = build_tokenizer(64)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "bf16")
    tokenizer.save_pretrained(folder / "bf16")
    quantize_checkpoint(folder / "bf16", folder / "int4", format_name="int4", group_size=32)
    assert AutoTokenizer.from_pretrained(folder / "int4").eos_token_id == tokenizer.eos_token_id
    return folder / "int4"


def test_a_short_run(train, model, tmp_path):
    run = train(model, tmp_path / "run", *SYNC)
    assert run.status == 0, run.log[-3000:]
    for number, step in enumerate(run.steps, start=1):
        assert step["orbit/version/trainer"] == step["orbit/version/served"] == number + 1
        assert step["orbit/parity/num_tokens"] > 0
        assert step["orbit/parity/logprob_abs_diff_mean"] <= 5e-3
        assert step["orbit/parity/logprob_abs_diff_max"] <= 0.1
    adapter = load_file(run.folder / "checkpoints" / "adapter" / "adapter_model.safetensors")
    names = [f"layers.{layer}.mlp.experts.{expert}.down_proj" for layer in range(LAYERS) for expert in range(EXPERTS)]
    trained = [name for name, tensor in adapter.items() if tensor.any()]
    assert sum(any(name in tensor for tensor in adapter) for name in names) == len(names)
    assert sum(any(name in tensor for tensor in trained) for name in names) > len(names) // 2
    assert any("self_attn.q_proj" in name for name in trained)
