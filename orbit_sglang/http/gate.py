"""This module refuses, in front of SGLang's application, every route that ``stock_routes`` does not serve."""

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from orbit_kernels.contract.errors import ErrorCode, Refusal
from orbit_sglang.http.stock_routes import path_of, reason_to_refuse


class Gate:
    """A ``Gate`` is an ASGI middleware; nothing of a refused request's body is read."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] == "websocket":
            await WebSocketClose(code=1008)(scope, receive, send)
            return
        if scope["type"] == "http":
            method, path = scope["method"], path_of(scope)
            reason = reason_to_refuse(method, path)
            if reason is not None:
                refusal = Refusal(
                    ErrorCode.ROUTE_REFUSED, f"{method} {path} is refused with --enable-orbit-slots: {reason}"
                )
                await JSONResponse(refusal.body, refusal.code.status)(scope, receive, send)
                return
        await self._app(scope, receive, send)
