"""Asynchronous runs on a BF16 base: servers generate while the trainer trains, and versions change under them."""

import time

import psutil
import pytest
import torch

pytestmark = pytest.mark.slow

ASYNC = (
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=1",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "trainer.resume_mode=disable",
    "trainer.save_freq=-1",
)


@pytest.fixture(scope="module")
def model(models):
    return models(torch.bfloat16)


@pytest.fixture(scope="module")
def run(train, model, tmp_path_factory):
    finished = train(
        model, tmp_path_factory.mktemp("async"), *ASYNC, "trainer.total_training_steps=6", "orbit.adapter.fused=split"
    )
    assert finished.status == 0, finished.log[-3000:]
    return finished


def test_parity_in_bf16(run):
    checked = 0
    for step in run.steps:
        for kind in ("", "audit_"):
            mean = step.get(f"orbit/parity/{kind}logprob_abs_diff_mean")
            if mean is not None:
                checked += 1
                assert mean <= 5e-3
                assert step[f"orbit/parity/{kind}logprob_abs_diff_max"] <= 0.1
    assert checked >= len(run.steps), "every step has tokens of the trained version, or audited ones"


def test_a_version_behind_is_far_off(run):
    """The gate's number for tokens of the version before is at least ten times that of the right version."""
    late = [step for step in run.steps if "orbit/parity/audit_logprob_abs_diff_mean" in step]
    assert late, "no step had stale tokens to audit"
    for step in late:
        stale = step["orbit/parity/stale_logprob_abs_diff_mean"]
        assert stale >= 10 * step["orbit/parity/audit_logprob_abs_diff_mean"]


def test_versions_grow_by_one_and_samples_lag_little(run):
    assert [step["orbit/version/served"] for step in run.steps] == [2, 3, 4, 5, 6, 7]
    assert all(0 <= step["orbit/staleness/max"] <= 2 for step in run.steps)


def test_nothing_was_aborted(run):
    assert "RejectedSample" not in run.log
    assert not any(step.get("training/rollout_failure/evicted_samples") for step in run.steps)


def test_base_is_unchanged(run):
    """The run itself compares digests and fails otherwise; its adapter is the proof that it got there."""
    assert (run.folder / "checkpoints" / "adapter" / "adapter_model.safetensors").is_file()


def test_a_server_that_dies_ends_the_run(train, model, tmp_path):
    """Killed in the middle of a step: an error that names the server, a non-zero exit, no process left."""
    killed_at = []

    def kill_scheduler_after_first_step() -> None:
        metrics = tmp_path / "metrics.jsonl"
        if killed_at or not metrics.is_file() or not metrics.read_text():
            return
        schedulers = [
            process for process in psutil.Process().children(recursive=True) if "sglang::schedul" in process.name()
        ]
        assert len(schedulers) == 1
        schedulers[0].kill()
        killed_at.append(time.monotonic())

    run = train(model, tmp_path, *ASYNC, "trainer.total_training_steps=500", on_poll=kill_scheduler_after_first_step)
    assert killed_at, run.log[-3000:]
    assert run.status != 0
    assert time.monotonic() - killed_at[0] < 180
    assert "SGLang server at 127.0.0.2" in run.log
    leftovers = [p.cmdline() for p in psutil.process_iter() if str(tmp_path) in " ".join(p.cmdline())]
    assert leftovers == []
