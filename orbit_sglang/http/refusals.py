"""This module refuses a generation request whose version no slot holds, in Orbit's form and on every route.

Only the scheduler knows the versions, and its refusal comes back as a request that ended at once. SGLang 0.5.12 puts
the message of one into a body that each route makes for itself, with status 200 where it streams. So the first thing
that such a request would send is replaced, outside the routes.
"""

import contextvars
import dataclasses
from typing import Any

from sglang.srt.managers.tokenizer_manager import TokenizerManager
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orbit_kernels.contract.errors import ErrorCode
from orbit_kernels.contract.keys import ERROR_KEY


@dataclasses.dataclass
class _Exchange:
    """An ``_Exchange`` is one HTTP request that named a version.

    ``refusal`` is the body of the answer, once it is known to be refused.
    """

    refusal: dict[str, Any] | None = None


_exchange: contextvars.ContextVar[_Exchange | None] = contextvars.ContextVar("orbit_exchange", default=None)


def before_abort(tokenizer_manager: TokenizerManager, out: dict[str, Any], state: Any, is_stream: bool) -> None:
    """Notes a refusal for the answer of its HTTP request.

    It runs before ``TokenizerManager._handle_abort_finish_reason``.
    """
    exchange, refusal = _exchange.get(), out["meta_info"]["finish_reason"].get(ERROR_KEY)
    if exchange is not None and refusal is not None:
        exchange.refusal = refusal


async def serve_or_refuse(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Serves a request that names a version.

    A refusal that is known before the first byte of the body is the answer.
    """
    exchange = _Exchange()
    start: Message | None = None
    refused = False

    async def checked(message: Message) -> None:
        nonlocal start, refused
        if refused:
            return
        if message["type"] == "http.response.start":
            start = message
            return
        if start is not None:
            held, start = start, None
            if exchange.refusal is not None:
                refused = True
                await JSONResponse(exchange.refusal, ErrorCode.VERSION_NOT_HELD.status)(scope, receive, send)
                return
            await send(held)
        await send(message)

    token = _exchange.set(exchange)
    try:
        await app(scope, receive, checked)
    finally:
        _exchange.reset(token)
