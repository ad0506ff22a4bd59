"""This module has the clients of a server's slots; it can be imported without torch.

``SlotClient`` is for everyone, ``AsyncSlotClient`` for code whose calls run side by side. Neither tries twice.
"""

import asyncio
import functools
import os
import ssl
from typing import Any

import httpx
from pydantic import BaseModel

from orbit_kernels.contract import routes
from orbit_kernels.contract.answers import Activated, Base, Discarded, Refused, Staged, Status
from orbit_kernels.contract.errors import ErrorCode
from orbit_kernels.contract.keys import DEFAULT_INFLIGHT, InflightMode
from orbit_kernels.contract.routes import Route

TIMEOUT_S = 60.0
"""A call waits for the batch that is running; a staging waits also for its slot to be written."""

UNAUTHORIZED = 401
"""This is the status of SGLang's own answer to a missing or wrong key."""

_MAX_TEXT = 500


class CallError(Exception):
    """A call of a route was not answered with success.

    Attributes:
        status: HTTP status; None when there was no answer.
        code: why the server refused; None when the answer does not say it as Orbit's routes do.
        message: what the server said, or what happened to the connection.
        detail: what belongs to the message, for programs.
    """

    def __init__(self, message: str, *, status: int | None = None, code: ErrorCode | None = None, detail: Any = None):
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.detail = detail

    def __str__(self) -> str:
        if self.status is None:
            return f"no answer: {self.message}"
        answer = f"HTTP {self.status} {self.code}" if self.code else f"HTTP {self.status}"
        return f"{answer}: {self.message} {self.detail}" if self.detail else f"{answer}: {self.message}"


class AsyncSlotClient:
    """An ``AsyncSlotClient`` calls one server's routes, with one connection for each call.

    Args:
        url: of the server, e.g. ``http://127.0.0.1:30000``.
        key: of its ``--api-key`` or ``--admin-api-key``, if it has one.
        timeout_s: limit of one call in seconds, from the connection to the last byte; ``timeout_s`` of a call overrides
            it.

    Raises:
        ValueError: no HTTP header can carry the key.
        CallError: from every call: refused, or no answer in time.
    """

    def __init__(self, url: str, key: str | None = None, timeout_s: float = TIMEOUT_S):
        # httpx would put a header that it cannot send, and with it the key, into the text of its error.
        if key is not None and not (key.isascii() and key.isprintable() and key and key == key.strip()):
            raise ValueError(
                "the key is empty, begins or ends with a space, or has characters that no HTTP header carries"
            )
        self.url = url
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._timeout_s = timeout_s

    async def status(self, *, timeout_s: float | None = None) -> Status:
        """Returns what the slots hold."""
        return await self._call(routes.STATUS, timeout_s)

    async def base(self, *, timeout_s: float | None = None) -> Base:
        """Returns what the frozen base is."""
        return await self._call(routes.BASE, timeout_s)

    async def stage(self, version: int, payload: bytes, *, timeout_s: float | None = None) -> Staged:
        """Puts a payload into an inactive slot."""
        return await self._call(routes.STAGE, timeout_s, params={"version": version}, content=payload)

    async def activate(
        self, version: int, inflight: InflightMode = DEFAULT_INFLIGHT, *, timeout_s: float | None = None
    ) -> Activated:
        """Makes a staged version the one that new requests get."""
        return await self._call(routes.ACTIVATE, timeout_s, json={"version": version, "inflight": inflight})

    async def rollback(
        self,
        version: int | None = None,
        inflight: InflightMode = DEFAULT_INFLIGHT,
        *,
        timeout_s: float | None = None,
    ) -> Activated:
        """Goes back to an older version, by default the one before."""
        chosen = {} if version is None else {"version": version}
        return await self._call(routes.ROLLBACK, timeout_s, json={**chosen, "inflight": inflight})

    async def discard(self, *, timeout_s: float | None = None) -> Discarded:
        """Empties the inactive slots."""
        return await self._call(routes.DISCARD, timeout_s)

    async def adapter(self, version: int, *, timeout_s: float | None = None) -> bytes:
        """Returns a version's payload, as it was staged."""
        return (await self._send(routes.ADAPTER, timeout_s, params={"version": version})).content

    async def _call[Answer: BaseModel](self, route: Route[Answer], timeout_s: float | None, **request: Any) -> Answer:
        assert route.answer is not None
        response = await self._send(route, timeout_s, **request)
        try:
            return route.answer.model_validate_json(response.content)
        except ValueError:
            text = f"not what {route.path} answers: {response.text[:_MAX_TEXT]}"
            raise CallError(text, status=response.status_code) from None

    async def _send(self, route: Route, timeout_s: float | None, **request: Any) -> httpx.Response:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            async with httpx.AsyncClient(
                base_url=self.url, headers=self._headers, timeout=limit_s, verify=_tls(), trust_env=False
            ) as http:
                # httpx limits each read, not the whole exchange: a server that trickles bytes must not outlive the limit.
                response = await asyncio.wait_for(http.request(route.method, route.path, **request), limit_s)
        except (TimeoutError, httpx.TimeoutException):
            raise CallError(f"nothing within {limit_s:.1f} s") from None
        except (httpx.TransportError, httpx.InvalidURL, ValueError) as error:
            raise CallError(_what_happened(error)) from None
        except AttributeError as error:
            # anyio 4.16 asks a connection for its peer that is gone before it was handed out (``anyio/abc/_sockets.py::_SocketProvider.extra_attributes``).
            if error.name != "getpeername":
                raise
            raise CallError("the connection was closed as it was made") from error
        if response.is_success:
            return response
        raise _refused(response)


