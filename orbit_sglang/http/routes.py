"""This module adds the HTTP routes of the slots to SGLang's own application."""

import json
import logging
import reprlib
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.utils.auth import AuthLevel, auth_level
from starlette.requests import ClientDisconnect

from orbit_kernels.contract import routes
from orbit_kernels.contract.errors import ErrorCode, Refusal
from orbit_kernels.contract.keys import DEFAULT_INFLIGHT, INFLIGHT_MODES, InflightMode
from orbit_kernels.contract.routes import Route
from orbit_kernels.contract.versions import BASE_VERSION, MAX_VERSION
from orbit_sglang.control import messages
from orbit_sglang.control.gate import guard
from orbit_sglang.http.frontend import Frontend
from orbit_sglang.http.gate import Gate
from orbit_sglang.http.openapi import described
from orbit_sglang.http.request_body import VersionInBody
from orbit_sglang.startup.options import SlotsConfig

logger = logging.getLogger(__name__)


class Routes:
    """``Routes`` are the endpoints: there is a method for each route of the contract, by its name."""

    def __init__(self, frontend: Frontend):
        self._frontend = frontend

    def add_to(self, app: FastAPI) -> None:
        """Adds each endpoint to an application; those that need a key are what SGLang's own admin routes are.

        They are not added as a router: SGLang 0.5.12's metrics middleware reads ``path`` from every route
        (``srt/utils/common.py::_get_fastapi_request_path``), which a router included by FastAPI no longer has.
        """
        for route in routes.ROUTES:
            endpoint = getattr(self, route.name)
            if route.needs_key:
                auth_level(AuthLevel.ADMIN_OPTIONAL)(endpoint.__func__)
            app.add_api_route(route.path, endpoint, methods=[route.method], **described(route))

    async def status(self) -> Response:
        """Returns slots, versions, requests per version and counters."""
        return await _answer(lambda: self._frontend.call(messages.StatusRequest()))

    async def base(self) -> Response:
        """Returns the manifest of the frozen base, as it was loaded."""
        return await _answer(lambda: self._frontend.call(messages.BaseManifestRequest()))

    async def stage(self, request: Request) -> Response:
        """Places the body's adapter in an inactive slot."""
        return await _answer(lambda: self._frontend.stage(_query_version(request), request.stream()))

    async def activate(self, request: Request) -> Response:
        """Makes a staged version the one that new requests get."""

        async def operation() -> dict[str, Any]:
            body = await _json_object(request, routes.ACTIVATE)
            message = messages.ActivateRequest(version=_version(body.get("version")), inflight=_inflight(body))
            return await self._frontend.call(message)

        return await _answer(operation)

    async def rollback(self, request: Request) -> Response:
        """Goes back to an older version, by default the one before."""

        async def operation() -> dict[str, Any]:
            body = await _json_object(request, routes.ROLLBACK)
            version = _version(body["version"]) if "version" in body else None
            return await self._frontend.call(messages.RollbackRequest(version=version, inflight=_inflight(body)))

        return await _answer(operation)

    async def discard(self) -> Response:
        """Empties the inactive slots."""
        return await _answer(lambda: self._frontend.call(messages.DiscardRequest()))

    async def adapter(self, request: Request) -> Response:
        """Returns the payload of a version, as it was staged."""

        async def operation() -> Response:
            path = await self._frontend.payload(_query_version(request))
            return FileResponse(path, media_type=routes.PAYLOAD)

        return await _answer(operation)


def install(result: None, tokenizer_manager: TokenizerManager) -> None:
    """Adds replies, routes and the request's version; runs after ``TokenizerManager.init_request_dispatcher``."""
    if not tokenizer_manager.server_args.enable_orbit_slots:
        return
    from sglang.srt.entrypoints.http_server import app

    frontend = Frontend(tokenizer_manager, SlotsConfig.from_server_args(tokenizer_manager.server_args))
    tokenizer_manager.orbit = frontend
    tokenizer_manager._result_dispatcher += frontend.handlers()
    Routes(frontend).add_to(app)
    app.add_middleware(VersionInBody)
    app.add_middleware(Gate)
    guard(tokenizer_manager.send_to_scheduler)


async def _answer(operation: Callable[[], Awaitable[dict[str, Any] | Response]]) -> Response:
    """Returns an operation's answer, or why there is none: in the contract's form, whatever happened below."""
    try:
        answer = await operation()
    except ClientDisconnect:
        return Response(status_code=499)
    except Refusal as refusal:
        return _refused(refusal)
    except Exception as error:
        logger.exception("A control operation failed")
        return _refused(
            Refusal(ErrorCode.SERVER_FAILED, f"{type(error).__name__}: {error}; the server's log says more")
        )
    return answer if isinstance(answer, Response) else JSONResponse(answer)


def _refused(refusal: Refusal) -> Response:
    return JSONResponse(refusal.body, refusal.code.status)


def _query_version(request: Request) -> int:
    text = request.query_params.get("version", "")
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_VERSION))
    return _version(int(text) if is_number else text)


def _version(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not BASE_VERSION <= value <= MAX_VERSION:
        rule = f"must be an integer from {BASE_VERSION} to {MAX_VERSION}"
        raise Refusal(ErrorCode.BAD_VERSION, f"version {reprlib.repr(value)}: {rule}")
    return value


def _inflight(body: dict[str, Any]) -> InflightMode:
    mode = body.get("inflight", DEFAULT_INFLIGHT)
    if mode not in INFLIGHT_MODES:
        raise Refusal(ErrorCode.BAD_INFLIGHT, f"inflight {mode!r}: must be one of {', '.join(INFLIGHT_MODES)}")
    return mode


async def _json_object(request: Request, route: Route) -> dict[str, Any]:
    text = await request.body()
    try:
        body = json.loads(text or b"{}")
    except (ValueError, RecursionError) as error:
        raise Refusal(ErrorCode.BAD_JSON, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict) or body.keys() - set(route.body):
        keys = sorted(route.body)
        raise Refusal(ErrorCode.BAD_BODY, f"the body must be a JSON object with keys among {keys}")
    return body
