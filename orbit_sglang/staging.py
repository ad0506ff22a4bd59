"""Placing one adapter version in a slot, on a thread beside the scheduler's loop."""

import dataclasses
import logging
import pathlib
import threading
import time

from orbit_kernels.wire import AdapterError
from orbit_sglang.messages import StageRequest
from orbit_sglang.slots import SlotBank
from orbit_sglang.versions import StagedAdapter

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class StageFailure:
    """Why a staging failed; ``problems`` when the payload itself was refused."""

    message: str
    problems: list[str] | None = None


class StageJob:
    """Reads, checks and writes a payload. The slot is written only after every check has passed.

    The scheduler polls ``done`` and then reads ``staged`` or ``failure``; until then only the job touches the slot.
    """

    def __init__(self, request: StageRequest, bank: SlotBank, slot: int):
        self.request = request
        self.staged: StagedAdapter | None = None
        self.failure: StageFailure | None = None
        self.overwritten = False
        self.seconds = 0.0
        self._bank = bank
        self._slot = slot
        self._thread = threading.Thread(target=self._run, name="orbit-stage", daemon=True)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the job has ended, well or not."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        start = time.perf_counter()
        try:
            prepared = self._bank.prepare(pathlib.Path(self.request.path).read_bytes())
            self.overwritten = True
            prepared.write(self._slot)
            self.staged = StagedAdapter(
                version=self.request.version,
                adapter_type=prepared.adapter.config.type,
                digest=prepared.adapter.digest(),
                num_bytes=prepared.adapter.num_bytes,
                modules=prepared.module_counts(),
            )
        except AdapterError as error:
            self.failure = StageFailure("the adapter was refused", error.problems)
        except Exception as error:  # whatever it is, the scheduler must answer and serve on
            logger.exception("Staging version %d failed", self.request.version)
            self.failure = StageFailure(f"staging failed: {type(error).__name__}: {error}")
        self.seconds = time.perf_counter() - start
