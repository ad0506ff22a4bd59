"""The trainer's side of a server's slot routes: stage and activate, with retries inside one deadline."""

import asyncio
import dataclasses
import time
from typing import Any

import httpx

RETRY_PAUSE_S = 0.25
MAX_RETRY_PAUSE_S = 2.0
ALREADY_SEEN = "version_not_new"
WAITS_FOR_THE_SLOT = ("slot_in_use", "staging_in_progress")


class SlotError(RuntimeError):
    """A server refused a version or did not answer in time; holds the server's own text."""


@dataclasses.dataclass(eq=False)
class Unsuccessful(Exception):
    """One answer of a server that is not a success."""

    status: int
    code: str
    message: str

    @property
    def may_pass(self) -> bool:
        """Whether the same request can succeed later: the slot drains, a stage ends, a restart is over."""
        return self.code in WAITS_FOR_THE_SLOT or self.status >= 500

    def __str__(self) -> str:
        return f"HTTP {self.status} {self.code}: {self.message}"


class SlotClient:
    """Slots of one server.

    Args:
        address: ``host:port`` of the SGLang server.
        timeout_s: limit of one call including its retries, in seconds.
        attempts: tries after a connection failure or a server error; a slot that is still in use is asked again
            until the deadline.
    """

    def __init__(self, address: str, timeout_s: float, attempts: int):
        self.address = address
        self._timeout_s = timeout_s
        self._attempts = attempts

    async def stage(self, version: int, payload: bytes, digest: str) -> dict[str, Any]:
        """Put a version into the inactive slot and check that what arrived is what was sent; done if a slot holds it already.

        Raises:
            SlotError: refused, unreachable until the deadline, or the digests differ.
        """
        answer = await self._call("/orbit/stage", version, params={"version": version}, content=payload)
        if answer.get("digest") != digest:
            raise SlotError(
                f"the SGLang server at {self.address}: version {version} arrived with digest {answer.get('digest')}, sent with {digest}"
            )
        return answer

    async def activate(self, version: int, inflight: str) -> dict[str, Any]:
        """Make a staged version the active one at the next batch boundary.

        Raises:
            SlotError: refused, or unreachable until the deadline.
        """
        return await self._call("/orbit/activate", version, json={"version": version, "inflight": inflight})

    async def _call(self, path: str, version: int, **request) -> dict[str, Any]:
        deadline, pause_s = time.monotonic() + self._timeout_s, RETRY_PAUSE_S
        failures, final, may_be_done = 0, False, False
        async with httpx.AsyncClient(base_url=f"http://{self.address}", trust_env=False) as http:
            while True:
                try:
                    return await self._once(http, deadline, path, **request)
                except Unsuccessful as refusal:
                    problem = refusal
                    failures += refusal.status >= 500
                    final = not refusal.may_pass
                    may_be_done = failures > 0 or refusal.code == ALREADY_SEEN
                except httpx.TransportError as error:
                    problem = f"no answer: {type(error).__name__} {error}".strip()
                    failures += 1
                    may_be_done = True
                if may_be_done and (answer := await self._already_done(http, path, version)):
                    return answer
                if final or failures >= self._attempts or time.monotonic() + pause_s >= deadline:
                    break
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_RETRY_PAUSE_S)
        raise SlotError(f"the SGLang server at {self.address} did not do {path}: {problem}")

    async def _once(self, http: httpx.AsyncClient, deadline: float, path: str, **request) -> dict[str, Any]:
        response = await _send(http, "POST", path, max(0.05, deadline - time.monotonic()), **request)
        if response.is_success:
            return response.json()
        raise _refusal(response)

    async def _already_done(self, http: httpx.AsyncClient, path: str, version: int) -> dict[str, Any] | None:
        """What the answer would have been, when a request took effect earlier, or its answer was lost."""
        try:
            response = await _send(http, "GET", "/orbit/status", RETRY_PAUSE_S * 4)
            status = response.json() if response.is_success else {}
        except httpx.TransportError:
            return None
        if path.endswith("stage"):
            held = (slot for slot in status.get("slots", ()) if slot["state"] in ("staged", "active"))
            return next((slot for slot in held if slot["version"] == version), None)
        if status.get("active_version") != version:
            return None
        return {**status, "pause_ms": status["last_activate_pause_ms"]}


async def _send(http: httpx.AsyncClient, method: str, path: str, limit_s: float, **request) -> httpx.Response:
    # httpx limits each read, not the whole exchange: a server that trickles bytes must not outlive the deadline.
    try:
        return await asyncio.wait_for(http.request(method, path, timeout=limit_s, **request), limit_s)
    except TimeoutError:
        raise httpx.ReadTimeout(f"nothing within {limit_s:.1f} s") from None
    except AttributeError as error:
        # anyio 4.16 asks a connection for its peer that is gone before it was handed out (abc/_sockets.py:155).
        if error.name != "getpeername":
            raise
        raise httpx.ConnectError("the connection was closed as it was made") from error


def _refusal(response: httpx.Response) -> Unsuccessful:
    try:
        error = response.json()["error"]
        detail = f" {error['detail']}" if error.get("detail") else ""
        return Unsuccessful(response.status_code, str(error.get("code")), f"{error.get('message')}{detail}")
    except (ValueError, KeyError, TypeError):
        return Unsuccessful(response.status_code, "unknown", response.text[:500])
