"""Synchronous runs, fp32 base, KL loss on: parity, what travels, what stays, and resume."""

import collections
import json
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.runs import SYNC

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("run")]

# One epoch of 40 rows has five batches; the sixth step is of another.
SIX_STEPS = (
    *SYNC,
    "trainer.total_epochs=1",
    "data.train_max_samples=40",
    "trainer.total_training_steps=6",
    "trainer.save_freq=3",
    "trainer.test_freq=3",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_coef=0.01",
)


@pytest.fixture(scope="module")
def model(models):
    return models(torch.float32)


@pytest.fixture(scope="module")
def six_steps(train, model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("six")
    return train(model, folder, *SIX_STEPS, f"trainer.rollout_data_dir={folder}/rollouts").succeeded()


def adapter_file(run, step):
    return run.folder / "checkpoints" / f"global_step_{step}" / "actor" / "adapter/adapter_model.safetensors"


def test_parity_at_every_step(six_steps):
    six_steps.check_parity(mean=3e-6, largest=3e-5)  # measured 4e-7 and 2.4e-6
    for step in six_steps.steps:
        assert step["orbit/parity/num_tokens"] > 0
        assert "orbit/parity/stale_num_tokens" not in step


def test_all_steps_that_were_asked_for_are_made(six_steps):
    """In more epochs than ``trainer.total_epochs`` where these have not enough."""
    assert len(six_steps.steps) == 6
    assert (six_steps.folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "6"


def test_every_version_is_served(six_steps):
    for number, step in enumerate(six_steps.steps, start=1):
        assert step["orbit/version/trainer"] == step["orbit/version/served"] == number + 1
        assert step["orbit/version/lag"] == 0
        assert step["orbit/sync/activate_pause_ms"] < 50  # the median is held below 1 ms in the server tests


def test_equal_prompts_of_a_batch_have_samples_of_their_own(six_steps):
    """A batch has eight prompts of six kinds, with four samples each."""
    for file in (six_steps.folder / "rollouts").iterdir():
        outputs = collections.defaultdict(list)
        for line in file.read_text().splitlines():
            outputs[json.loads(line)["input"]].append(json.loads(line)["output"])
        repeated = [samples for samples in outputs.values() if len(samples) > 4]
        assert repeated and sum(map(len, outputs.values())) == 32
        assert all(len(set(samples)) > 4 for samples in repeated), repeated


def test_validation_uses_the_active_version(six_steps):
    """No request of a validation names an adapter; every token of it is the active version's.

    docs/field-cases.md: no path misses the adapter.
    """
    validations = {
        number: (step["orbit/version/validated"], step["orbit/version/validated_newest"])
        for number, step in enumerate(six_steps.steps, start=1)
        if "orbit/version/validated" in step
    }
    assert validations == {3: (4, 4), 6: (7, 7)}


def test_only_the_adapter_travels(six_steps):
    for step in six_steps.steps:
        assert step["orbit/sync/bytes"] <= 1.05 * step["orbit/memory/adapter_bytes"]
        assert step["orbit/memory/base_bytes"] > 4 * step["orbit/memory/adapter_bytes"]


def test_reference_is_the_base(six_steps):
    """The KL to the base is 0 before the first update and grows with the adapter. docs/field-cases.md: reference policy."""
    losses = [step["actor/kl_loss"] for step in six_steps.steps]
    assert abs(losses[0]) < 1e-9
    assert losses[-1] > 1e-7


def test_named_metrics_are_there(six_steps):
    last = six_steps.steps[-1]
    for name in (
        "orbit/parity/logprob_abs_diff_p99",
        "orbit/parity/k3_kl",
        "orbit/staleness/mean",
        "orbit/staleness/max",
        "orbit/sync/export_s",
        "orbit/sync/stage_s",
        "orbit/trainer_wait_s",
        "orbit/rollout_utilization",
        "orbit/memory/gradient_bytes",
        "orbit/memory/optimizer_bytes",
        "orbit/memory/activation_peak_bytes",
        "orbit/oft/orthogonality_error_max",
    ):
        assert name in last, name
    assert 0 < last["orbit/rollout_utilization"] <= 1


def test_adapter_loads_in_peft(six_steps, model):
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.arange(3, 20)[None]
    before = base(ids).logits.detach().clone()
    adapted = PeftModel.from_pretrained(base, six_steps.adapter)
    assert (adapted(ids).logits - before).abs().max() > 1e-4
    saved = load_file(six_steps.adapter / "adapter_model.safetensors")
    assert len(saved) == 2 * 7
    assert all(tensor.abs().max() > 0 for tensor in saved.values())


@pytest.fixture(scope="module")
def resumed(six_steps, train, model, tmp_path_factory):
    """Three steps, a new process, three more; it keeps one step."""
    folder = tmp_path_factory.mktemp("resumed")
    checkpoints = folder / "checkpoints"
    shutil.copytree(six_steps.folder / "checkpoints" / "global_step_3", checkpoints / "global_step_3")
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("3")
    keep = "trainer.max_actor_ckpt_to_keep=1"
    return train(model, folder, *SIX_STEPS, keep, "trainer.resume_mode=auto").succeeded()


def test_resume_equals_one_run(six_steps, resumed):
    """The adapter of step 6 is the same, bit for bit. docs/field-cases.md: two kinds of resume."""
    assert len(resumed.steps) == 3
    assert adapter_file(resumed, 6).read_bytes() == adapter_file(six_steps, 6).read_bytes()
    assert adapter_file(resumed, 6).read_bytes() != adapter_file(six_steps, 3).read_bytes()


def test_a_resumed_run_removes_the_steps_of_the_run_before(resumed):
    """As whole folders, once its own is committed."""
    found = {path.name for path in (resumed.folder / "checkpoints").iterdir()}
    assert found == {".run.lock", "adapter", "global_step_6", "latest_checkpointed_iteration.txt"}
    step = resumed.folder / "checkpoints" / "global_step_6"
    assert {path.name for path in step.iterdir()} == {"actor", "data.pt"}


def test_a_validation_leaves_the_trained_adapter(resumed, train, model, tmp_path):
    before = (resumed.adapter / "adapter_model.safetensors").read_bytes()
    shutil.copytree(resumed.folder / "checkpoints", tmp_path / "checkpoints")
    only = ("trainer.val_only=true", "trainer.val_before_train=true", "trainer.resume_mode=disable")
    run = train(model, tmp_path, *SIX_STEPS, *only).succeeded()
    assert len(run.steps) == 1
    assert (run.adapter / "adapter_model.safetensors").read_bytes() == before
