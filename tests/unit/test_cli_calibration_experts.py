"""Calibrated inputs of experts, which transformers stacks into one module."""

import pytest
import torch
from torch.nn import functional
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from orbit_cli.calibration import HEADROOM, _random_tokens, largest_inputs

EXPERTS, PREFIX = 4, "model.layers.1.mlp.experts"
MODULES = [f"{PREFIX}.{expert}.{part}" for expert in range(EXPERTS) for part in ("gate_proj", "up_proj", "down_proj")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=32,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    path = tmp_path_factory.mktemp("moe") / "model"
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


def test_experts_of_a_layer_have_the_largest_input_of_any(folder):
    found = largest_inputs(folder, [*MODULES, "model.layers.1.self_attn.q_proj"])
    model = Qwen3MoeForCausalLM.from_pretrained(folder).eval()
    seen = []
    model.get_submodule(PREFIX).register_forward_pre_hook(lambda _module, inputs: seen.append(inputs))
    with torch.no_grad():
        model(_random_tokens(model.config))
        ((x_TD, ids_TK, _),) = seen
        stacked = model.get_submodule(PREFIX).gate_up_proj
        hidden = []
        for x, ids in zip(x_TD, ids_TK, strict=True):
            for expert in ids:
                gate, up = functional.linear(x, stacked[expert]).chunk(2)
                hidden.append((functional.silu(gate) * up).abs().max().item())
    expected = {"gate_proj": x_TD.abs().max().item(), "up_proj": x_TD.abs().max().item(), "down_proj": max(hidden)}
    for module in MODULES:
        assert found[module] == pytest.approx(HEADROOM * expected[module.rpartition(".")[2]], rel=1e-4)
    assert found["model.layers.1.self_attn.q_proj"] > 0


def test_an_unknown_expert_is_named(folder):
    with pytest.raises(ValueError, match=r"layers\.7\.mlp\.experts\.0\.up_proj"):
        largest_inputs(folder, ["model.layers.7.mlp.experts.0.up_proj"])
