"""Asynchronous runs on a BF16 base: two servers generate while the trainer trains, and versions change under them."""

import re
import signal
import time
from pathlib import Path

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
        model,
        tmp_path_factory.mktemp("async"),
        *ASYNC,
        "actor_rollout_ref.rollout.n_gpus_per_node=2",
        "trainer.total_training_steps=6",
        "trainer.test_freq=3",
        "orbit.adapter.fused=split",
    )
    assert finished.status == 0, finished.log[-3000:]
    return finished


def test_parity_in_bf16(run):
    means = run.parity("mean")
    assert len(means) >= len(run.steps), "every step has tokens of the trained version, or audited ones"
    assert max(means) <= 5e-3 and max(run.parity("max")) <= 0.1


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


def test_both_servers_answer_and_are_served_every_version(run):
    """``served`` is the oldest of their active versions."""
    assert "orbit: 25 tensors of the base are equal, trainer ranks: 1, servers: 2" in run.log
    assert max(step["orbit/rollout_utilization_min"] for step in run.steps) > 0


def test_nothing_was_aborted(run):
    assert "RejectedSample" not in run.log
    assert not any(step.get("training/rollout_failure/evicted_samples") for step in run.steps)


def test_the_run_ends_with_the_base_unchanged_and_an_adapter(run):
    """The run compares the digests at its start and its end, and fails otherwise."""
    assert re.search(r"orbit: base unchanged \([0-9a-f]{64}\)", run.log)
    assert (run.folder / "checkpoints" / "adapter" / "adapter_model.safetensors").is_file()


def test_validation_uses_the_active_version(run):
    """No request of a validation names an adapter; every token of it is the active version's (field-cases #1)."""
    validations = [step for step in run.steps if "orbit/version/validated" in step]
    assert len(validations) == 2
    for step in validations:
        assert step["orbit/version/validated"] == step["orbit/version/validated_newest"] == step["orbit/version/served"]


class ServerFault:
    """Sends a signal to the run's SGLang scheduler after the first step, and looks for processes left at the end."""

    def __init__(self, metrics: Path, number: signal.Signals):
        self.sent_at: float | None = None
        self.left_behind: list[psutil.Process] = []
        self._trainer: psutil.Process | None = None
        self._metrics = metrics
        self._number = number
        self._known = set(psutil.Process().children(recursive=True))

    def poll(self) -> None:
        ours = [process for process in psutil.Process().children(recursive=True) if process not in self._known]
        if self._trainer is None:
            # At the first call nothing has been orphaned yet, so the run is this process's only new child.
            (self._trainer,) = (process for process in psutil.Process().children() if process not in self._known)
        elif self.sent_at is None:
            if self._metrics.is_file() and self._metrics.read_text():
                (scheduler,) = (process for process in ours if _name(process).startswith("sglang::schedul"))
                scheduler.send_signal(self._number)
                self.sent_at = time.monotonic()
        elif not self._trainer.is_running() or self._trainer.status() == psutil.STATUS_ZOMBIE:
            # Waiting for the trainer here would take its exit status from the one who started it.
            others = [process for process in ours if process != self._trainer]
            _, self.left_behind = psutil.wait_procs(others, timeout=20)


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_is_gone_ends_the_run(train, model, tmp_path, number):
    """Killed, or hung, in the middle of a step: an error that names the server, a non-zero exit, no process left."""
    fault = ServerFault(tmp_path / "metrics.jsonl", number)
    overrides = (*ASYNC, "trainer.total_training_steps=500", "orbit.slots.timeout_s=10")
    run = train(model, tmp_path, *overrides, on_poll=fault.poll)
    assert fault.sent_at is not None, run.log[-3000:]
    assert run.status != 0
    assert time.monotonic() - fault.sent_at < 180
    assert "SGLang server at 127.0.0.2" in run.log
    assert fault.left_behind == []
