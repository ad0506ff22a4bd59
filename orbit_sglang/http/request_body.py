"""This module takes ``"orbit_version"`` out of the body of a generation request.

SGLang 0.5.12 drops keys that its request models do not declare, and the models are frozen into the routes when
``http_server`` is imported, before or after the plugin. So the key moves, ahead of the routes, to the field that does
reach the scheduler: ``custom_params``, inside ``sampling_params`` for the native route. The other generation routes
build their sampling parameters from fields of their own and would drop it, so they refuse the key.
"""

import json
import os
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orbit_kernels.contract.errors import ErrorCode, Refusal
from orbit_kernels.contract.keys import REQUESTED_VERSION_KEY
from orbit_sglang.http.refusals import serve_or_refuse

NATIVE_PATH = "/generate"
OPENAI_PATHS = ("/v1/completions", "/v1/chat/completions")
# Named as SGLang 0.5.12 names them (entrypoints/http_server.py::"/v1/responses" and what follows).
OTHER_PATHS = (
    "/v1/responses",
    "/v1/messages",
    "/invocations",
    os.environ.get("SGLANG_OLLAMA_CHAT_ROUTE", "/api/chat"),
    os.environ.get("SGLANG_OLLAMA_GENERATE_ROUTE", "/api/generate"),
    os.environ.get("AIP_PREDICT_ROUTE", "/vertex_generate"),
)


class VersionInBody:
    """``VersionInBody`` is an ASGI middleware; bodies without the key pass through unchanged."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] == "http" and scope["path"] in (NATIVE_PATH, *OPENAI_PATHS, *OTHER_PATHS):
            body, disconnected = await _read(receive)
            try:
                if not disconnected:
                    receive = _replay(move_version(body, scope["path"]), receive)
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
    if path in OTHER_PATHS and _has_key(request):
        supported = ", ".join((NATIVE_PATH, *OPENAI_PATHS))
        raise ValueError(f"{path} cannot choose a version; send {REQUESTED_VERSION_KEY} to one of {supported}")
    if not isinstance(request, dict) or REQUESTED_VERSION_KEY not in request:
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
