"""The HTTP routes of the slots, on SGLang's own application."""

import json
import reprlib
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.utils.auth import AuthLevel, auth_level
from starlette.requests import ClientDisconnect

from orbit_kernels.contract.versions import MAX_VERSION
from orbit_sglang.control import messages
from orbit_sglang.http import openapi
from orbit_sglang.http.frontend import Frontend, Refusal
from orbit_sglang.http.request_body import VersionInBody
from orbit_sglang.startup.options import SlotsConfig

BODY_KEYS = {"version", "inflight"}


class Routes:
    """The endpoints; all but ``status`` and ``base`` need the server's key where one is set, like SGLang's own admin routes."""

    def __init__(self, frontend: Frontend):
        self._frontend = frontend

    def add_to(self, app: FastAPI) -> None:
        """Add each endpoint to an application.

        Not as a router: SGLang 0.5.12's metrics middleware reads ``path`` from every route
        (``utils/common.py:1569``), which a router included by FastAPI no longer has.
        """
        app.add_api_route("/orbit/status", self.status, methods=["GET"], **openapi.STATUS)
        app.add_api_route("/orbit/base", self.base, methods=["GET"], **openapi.BASE)
        app.add_api_route("/orbit/stage", self.stage, methods=["POST"], **openapi.STAGE)
        app.add_api_route("/orbit/activate", self.activate, methods=["POST"], **openapi.ACTIVATE)
        app.add_api_route("/orbit/rollback", self.rollback, methods=["POST"], **openapi.ROLLBACK)
        app.add_api_route("/orbit/discard", self.discard, methods=["POST"], **openapi.DISCARD)
        app.add_api_route("/orbit/adapter", self.adapter, methods=["GET"], **openapi.ADAPTER)

    async def status(self) -> Response:
        """Slots, versions, requests per version and counters."""
        return await _answer(lambda: self._frontend.call(messages.StatusRequest()))

    async def base(self) -> Response:
        """The manifest of the frozen base, as it was loaded."""
        return await _answer(lambda: self._frontend.call(messages.BaseManifestRequest()))

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def stage(self, request: Request) -> Response:
        """Place the body's adapter in an inactive slot."""
        return await _answer(lambda: self._frontend.stage(_query_version(request), request.stream()))

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def activate(self, request: Request) -> Response:
        """Make a staged version the one that new requests get."""

        async def operation() -> dict[str, Any]:
            body = await _json_object(request)
            message = messages.ActivateRequest(version=_version(body.get("version")), inflight=_inflight(body))
            return await self._frontend.call(message)

        return await _answer(operation)

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def rollback(self, request: Request) -> Response:
        """Go back to an older version, by default the one before."""

        async def operation() -> dict[str, Any]:
            body = await _json_object(request)
            version = _version(body["version"]) if "version" in body else None
            return await self._frontend.call(messages.RollbackRequest(version=version, inflight=_inflight(body)))

        return await _answer(operation)

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def discard(self) -> Response:
        """Empty the inactive slots."""
        return await _answer(lambda: self._frontend.call(messages.DiscardRequest()))

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def adapter(self, request: Request) -> Response:
        """The payload of a version, as it was staged."""
        try:
            path = await self._frontend.payload(_query_version(request))
        except Refusal as refusal:
            return JSONResponse(refusal.body, refusal.status)
        return FileResponse(path, media_type="application/octet-stream")


def install(result: None, tokenizer_manager: TokenizerManager) -> None:
    """After ``TokenizerManager.init_request_dispatcher``: add replies, routes and the request's version."""
    if not tokenizer_manager.server_args.enable_orbit_slots:
        return
    from sglang.srt.entrypoints.http_server import app

    frontend = Frontend(tokenizer_manager, SlotsConfig.from_server_args(tokenizer_manager.server_args))
    tokenizer_manager._result_dispatcher += frontend.handlers()
    Routes(frontend).add_to(app)
    app.add_middleware(VersionInBody)


async def _answer(operation: Callable[[], Awaitable[dict[str, Any]]]) -> Response:
    try:
        return JSONResponse(await operation())
    except Refusal as refusal:
        return JSONResponse(refusal.body, refusal.status)
    except ClientDisconnect:
        return Response(status_code=499)


def _query_version(request: Request) -> int:
    text = request.query_params.get("version", "")
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_VERSION))
    return _version(int(text) if is_number else text)


def _version(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_VERSION:
        shown = reprlib.repr(value)
        raise Refusal(400, "bad_version", f"version {shown}: must be an integer from 0 to {MAX_VERSION}")
    return value


def _inflight(body: dict[str, Any]) -> str:
    mode = body.get("inflight", "finish")
    if mode not in messages.INFLIGHT_MODES:
        raise Refusal(400, "bad_inflight", f"inflight {mode!r}: must be one of {', '.join(messages.INFLIGHT_MODES)}")
    return mode


async def _json_object(request: Request) -> dict[str, Any]:
    text = await request.body()
    try:
        body = json.loads(text or b"{}")
    except (ValueError, RecursionError) as error:
        raise Refusal(400, "bad_json", f"the body is not JSON: {error}") from None
    if not isinstance(body, dict) or body.keys() - BODY_KEYS:
        raise Refusal(400, "bad_body", f"the body must be a JSON object with keys among {sorted(BODY_KEYS)}")
    return body
