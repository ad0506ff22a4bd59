"""The trainer brings a version to one server here: it stages and activates it, and tries again inside one deadline."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from orbit_kernels.contract import routes
from orbit_kernels.contract.answers import Activated, StagedAdapter, Status
from orbit_kernels.contract.client import AsyncSlotClient, CallError
from orbit_kernels.contract.errors import ErrorCode
from orbit_kernels.contract.keys import InflightMode
from orbit_kernels.contract.routes import Route

RETRY_PAUSE_S = 0.25
MAX_RETRY_PAUSE_S = 2.0
STATUS_TIMEOUT_S = 1.0
MIN_TIMEOUT_S = 0.05
WAITS_FOR_THE_SLOT = (ErrorCode.SLOT_IN_USE, ErrorCode.STAGING_IN_PROGRESS)


class SlotError(RuntimeError):
    """A `SlotError` says that a server refused a version or did not answer in time; it holds the server's own text."""


class Publisher:
    """A `Publisher` brings versions to the slots of one server.

    Args:
        address: ``host:port`` of the SGLang server.
        timeout_s: limit of one call including its retries, in seconds.
        attempts: tries after a connection failure or a server error; a slot that is still in use is asked again
            until the deadline.
    """

    def __init__(self, address: str, timeout_s: float, attempts: int):
        self.address = address
        self._client = AsyncSlotClient(f"http://{address}")
        self._timeout_s = timeout_s
        self._attempts = attempts

    async def stage(self, version: int, payload: bytes, digest: str) -> StagedAdapter:
        """Puts a version into the inactive slot, unless a slot holds it already, and checks that it arrived as sent.

        Raises:
            SlotError: refused, unreachable until the deadline, or the digests differ.
        """
        answer = await self._until_done(
            routes.STAGE,
            lambda limit_s: self._client.stage(version, payload, timeout_s=limit_s),
            lambda status: status.holder_of(version),
        )
        if answer.digest != digest:
            raise SlotError(
                f"the SGLang server at {self.address}: version {version} arrived with digest {answer.digest}, sent with {digest}"
            )
        return answer

    async def activate(self, version: int, inflight: InflightMode) -> Activated:
        """Makes a staged version the active one at the next batch boundary.

        Raises:
            SlotError: refused, or unreachable until the deadline.
        """
        return await self._until_done(
            routes.ACTIVATE,
            lambda limit_s: self._client.activate(version, inflight, timeout_s=limit_s),
            lambda status: _activated(status, version),
        )

    async def _until_done[T](
        self, route: Route, call: Callable[[float], Awaitable[T]], done: Callable[[Status], T | None]
    ) -> T:
        """Calls until it succeeds, cannot succeed, or the deadline is near.

        Args:
            route: what is called, for the error.
            call: one call with its limit in seconds.
            done: what the answer would have been, from a status of the server that has already done it.
        """
        deadline, pause_s, failures = time.monotonic() + self._timeout_s, RETRY_PAUSE_S, 0
        while True:
            try:
                return await call(max(MIN_TIMEOUT_S, deadline - time.monotonic()))
            except CallError as error:
                problem = error
            failures += _is_failure(problem)
            # A request can have taken effect earlier, or its answer was lost.
            may_be_done = failures > 0 or problem.code is ErrorCode.VERSION_NOT_NEW
            if may_be_done and (answer := await self._already_done(done)) is not None:
                return answer
            may_pass = _is_failure(problem) or problem.code in WAITS_FOR_THE_SLOT
            if not may_pass or failures >= self._attempts or time.monotonic() + pause_s >= deadline:
                raise SlotError(f"the SGLang server at {self.address} did not do {route.path}: {problem}")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_RETRY_PAUSE_S)

    async def _already_done[T](self, done: Callable[[Status], T | None]) -> T | None:
        try:
            return done(await self._client.status(timeout_s=STATUS_TIMEOUT_S))
        except CallError:
            return None


def _is_failure(error: CallError) -> bool:
    """Says whether the server or the way to it broke down, which another try may find repaired.

    A base that is no longer what the trainer compared at the start stays so.
    """
    return error.status is None or (error.status >= 500 and error.code is not ErrorCode.BASE_CHANGED)


def _activated(status: Status, version: int) -> Activated | None:
    """Returns what the activation of a version answered, as far as a later status tells."""
    if status.active_version != version:
        return None
    return Activated(
        active_version=version,
        pause_ms=status.last_activate_pause_ms,
        busy_s=status.busy_s,
        requests=status.requests,
    )
