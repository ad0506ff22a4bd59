"""This module places one adapter version in a slot, on a thread beside the scheduler's loop."""

import dataclasses
import logging
import pathlib
import threading
import time
from collections.abc import Sequence

import torch

from orbit_kernels.contract.answers import StagedAdapter
from orbit_kernels.contract.errors import ErrorCode
from orbit_kernels.contract.payload import AdapterError
from orbit_sglang.control.messages import StageRequest
from orbit_sglang.model.resident import ResidentBase
from orbit_sglang.model.slots import SlotBank

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class StageFailure:
    """A ``StageFailure`` says why a staging failed, with the problems of the payload or the tensors of the base."""

    code: ErrorCode
    message: str
    problems: list[str] | None = None


def base_changed(tensors: Sequence[str]) -> str:
    """Says that the resident base is not what was loaded, and what to do."""
    return f"{len(tensors)} tensors of the frozen base are no longer what was loaded; start the server again"


@dataclasses.dataclass
class StageOutcome:
    """A ``StageOutcome`` says how a staging ended on one rank, or on all: it has ``staged`` or ``failure``.

    ``overwritten`` is true when the slot's earlier content is gone; ``seconds`` is the time that it took.
    """

    staged: StagedAdapter | None = None
    failure: StageFailure | None = None
    overwritten: bool = False
    seconds: float = 0.0

    @classmethod
    def of_ranks(cls, outcomes: Sequence["StageOutcome"]) -> "StageOutcome":
        """Returns the outcome for all ranks of a server: it is staged on every one, or failed."""
        failed = next(((rank, outcome) for rank, outcome in enumerate(outcomes) if outcome.failure), None)
        staged, failure = outcomes[0].staged, None
        if failed is not None:
            rank, outcome = failed
            on_rank = f"rank {rank}: " if len(outcomes) > 1 else ""
            staged, failure = None, dataclasses.replace(outcome.failure, message=on_rank + outcome.failure.message)
        return cls(
            staged=staged,
            failure=failure,
            overwritten=any(outcome.overwritten for outcome in outcomes),
            seconds=max(outcome.seconds for outcome in outcomes),
        )


class StageJob:
    """A ``StageJob`` reads, checks and writes a payload.

    The slot is written only after every check has passed, that of the base in memory included. The thread keeps the priority of the others: one that is
    lower loses its core while it holds Python's lock, and the scheduler's loop then waits for both.

    The scheduler polls ``done`` and then reads ``outcome``; until then only the job touches the slot.
    """

    def __init__(self, request: StageRequest, bank: SlotBank, base: ResidentBase, slot: int):
        self.request = request
        self.outcome = StageOutcome()
        self._base = base
        self._bank = bank
        self._slot = slot
        self._thread = threading.Thread(target=self._run, name="orbit-stage", daemon=True)

    def start(self) -> None:
        """Begins the job, and returns at once."""
        self._thread.start()

    @property
    def done(self) -> bool:
        """Returns whether the job has ended, well or not."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        start = time.perf_counter()
        try:
            if self._bank.device.type == "cuda":
                torch.cuda.set_device(self._bank.device)  # a thread begins on the first, whichever its process uses
            prepared = self._bank.prepare(pathlib.Path(self.request.path).read_bytes())
            if changed := self._base.changed():
                self.outcome.failure = StageFailure(ErrorCode.BASE_CHANGED, base_changed(changed), changed)
                return
            self.outcome.overwritten = True
            prepared.write(self._slot)
            self.outcome.staged = StagedAdapter(
                version=self.request.version,
                adapter_type=prepared.adapter.config.type,
                digest=prepared.adapter.digest(),
                num_bytes=prepared.adapter.num_bytes,
                modules=prepared.module_counts(),
            )
        except AdapterError as error:
            self.outcome.failure = StageFailure(ErrorCode.ADAPTER_REFUSED, "the adapter was refused", error.problems)
        except Exception as error:  # whatever it is, the scheduler must answer and serve on
            logger.exception("Staging version %d failed", self.request.version)
            self.outcome.failure = StageFailure(
                ErrorCode.STAGE_FAILED, f"staging failed: {type(error).__name__}: {error}"
            )
        finally:
            self.outcome.seconds = time.perf_counter() - start
