"""A server that is gone ends the run, and leaves nothing behind."""

import signal
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.support.runs import ASYNC, Run

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("run")]

WAITS_LITTLE = (*ASYNC, "trainer.total_training_steps=500", "orbit.slots.timeout_s=20")


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


def test_a_killed_server_ends_the_run(train, models, tmp_path):
    check_ended(train, models(torch.bfloat16), tmp_path, signal.SIGKILL)


@pytest.mark.long
def test_a_killed_server_ends_a_run_whose_processes_start_as_a_users(train_as_deployed, models, tmp_path):
    """Until then it trains as every other."""
    check_ended(train_as_deployed, models(torch.bfloat16), tmp_path, signal.SIGKILL).check_parity()


@pytest.mark.long
def test_a_hung_server_ends_the_run(train, models, tmp_path):
    check_ended(train, models(torch.bfloat16), tmp_path, signal.SIGSTOP)


def check_ended(train, model: Path, folder: Path, number: signal.Signals) -> Run:
    """In the middle of a step: an error that names the server, a non-zero exit, no process left."""
    fault = ServerFault(folder / "metrics.jsonl", number)
    run = train(model, folder, *WAITS_LITTLE, on_poll=fault.poll)
    assert fault.sent_at is not None, run.log[-3000:]
    assert run.status != 0
    assert time.monotonic() - fault.sent_at < 180
    assert "SGLang server at 127.0.0.2" in run.log
    assert fault.left_behind == []
    return run
