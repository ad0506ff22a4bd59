"""This module takes ``"orbit_version"`` out of the body of a generation request.

SGLang 0.5.12 drops keys that its request models do not declare, and the models are frozen into the routes when
``http_server`` is imported, before or after the plugin. So the key moves, ahead of the routes, to the field that does
reach the scheduler: ``custom_params``, inside ``sampling_params`` for the native route. Every other route would drop it,
so it refuses the key, wherever in its body that stands.
"""

import json
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orbit_kernels.contract.errors import ErrorCode, Refusal
from orbit_kernels.contract.keys import REQUESTED_VERSION_KEY
from orbit_sglang.http.refusals import serve_or_refuse
from orbit_sglang.http.stock_routes import CHOOSING_PATHS, NATIVE_PATH, path_of

_WITHOUT_BODY = ("GET", "HEAD", "OPTIONS")
_OWN_PREFIX = "/orbit/"


class VersionInBody:
    """``VersionInBody`` is an ASGI middleware; bodies without the key pass through unchanged."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        path = path_of(scope) if scope["type"] == "http" else _OWN_PREFIX
        if not path.startswith(_OWN_PREFIX) and scope["method"] not in _WITHOUT_BODY:
            body, disconnected = await _read(receive)
            try:
                if REQUESTED_VERSION_KEY.encode() in scope["query_string"]:
                    raise ValueError(f"{REQUESTED_VERSION_KEY} stands in the query: it belongs at the top of the body")
                if not disconnected:
                    receive = _replay(move_version(body, path), receive)
            except (ValueError, RecursionError) as error:
                problem = "the body is nested too deeply" if isinstance(error, RecursionError) else str(error)
                refusal = Refusal(ErrorCode.BAD_BODY, problem)
                await JSONResponse(refusal.body, refusal.code.status)(scope, receive, send)
                return
            if REQUESTED_VERSION_KEY.encode() in body:
                await serve_or_refuse(self._app, scope, receive, send)
                return
        await self._app(scope, receive, send)


def move_version(body: bytes, path: str) -> bytes:
    """Returns the body with a top-level ``orbit_version`` moved to where the scheduler finds it.

    Raises:
        ValueError: the route has no place for it, or ``sampling_params`` or ``custom_params`` is no object.
    """
    if REQUESTED_VERSION_KEY.encode() not in body:
        return body
    try:
        request = json.loads(body)
    except ValueError:
        return body
    if path not in CHOOSING_PATHS and _has_key(request):
        supported = ", ".join(CHOOSING_PATHS)
        raise ValueError(f"{path} cannot choose a version; send {REQUESTED_VERSION_KEY} to one of {supported}")
    if path not in CHOOSING_PATHS or not isinstance(request, dict) or REQUESTED_VERSION_KEY not in request:
        return body
    version = request.pop(REQUESTED_VERSION_KEY)
    for holder in _holders(request, path):
        custom_params = _object(_object(holder, "sampling_params").get("custom_params") or {}, "custom_params")
        holder["custom_params"] = {**custom_params, REQUESTED_VERSION_KEY: version}
    return json.dumps(request).encode()


def _has_key(value: Any) -> bool:
    """Returns whether the key occurs in a JSON value, at any depth."""
    if isinstance(value, dict):
        return REQUESTED_VERSION_KEY in value or any(_has_key(item) for item in value.values())
    return isinstance(value, list) and any(_has_key(item) for item in value)


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} {value!r}: must be a JSON object")
    return value


def _holders(request: dict[str, Any], path: str) -> list[Any]:
    if path != NATIVE_PATH:
        return [request]
    params = request.get("sampling_params") or {}
    request["sampling_params"] = params
    return params if isinstance(params, list) else [params]


async def _read(receive: Receive) -> tuple[bytes, bool]:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b"", True
        body += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(body), False


def _replay(body: bytes, receive: Receive) -> Receive:
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed
