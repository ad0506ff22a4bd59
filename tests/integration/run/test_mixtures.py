"""Runs of mixtures of experts on INT4 bases: adapters on attention and on every expert reach the server."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from orbit_cli.quantize import quantize_checkpoint
from tests.support import runs
from tests.support.runs import ASYNC, SYNC

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("run")]

THREE_STEPS = (
    *SYNC,
    "trainer.total_training_steps=3",
    "trainer.save_freq=3",
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
LATENT_TARGETS = (
    "orbit.adapter.target_modules=[q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj,gate_proj,up_proj,down_proj]"
)
REPLAY = "actor_rollout_ref.actor.megatron.router_replay.mode"
# Two updates a step, so that experts are replayed which the changed adapter would not choose.
R2 = (f"{REPLAY}=R2", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
OVERRIDES = {"qwen3_moe": R2, "kimi_k25": (LATENT_TARGETS,)}
# The first layer that has experts, and a target outside of them.
EXPECTED = {"qwen3_moe": (0, "self_attn.q_proj"), "kimi_k25": (1, "language_model.model.layers.0.self_attn.kv_b_proj")}


def save_quantized(family: str, folder: Path, *, experts_only: bool) -> Path:
    """A random model whose experts, or all linears, are in INT4."""
    source = runs.save_model(family, folder / "bf16", torch.bfloat16)
    quantize_checkpoint(source, folder / "int4", format_name="int4", experts_only=experts_only)
    return folder / "int4"


def test_a_run_whose_trainer_divides_the_experts(train, tmp_path):
    """Two trainer ranks with half of the experts each: one base, one adapter, the served policy to the bit of one rank.

    Both take the experts that the server recorded (R3), for stale samples too.
    """
    model = save_quantized("deepseek_v3", tmp_path / "model", experts_only=True)
    run = train(model, tmp_path / "run", *ASYNC, LATENT_TARGETS, *TWO_TRAINER_RANKS, f"{REPLAY}=R3").succeeded()
    assert re.search(r"orbit: \d+ tensors of the base are equal, trainer ranks: 2, servers: 1", run.log)
    assert re.search(r"orbit: base unchanged \([0-9a-f]{64}\)", run.log)
    assert [step["orbit/version/served"] for step in run.steps] == [2, 3, 4]
    run.check_parity()
    for step in run.steps:
        assert 0.8 < step["orbit/router_replay/replayed"] < 1, "all tokens have a record but the last of each sample"
        assert step["orbit/router_replay/other_choice"] < 0.5
    adapter = load_file(run.adapter / "adapter_model.safetensors")
    trained = {name for name, tensor in adapter.items() if tensor.any()}
    for expert in (0, EXPERTS - 1):
        assert any(f".mlp.experts.{expert}." in name for name in trained)


@pytest.mark.parametrize("family", OVERRIDES)
def test_a_short_run(train, family, tmp_path):
    model = save_quantized(family, tmp_path / "model", experts_only=family == "kimi_k25")
    run = train(model, tmp_path / "run", *THREE_STEPS, *OVERRIDES[family]).succeeded()
    # Each side chooses experts by itself, so a rounding may choose another one: seen in one of several runs, 0.17 nats in all.
    run.check_parity(mean=1e-3, largest=0.3)
    for number, step in enumerate(run.steps, start=1):
        assert step["orbit/version/trainer"] == step["orbit/version/served"] == number + 1
        assert step["orbit/parity/num_tokens"] > 0
        if family == "qwen3_moe":
            assert step["orbit/router_replay/replayed"] == 1
    if family == "qwen3_moe":
        assert 0 < max(step["orbit/router_replay/other_choice"] for step in run.steps) < 0.5
    adapter = load_file(run.adapter / "adapter_model.safetensors")
    first, other_target = EXPECTED[family]
    layers = range(first, LAYERS)
    names = [f"layers.{layer}.mlp.experts.{expert}.down_proj" for layer in layers for expert in range(EXPERTS)]
    trained = [name for name, tensor in adapter.items() if tensor.any()]
    assert sum(any(name in tensor for tensor in adapter) for name in names) == len(names)
    assert sum(any(name in tensor for tensor in trained) for name in names) > len(names) // 2
    assert any(other_target in name for name in trained)
