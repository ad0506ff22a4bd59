"""This module makes what ``GET /openapi.json`` says of the slots' routes.

For each route it gives the keyword arguments of FastAPI's ``add_api_route``. It only describes. The endpoints read
queries and bodies themselves, so that every refusal has the body of ``error_body``.
"""

import itertools
from typing import Any

from fastapi.responses import FileResponse, JSONResponse

from orbit_kernels.contract.answers import Refused, Unauthorized
from orbit_kernels.contract.routes import FIELDS, PAYLOAD, Route

_PAYLOAD = {PAYLOAD: {"schema": {"type": "string", "format": "binary"}}}


def described(route: Route) -> dict[str, Any]:
    """Describes a route by its answer, the codes of its refusals by status, and its input."""
    refusals = {
        status: {"model": Refused, "description": ", ".join(codes)}
        for status, codes in itertools.groupby(route.codes, lambda code: code.status)
    }
    return {
        "summary": route.summary,
        "tags": ["orbit"],
        "response_class": FileResponse if route.answer is None else JSONResponse,
        "responses": {
            200: {"content": _PAYLOAD} if route.answer is None else {"model": route.answer},
            401: {"model": Unauthorized, "description": "The server has a key, and the request does not carry it."},
            **refusals,
        },
        "openapi_extra": _input(route),
    }


def _input(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {}
    if route.query:
        operation["parameters"] = [
            {"name": name, "in": "query", "required": True, "schema": FIELDS[name]} for name in route.query
        ]
    if route.takes_payload:
        operation["requestBody"] = {"required": True, "content": _PAYLOAD}
    elif route.body is not None:
        schema = {
            "type": "object",
            "properties": {name: FIELDS[name] for name in route.body},
            "required": list(route.required),
            "additionalProperties": False,
        }
        operation["requestBody"] = {
            "required": bool(route.required),
            "content": {"application/json": {"schema": schema}},
        }
    return operation
