"""Runs that are killed at random moments, again and again, until they are done: nothing is lost, nothing differs."""

import contextlib
import itertools
import json
import random
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from orbit_verl.driver.step_folders import StepFolders
from tests.support.runs import ASYNC, SYNC, Run

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.xdist_group("run")]

STEPS, KILLS = 8, 50
# As Ray names the processes in a run's log; the driver is whom the test started, and the server's scheduler no actor.
VICTIMS = ("driver", "TaskRunner", "WorkerDict", "server")
EVERY_STEP = (
    *SYNC,
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=1",
    "trainer.max_actor_ckpt_to_keep=2",
    "trainer.resume_mode=auto",
    "orbit.slots.timeout_s=20",
)


class Killer(threading.Thread):
    """Kills one process of a run at a random moment: half of the time while a step is being saved."""

    def __init__(self, folder: Path, victim: str, chance: random.Random):
        super().__init__(daemon=True)
        self.victim = victim
        self.killed = False
        self.ended = threading.Event()
        self._known = set(psutil.Process().children(recursive=True))
        self._steps = StepFolders(folder)
        self._begins_with_a_save = chance.random() < 0.5
        self._delay_s = chance.uniform(0, 0.15) if self._begins_with_a_save else chance.uniform(0, 3)
        self._step = (self._steps.committed() or 0) + chance.randint(1, 2)

    def run(self) -> None:
        while not self._has_begun():
            if self.ended.wait(0.001):
                return
        self.ended.wait(self._delay_s)
        while not (self.killed or self.ended.wait(0.01)):
            for process in self._victims():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
                    self.killed = True

    def _victims(self) -> list[psutil.Process]:
        ours = set(psutil.Process().children(recursive=self.victim != "driver")) - self._known
        if self.victim == "driver":
            return list(ours)
        log = (self._steps.root.parent / "train.log").read_text(errors="replace")
        named = {int(pid) for pid in re.findall(rf"\({self.victim}\w* pid=(\d+)", log)}
        return [process for process in ours if process.pid in named or self._is_server(process)]

    def _is_server(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return self.victim == "server" and process.name().startswith("sglang::schedul")
        return False

    def _has_begun(self) -> bool:
        """The step is being saved, or the one before it has been; there is every process by then."""
        if self._begins_with_a_save:
            return (self._steps.root / f".global_step_{self._step}.partial").exists()
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int(self._steps.tracker.read_text()) >= self._step
        return False


@pytest.fixture(scope="module")
def undisturbed(train, models, tmp_path_factory) -> Run:
    return train(models(torch.float32), tmp_path_factory.mktemp("undisturbed"), *EVERY_STEP).succeeded()


def logged_steps(run: Run) -> list[int]:
    """A line that the kill cut short is of a step that was not done."""
    file = run.folder / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line)["step"] for line in lines]


def last_step(run: Run) -> dict[str, bytes]:
    """Every file that an engine wrote: adapter, masters and moments, generators, state."""
    actor = StepFolders(run.folder / "checkpoints").folder(STEPS) / "actor"
    return {str(path.relative_to(actor)): path.read_bytes() for path in actor.rglob("*") if path.is_file()}


def test_a_run_that_is_killed_at_fifty_moments_ends_as_one_that_is_not(undisturbed, train, models, tmp_path):
    """Driver, its runner, the trainer's worker or the server; at most one step is repeated each time.

    docs/field-cases.md: nothing to resume from.
    """
    chance, victims, kills, chains = random.Random(0), itertools.cycle(VICTIMS), [], 0
    expected = last_step(undisturbed)
    while len(kills) < KILLS:
        chains += 1
        kills += killed_until_it_ends(train, models(torch.float32), tmp_path / str(chains), victims, chance, expected)
    assert set(kills) == set(VICTIMS)


def killed_until_it_ends(
    train, model: Path, folder: Path, victims: Iterator[str], chance: random.Random, expected: dict[str, bytes]
) -> list[str]:
    kills, saved = [], 0
    while True:
        killer = Killer(folder / "checkpoints", next(victims), chance)
        killer.start()
        run = train(model, folder, *EVERY_STEP)
        killer.ended.set()
        killer.join()
        logged = logged_steps(run)
        assert logged == list(range(saved + 1, saved + 1 + len(logged))), "begins after the last step saved"
        before, saved = saved, StepFolders(run.folder / "checkpoints").committed() or 0
        assert saved >= max([before, *logged]), f"{killer.victim}: a step that was done is lost"
        (folder / "metrics.jsonl").unlink(missing_ok=True)
        if run.status == 0:
            assert last_step(run) == expected
            return kills
        assert killer.killed, run.log[-3000:]
        kills.append(killer.victim)
        print(f"{time.strftime('%X')} {killer.victim} killed at step {saved}", flush=True)


def test_an_asynchronous_run_goes_on_with_the_prompts_that_were_under_way(train, models, tmp_path):
    """They are saved with the step, and read again."""
    saving = (*ASYNC[:-1], "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=1", "trainer.resume_mode=auto")
    for total, steps in ((2, [1, 2]), (4, [3, 4])):
        run = train(models(torch.bfloat16), tmp_path, *saving, f"trainer.total_training_steps={total}").succeeded()
        assert logged_steps(run) == steps
        folders = StepFolders(tmp_path / "checkpoints")
        assert folders.whole() == [total]
        assert (folders.folder(total) / "transfer_queue").is_dir()
    assert "Loading TransferQueue state from" in run.log
