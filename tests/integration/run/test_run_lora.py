"""A synchronous run with a LoRA adapter: parity at every step, versions, and peft at the end."""

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow

LORA = (
    "trainer.v1.trainer_mode=sync",
    "trainer.total_training_steps=3",
    "trainer.save_freq=3",
    "trainer.resume_mode=disable",
    "orbit.adapter.type=lora",
    "orbit.adapter.rank=4",
    "orbit.adapter.alpha=6",
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "orbit.seed=0",
)


@pytest.fixture(scope="module")
def model(models):
    return models(torch.bfloat16)


@pytest.fixture(scope="module")
def three_steps(train, model, tmp_path_factory):
    run = train(model, tmp_path_factory.mktemp("lora"), *LORA)
    assert run.status == 0, run.log[-3000:]
    return run


def test_the_policy_trained_is_the_policy_served(three_steps):
    for number, step in enumerate(three_steps.steps, start=1):
        assert step["orbit/version/trainer"] == step["orbit/version/served"] == number + 1
        assert step["orbit/parity/num_tokens"] > 0
        assert step["orbit/parity/logprob_abs_diff_mean"] <= 1e-4  # measured 7.8e-8
        assert step["orbit/parity/logprob_abs_diff_max"] <= 0.1  # measured 4.8e-7
        assert "orbit/oft/orthogonality_error_max" not in step


def test_only_the_adapter_travels(three_steps):
    for step in three_steps.steps:
        assert step["orbit/sync/bytes"] <= step["orbit/memory/adapter_bytes"] + 6000  # the header


def test_the_adapter_moves_and_loads_in_peft(three_steps, model):
    folder = three_steps.folder / "checkpoints" / "adapter"
    saved = load_file(folder / "adapter_model.safetensors")
    assert len(saved) == 2 * 2 * 7
    assert all(tensor.abs().max() > 0 for tensor in saved.values())
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.arange(3, 20)[None]
    before = base(ids).logits.detach().clone()
    assert (PeftModel.from_pretrained(base, folder)(ids).logits - before).abs().max() > 0.1