class SlotClient:
    """A ``SlotClient`` is an ``AsyncSlotClient`` for code without an event loop.

    Every call runs a loop of its own, so threads may share a client.
    """

    def __init__(self, url: str, key: str | None = None, timeout_s: float = TIMEOUT_S):
        self.url = url
        self._client = AsyncSlotClient(url, key, timeout_s)

    def status(self) -> Status:
        """Returns what the slots hold."""
        return asyncio.run(self._client.status())

    def base(self) -> Base:
        """Returns what the frozen base is."""
        return asyncio.run(self._client.base())

    def stage(self, version: int, payload: bytes) -> Staged:
        """Puts a payload into an inactive slot."""
        return asyncio.run(self._client.stage(version, payload))

    def activate(self, version: int, inflight: InflightMode = DEFAULT_INFLIGHT) -> Activated:
        """Makes a staged version the one that new requests get."""
        return asyncio.run(self._client.activate(version, inflight))

    def rollback(self, version: int | None = None, inflight: InflightMode = DEFAULT_INFLIGHT) -> Activated:
        """Goes back to an older version, by default the one before."""
        return asyncio.run(self._client.rollback(version, inflight))

    def discard(self) -> Discarded:
        """Empties the inactive slots."""
        return asyncio.run(self._client.discard())

    def adapter(self, version: int) -> bytes:
        """Returns a version's payload, as it was staged."""
        return asyncio.run(self._client.adapter(version))


@functools.cache
def _tls() -> ssl.SSLContext:
    """Returns what https needs; it is made once, because reading the certificates takes longer than a call."""
    return httpx.create_ssl_context(trust_env=False)


def _what_happened(error: Exception) -> str:
    """Returns the kind of an error and, where that is safe, its cause: other texts of httpx may quote a header."""
    kind = type(error).__name__
    if not isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError):
        return kind
    cause: BaseException = error
    while (deeper := cause.__cause__ or cause.__context__) is not None:
        cause = deeper
    number = cause.errno if isinstance(cause, OSError) else None
    reason = os.strerror(number) if number is not None and number > 0 else str(cause)
    return f"{kind}: {reason}" if reason else kind


def _refused(response: httpx.Response) -> CallError:
    """Returns what an answer other than success says, as an error."""
    status = response.status_code
    try:
        error = Refused.model_validate_json(response.content).error
        return CallError(error.message, status=status, code=ErrorCode(error.code), detail=error.detail)
    except ValueError:
        return CallError(response.text[:_MAX_TEXT], status=status)
