"""This module says what a finished run came to, in a short table and a picture."""

import operator
import statistics
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from orbit_cli import run_metrics
from orbit_cli.run_metrics import Step, metric, series

# Rewards of single steps are noisy: the table compares means over this many at either end.
_REWARD_WINDOW_STEPS = 5
# Nats; below it the picture's axis is linear. About the rounding of an fp32 log-prob.
_SMALLEST_DIFF = 1e-7

_ACCURACY = operator.attrgetter("validation_accuracy")
_DIFF_MEAN = operator.attrgetter("logprob_diff_mean")
_DIFF_MAX = operator.attrgetter("logprob_diff_max")


def summary_table(steps: list[Step]) -> Table:
    """Returns a table of what a run recorded of accuracy, reward, versions, log-prob difference and synchronisation."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for label, value in _accuracy_rows(steps) + _reward_rows(steps) + _version_rows(steps) + _parity_rows(steps):
        table.add_row(label, value)
    return table


def save_picture(steps: list[Step], path: Path) -> None:
    """Writes reward, validation accuracy, log-prob difference and served version over steps as a PNG."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    reward, accuracy, parity, version = figure.subplots(2, 2, sharex=True).flat
    for axes in (reward, accuracy):
        axes.set_ylim(0, 1)
    _plot(reward, series(steps, metric(run_metrics.REWARD)), "training reward, mean of a step")
    _plot(accuracy, series(steps, _ACCURACY), "validation accuracy", marker="o")
    for value_of, label in ((_DIFF_MEAN, "mean"), (_DIFF_MAX, "max")):
        _plot(parity, series(steps, value_of), "log-prob difference, trainer and server, nats", label=label, marker=".")
    # A difference may be exactly 0, which a plain logarithmic axis would leave out.
    parity.set_yscale("symlog", linthresh=_SMALLEST_DIFF)
    parity.set_ylim(bottom=0)
    if parity.lines:
        parity.legend()
    _plot(version, series(steps, metric(run_metrics.SERVED_VERSION)), "served adapter version", drawstyle="steps-post")
    for axes in (parity, version):
        axes.set_xlabel("step")
    figure.savefig(path, dpi=120)


def _accuracy_rows(steps: list[Step]) -> list[tuple[str, str]]:
    points = series(steps, _ACCURACY)
    if not points:
        return []
    (first_step, first), (last_step, last) = points[0], points[-1]
    gain = 100 * (last - first)
    return [
        (
            "held-out accuracy",
            f"{first:.1%} at step {first_step} -> {last:.1%} at step {last_step} ({gain:+.1f} points)",
        )
    ]


def _reward_rows(steps: list[Step]) -> list[tuple[str, str]]:
    rewards = [value for _, value in series(steps, metric(run_metrics.REWARD))]
    if not rewards:
        return []
    window = min(_REWARD_WINDOW_STEPS, len(rewards))
    first, last = statistics.mean(rewards[:window]), statistics.mean(rewards[-window:])
    return [("training reward", f"{first:.3f} -> {last:.3f} (means over {window} steps)")]


def _version_rows(steps: list[Step]) -> list[tuple[str, str]]:
    served = [value for _, value in series(steps, metric(run_metrics.SERVED_VERSION))]
    if not served:
        return []
    rows = [("versions served", f"{len(set(served))}, the last is {served[-1]:.0f}")]
    in_flight = [value for _, value in series(steps, metric(run_metrics.REQUESTS_IN_FLIGHT))]
    if in_flight:
        busy = sum(value > 0 for value in in_flight)
        rows.append(("activations with requests in flight", f"{busy} of {len(in_flight)}"))
    pauses = [value for _, value in series(steps, metric(run_metrics.ACTIVATE_PAUSE_MS))]
    if pauses:
        rows.append(("activation pause", f"median {statistics.median(pauses):.2f} ms, max {max(pauses):.2f} ms"))
    sent = [value for _, value in series(steps, metric(run_metrics.SYNC_BYTES))]
    if sent:
        rows.append(("sent a step", f"{statistics.median(sent) / 1e3:.1f} kB"))
    return rows


def _parity_rows(steps: list[Step]) -> list[tuple[str, str]]:
    means = [value for _, value in series(steps, _DIFF_MEAN)]
    largest = [value for _, value in series(steps, _DIFF_MAX)]
    if not means or not largest:
        return []
    return [("log-prob difference", f"mean {statistics.mean(means):.1e}, max {max(largest):.1e} nats")]


def _plot(axes: Axes, points: list[tuple[int, float]], title: str, **style: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    if points:
        axes.plot(*zip(*points, strict=True), **style)
