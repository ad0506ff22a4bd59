"""This script is the main job end to end on a CPU: ``make demo`` runs it.

    python -m recipes.demo [HYDRA_OVERRIDE ...]

It runs ``tiny_arithmetic.sh`` with its whole log in ``runs/demo/train.log``, shows a line a step, and leaves a table, a
picture and the adapter in ``runs/demo``. It removes an earlier demo's results first.
"""

import fcntl
import operator
import os
import re
import shutil
import sys
import time
from collections import deque
from pathlib import Path
from typing import IO

from rich.console import Console

from orbit_cli import run_metrics
from orbit_cli.processes import run_to_end
from orbit_cli.run_metrics import MetricsFile, Step, metric, read_run
from orbit_cli.run_summary import save_picture, summary_table

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "tiny_arithmetic.sh"
OUTPUT_DIR = ROOT / "runs" / "demo"

_ERROR_LINE = re.compile(r"\b\w*(Error|Exception)\b|\berror:", re.IGNORECASE)
_NUM_ERROR_LINES = 8
_ANSI_OR_RAY_PREFIX = re.compile(r"\x1b\[[0-9;]*m|\([\w.]+ pid=\d+(, ip=[\d.]+)?\)\s*")


class Progress:
    """``Progress`` prints a line for every step as the run logs it, and a sign of life until the first one."""

    _COLUMNS = (
        ("reward", metric(run_metrics.REWARD), "{:.3f}"),
        ("version", metric(run_metrics.SERVED_VERSION), "{:.0f}"),
        ("log-prob diff", operator.attrgetter("logprob_diff_mean"), "{:.1e}"),
        ("max", operator.attrgetter("logprob_diff_max"), "{:.1e}"),
        ("in flight", metric(run_metrics.REQUESTS_IN_FLIGHT), "{:.0f}"),
        ("seconds", metric(run_metrics.STEP_S), "{:.1f}"),
    )
    _QUIET_S = 20.0

    def __init__(self, metrics: Path, console: Console):
        self._file = MetricsFile(metrics)
        self._console = console
        self._start = self._last_output = time.monotonic()

    def poll(self) -> None:
        """Prints what is new."""
        for step in self._file.read_new():
            self._say(self.line(step))
        if time.monotonic() - self._last_output > self._QUIET_S:
            self._say(f"[dim]... {time.monotonic() - self._start:.0f} s[/dim]")

    @classmethod
    def line(cls, step: Step) -> str:
        """Returns one step in one line; what it did not record is left out."""
        parts = [f"step {step.step:3d}"]
        for label, value_of, form in cls._COLUMNS:
            if (value := value_of(step)) is not None:
                parts.append(f"{label} {form.format(value)}")
        if step.validation_accuracy is not None:
            parts.append(f"[bold]held-out accuracy {step.validation_accuracy:.1%}[/bold]")
        return "  ".join(parts)

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False)
        self._last_output = time.monotonic()


def main(overrides: list[str]) -> int:
    """Runs the demo; returns the recipe's exit status."""
    console = Console(soft_wrap=True)
    lock = _lock()
    if lock is None:
        console.print(
            f"[red]error:[/red] another demo is running in {_shown(OUTPUT_DIR)}; wait for it, or interrupt it"
        )
        return 1
    with lock:
        return _run(overrides, console)


def _lock() -> IO[str] | None:
    """Takes the right to use the folder, which ends with this process however it ends.

    It returns None when another process has it.
    """
    OUTPUT_DIR.parent.mkdir(exist_ok=True)
    lock = OUTPUT_DIR.with_suffix(".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


def _run(overrides: list[str], console: Console) -> int:
    shutil.rmtree(OUTPUT_DIR, ignore_errors=True)
    OUTPUT_DIR.mkdir(parents=True)
    log, metrics = OUTPUT_DIR / "train.log", OUTPUT_DIR / "metrics.jsonl"
    console.print(f"RL of a frozen base through two live adapter slots; the whole log is in {_shown(log)}")
    console.print(
        "Making the base model (1-2 minutes, the first time), then starting Ray, trainer and server (1-2 minutes)"
    )
    progress = Progress(metrics, console)
    environment = {**os.environ, "OUTPUT_DIR": str(OUTPUT_DIR)}
    try:
        status = run_to_end(
            ["bash", str(RECIPE), *overrides], log=log, on_poll=progress.poll, environment=environment, cwd=ROOT
        )
    except KeyboardInterrupt:
        console.print(f"interrupted; every process of the run has been stopped, its log is {_shown(log)}")
        return 130
    if status:
        console.print(f"[red]the run failed with exit status {status}[/red]; the last errors of {_shown(log)}:")
        console.print("\n".join(error_lines(log)), markup=False, highlight=False)
        return status
    _finish(console, metrics)
    return 0


def error_lines(log: Path) -> list[str]:
    """Returns the last lines of a log that name an error; its very last lines when none does."""
    lines = [_ANSI_OR_RAY_PREFIX.sub("", line).strip() for line in log.read_text(errors="replace").splitlines()]
    errors = deque(dict.fromkeys(line for line in lines if _ERROR_LINE.search(line)), maxlen=_NUM_ERROR_LINES)
    return list(errors) or [line for line in lines if line][-_NUM_ERROR_LINES:]


def _finish(console: Console, metrics: Path) -> None:
    steps = read_run(metrics)
    picture = OUTPUT_DIR / "run.png"
    save_picture(steps, picture)
    console.print()
    console.print(summary_table(steps))
    console.print(f"\npicture  {_shown(picture)}")
    adapter = OUTPUT_DIR / "adapter"
    shutil.copytree(OUTPUT_DIR / "checkpoints" / "adapter", adapter)
    console.print(f"adapter  {_shown(adapter)} (peft format)")
    console.print(
        "base     unchanged, bit for bit: the run fails when its digest at the end is not the one at the start"
    )


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
