"""A run whose servers are gone ends with their names: Ray and verl's buffer would name an actor, or wait."""

import time
from collections.abc import Callable, Iterable

from orbit_kernels.contract.client import CallError, SlotClient

INTERVAL_S = 5.0


class ServerWatch:
    """A `ServerWatch` asks a run's servers whether they are there.

    Args:
        addresses: what names them as ``host:port``.
        timeout_s: limit of an answer, in seconds.
        step: what says which step it is, for messages.
    """

    def __init__(self, addresses: Callable[[], Iterable[str]], timeout_s: float, step: Callable[[], int]):
        self._addresses = addresses
        self._timeout_s = timeout_s
        self._step = step
        self._next_check = 0.0

    def check(self) -> None:
        """Asks all of them now.

        Raises:
            RuntimeError: one does not answer; names it.
        """
        for address in self._addresses():
            try:
                SlotClient(f"http://{address}", timeout_s=self._timeout_s).status()
            except CallError as error:
                if error.status is not None:
                    continue  # whatever it says, it runs
                raise RuntimeError(
                    f"step {self._step()}: the SGLang server at {address} does not answer ({error.message}); see its log "
                    "above, then resume with trainer.resume_mode=auto"
                ) from error

    def check_now_and_then(self) -> None:
        """Asks all of them unless it did so a moment ago, as for ``check``."""
        if time.monotonic() >= self._next_check:
            self.check()
            self._next_check = time.monotonic() + INTERVAL_S
