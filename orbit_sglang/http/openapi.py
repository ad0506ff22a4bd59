"""What ``GET /openapi.json`` says of the slots' routes: for each, the keyword arguments of FastAPI's ``add_api_route``.

It only describes. The routes read queries and bodies themselves, so that every refusal has the body of ``wire.error_body``.
"""

from typing import Annotated, Any, Literal

from fastapi.responses import FileResponse, JSONResponse
from pydantic import BaseModel, Field

from orbit_kernels.contract.versions import MAX_VERSION
from orbit_sglang.control.messages import INFLIGHT_MODES

Version = Annotated[int, Field(ge=0, description="0 is the base.")]
Requests = Annotated[dict[str, int], Field(description="Requests running and waiting, by version.")]
PauseMs = Annotated[float, Field(description="Time that the scheduler's loop was held.")]


class Error(BaseModel):
    """Why a request was refused; ``code`` is for programs."""

    code: str
    message: str
    detail: Any


class Refused(BaseModel):
    """A refusal; nothing was changed."""

    error: Error


class Unauthorized(BaseModel):
    """SGLang's own answer to a missing or wrong key."""

    error: Literal["Unauthorized"]


class StagedAdapter(BaseModel):
    """What a slot holds; ``modules`` counts adapted linears by leaf name."""

    version: Version
    adapter_type: Literal["oft", "lora"]
    digest: str
    num_bytes: int
    modules: dict[str, int]


class Staged(StagedAdapter):
    """A version is in its slot."""

    stage_s: float


class EmptySlot(BaseModel):
    """A slot that holds no version."""

    slot: int
    state: Literal["empty", "staging"]
    version: None


class FilledSlot(StagedAdapter):
    """A slot that holds a version, or is ``staging`` the next one over it."""

    slot: int
    state: Literal["staging", "staged", "active"]


class Status(BaseModel):
    """Slots, versions, requests and counters."""

    active_version: Version
    versions: Annotated[list[int], Field(description="Versions that a request may ask for.")]
    highest_seen: Annotated[int, Field(description="The next version to stage must be greater.")]
    slots: list[EmptySlot | FilledSlot]
    staging: Annotated[int | None, Field(description="Version that is being staged.")]
    adapter: Annotated[
        dict[str, str | int], Field(description="Type, size and fused mode that the slots are made for.")
    ]
    requests: Requests
    counters: dict[str, int]
    last_activate_pause_ms: PauseMs | None
    busy_s: Annotated[float, Field(description="Time with at least one request.")]


class Activated(BaseModel):
    """The version that new requests get from now on."""

    active_version: Version
    pause_ms: PauseMs
    busy_s: float
    requests: Requests


class Discarded(BaseModel):
    """Versions that were dropped."""

    discarded: list[int]


class Base(BaseModel):
    """Format of every linear, and dtype, shape and SHA-256 of every stored tensor, by name."""

    formats: dict[str, dict[str, Any]]
    tensors: dict[str, dict[str, Any]]


_VERSION = {"type": "integer", "minimum": 0, "maximum": MAX_VERSION}
_NEEDS_VERSION = {"parameters": [{"name": "version", "in": "query", "required": True, "schema": _VERSION}]}
_BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_BAD_BODY = "bad_json, bad_body, bad_version, bad_inflight"


def _json_body(*required: str) -> dict[str, Any]:
    properties = {
        "version": _VERSION,
        "inflight": {"type": "string", "enum": list(INFLIGHT_MODES), "default": "finish"},
    }
    schema = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    return {"requestBody": {"required": bool(required), "content": {"application/json": {"schema": schema}}}}


def _route(
    summary: str,
    answer: type[BaseModel] | None,
    codes: dict[int, str] | None = None,
    operation: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Describe a route by its answer, bytes where that is None, the codes of its refusals by status, and its input."""
    refusals = {**(codes or {}), 503: "scheduler_timeout"}
    return {
        "summary": summary,
        "tags": ["orbit"],
        "response_class": FileResponse if answer is None else JSONResponse,
        "responses": {
            200: {"content": _BYTES} if answer is None else {"model": answer},
            401: {"model": Unauthorized, "description": "The server has a key, and the request does not carry it."},
            **{status: {"model": Refused, "description": names} for status, names in refusals.items()},
        },
        "openapi_extra": operation,
    }


STATUS = _route("What the slots hold", Status)
BASE = _route("What the frozen base is, to the bit", Base)
STAGE = _route(
    "Stage an adapter as a new version",
    Staged,
    {
        400: "bad_version",
        408: "body_timeout",
        409: "version_not_new, slot_in_use, staging_in_progress",
        413: "adapter_too_large",
        422: "adapter_refused; detail lists every problem",
        500: "stage_failed",
    },
    {**_NEEDS_VERSION, "requestBody": {"required": True, "content": _BYTES}},
)
ACTIVATE = _route(
    "Activate a staged version",
    Activated,
    {400: _BAD_BODY, 409: "version_not_staged, version_older"},
    _json_body("version"),
)
ROLLBACK = _route(
    "Go back to an older version, by default the one before",
    Activated,
    {400: _BAD_BODY, 409: "nothing_to_roll_back, version_not_staged, version_newer"},
    _json_body(),
)
DISCARD = _route("Empty the inactive slots", Discarded, {409: "slot_in_use, staging_in_progress"})
ADAPTER = _route(
    "A version's payload, as it was staged", None, {400: "bad_version", 404: "version_not_held"}, _NEEDS_VERSION
)
