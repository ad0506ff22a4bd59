"""A synchronous run with a LoRA adapter: parity at every step, versions, and peft at the end."""

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.runs import SYNC

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("run")]

LORA = (
    *SYNC,
    "trainer.total_training_steps=3",
    "trainer.save_freq=3",
    "orbit.adapter.type=lora",
    "orbit.adapter.rank=4",
    "orbit.adapter.alpha=6",
    "actor_rollout_ref.actor.optim.lr=1e-2",
)


@pytest.fixture(scope="module")
def three_steps(train, models, tmp_path_factory):
    return train(models(torch.bfloat16), tmp_path_factory.mktemp("lora"), *LORA).succeeded()


def test_the_policy_trained_is_the_policy_served(three_steps):
    three_steps.check_parity()
    for number, step in enumerate(three_steps.steps, start=1):
        assert step["orbit/version/trainer"] == step["orbit/version/served"] == number + 1
        assert step["orbit/parity/num_tokens"] > 0
        assert "orbit/oft/orthogonality_error_max" not in step


def test_only_the_adapter_travels(three_steps):
    for step in three_steps.steps:
        assert step["orbit/sync/bytes"] <= step["orbit/memory/adapter_bytes"] + 6000  # the header


def test_the_adapter_moves_and_loads_in_peft(three_steps, models):
    saved = load_file(three_steps.adapter / "adapter_model.safetensors")
    assert len(saved) == 2 * 2 * 7
    assert all(tensor.abs().max() > 0 for tensor in saved.values())
    base = AutoModelForCausalLM.from_pretrained(models(torch.bfloat16), dtype=torch.float32)
    ids = torch.arange(3, 20)[None]
    before = base(ids).logits.detach().clone()
    assert (PeftModel.from_pretrained(base, three_steps.adapter)(ids).logits - before).abs().max() > 0.1
