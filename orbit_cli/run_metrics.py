"""This module reads a run's ``metrics.jsonl`` whole, or follows it while the run writes it."""

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

REWARD = "critic/rewards/mean"
SERVED_VERSION = "orbit/version/served"
REQUESTS_IN_FLIGHT = "orbit/sync/requests_in_flight"
SYNC_BYTES = "orbit/sync/bytes"
ACTIVATE_PAUSE_MS = "orbit/sync/activate_pause_ms"
STEP_S = "timing_s/step"

# Both compare a token's log-probs at the version that sampled it. A step whose tokens are all older than the version
# being trained has only the audit, which recomputes some of them at theirs.
_LOGPROB_DIFF_KEYS = ("orbit/parity/logprob_abs_diff_{}", "orbit/parity/audit_logprob_abs_diff_{}")

# verl names the first metric of the reward function's answer; "acc" comes before "reward" where both are there.
_VALIDATION_KEYS = (re.compile(r"val-core/.+/acc/mean@\d+"), re.compile(r"val-core/.+/reward/mean@\d+"))


@dataclasses.dataclass(frozen=True)
class Step:
    """A ``Step`` has the metrics of one step, by verl's names."""

    step: int
    values: Mapping[str, float]

    def get(self, name: str) -> float | None:
        """Returns the metric, ``None`` when the step has none of that name."""
        return self.values.get(name)

    @property
    def validation_accuracy(self) -> float | None:
        """Returns the validation accuracy as a share, ``None`` when the step was not validated."""
        for pattern in _VALIDATION_KEYS:
            found = next((value for name, value in self.values.items() if pattern.fullmatch(name)), None)
            if found is not None:
                return found
        return None

    @property
    def logprob_diff_mean(self) -> float | None:
        """Returns the mean over tokens of |server's log-prob - trainer's| at the same version, in nats.

        It is ``None`` without such tokens.
        """
        return self._logprob_diff("mean")

    @property
    def logprob_diff_max(self) -> float | None:
        """Returns the largest of these differences, in nats."""
        return self._logprob_diff("max")

    def _logprob_diff(self, statistic: str) -> float | None:
        found = (self.values.get(key.format(statistic)) for key in _LOGPROB_DIFF_KEYS)
        return next((value for value in found if value is not None), None)


class MetricsFile:
    """A ``MetricsFile`` reads what has been written since the last call.

    A line that is still being written waits for the next one.
    """

    def __init__(self, path: Path):
        self._path = path
        self._offset_bytes = 0

    def read_new(self) -> list[Step]:
        """Returns the steps of the lines that are new and complete; none while the file does not exist.

        Raises:
            ValueError: a complete line is not an object as verl's ``file`` logger writes it.
        """
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset_bytes)
            complete = file.read().rpartition(b"\n")
        self._offset_bytes += len(complete[0]) + len(complete[1])
        return [_parse(self._path, line) for line in complete[0].splitlines() if line.strip()]


def read_run(path: Path) -> list[Step]:
    """Returns all steps of a ``metrics.jsonl`` in order, the lines of one step merged.

    Raises:
        ValueError: the file is missing or empty, or a line is not as verl's ``file`` logger writes it.
    """
    steps = merge(MetricsFile(path).read_new())
    if not steps:
        raise ValueError(f"{path}: no steps in it; give the metrics.jsonl of a run that finished at least one step")
    return steps


def merge(steps: Iterable[Step]) -> list[Step]:
    """Returns one entry per step number in rising order; later values of a name win."""
    values: dict[int, dict[str, float]] = {}
    for step in steps:
        values.setdefault(step.step, {}).update(step.values)
    return [Step(step, values[step]) for step in sorted(values)]


def series(steps: Iterable[Step], value_of: Callable[[Step], float | None]) -> list[tuple[int, float]]:
    """Returns step numbers and values, where a step has one."""
    values = ((step.step, value_of(step)) for step in steps)
    return [(step, value) for step, value in values if value is not None]


def metric(name: str) -> Callable[[Step], float | None]:
    """Returns a function for ``series``, which gives the metric of that name."""
    return lambda step: step.get(name)


def _parse(path: Path, line: bytes) -> Step:
    try:
        record = json.loads(line)
        values = record["data"]
        return Step(int(record["step"]), {name: value for name, value in values.items() if _is_number(value)})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f'{path}: {line[:80]!r} is not {{"step": N, "data": {{...}}}} as verl\'s file logger writes it ({error!r})'
        ) from None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
