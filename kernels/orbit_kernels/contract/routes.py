"""This module declares what each route of the slots takes, answers and refuses. It can be imported without torch."""

import dataclasses
from typing import Any, Literal

from pydantic import BaseModel

from orbit_kernels.contract import answers
from orbit_kernels.contract.errors import ErrorCode
from orbit_kernels.contract.keys import DEFAULT_INFLIGHT, INFLIGHT_MODES
from orbit_kernels.contract.versions import BASE_VERSION, MAX_VERSION

FIELDS: dict[str, dict[str, Any]] = {
    "version": {"type": "integer", "minimum": BASE_VERSION, "maximum": MAX_VERSION},
    "inflight": {"type": "string", "enum": list(INFLIGHT_MODES), "default": DEFAULT_INFLIGHT},
}
"""The table has the JSON schema of everything that a query or a body may hold."""

PAYLOAD = "application/octet-stream"
"""This is the media type of an adapter's bytes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Route[Answer: BaseModel]:
    """A ``Route`` declares one route.

    Args:
        method: HTTP method.
        path: its path; the last part is the route's ``name``.
        summary: what it does, in a few words.
        answer: what a success says; None where it is a payload.
        needs_key: whether it asks for the server's key for administration, like every route that changes the slots.
        refusals: codes that this route answers with, apart from those of every route.
        query: fields of the query; all are required.
        body: fields of the JSON body; ``required`` are those that it must have. None where there is no such body.
        takes_payload: whether the body is a payload.
    """

    method: Literal["GET", "POST"]
    path: str
    summary: str
    answer: type[Answer] | None
    needs_key: bool
    refusals: tuple[ErrorCode, ...] = ()
    query: tuple[str, ...] = ()
    body: tuple[str, ...] | None = None
    required: tuple[str, ...] = ()
    takes_payload: bool = False

    @property
    def name(self) -> str:
        """Returns the route's name in code: that of the server's endpoint and of the client's method."""
        return self.path.rpartition("/")[2]

    @property
    def codes(self) -> tuple[ErrorCode, ...]:
        """Returns every code that it may answer with, in the order of their statuses."""
        codes = (*self.refusals, ErrorCode.SERVER_FAILED, ErrorCode.SCHEDULER_TIMEOUT)
        return tuple(sorted(codes, key=lambda code: code.status))


_BAD_BODY = (ErrorCode.BAD_JSON, ErrorCode.BAD_BODY, ErrorCode.BAD_VERSION, ErrorCode.BAD_INFLIGHT)

STATUS = Route(
    method="GET", path="/orbit/status", summary="What the slots hold", answer=answers.Status, needs_key=False
)
BASE = Route(
    method="GET",
    path="/orbit/base",
    summary="What the frozen base is, to the bit",
    answer=answers.Base,
    needs_key=False,
    refusals=(ErrorCode.BASE_CHANGED,),
)
STAGE = Route(
    method="POST",
    path="/orbit/stage",
    summary="Stage an adapter as a new version",
    answer=answers.Staged,
    needs_key=True,
    refusals=(
        ErrorCode.BAD_VERSION,
        ErrorCode.BODY_TIMEOUT,
        ErrorCode.VERSION_NOT_NEW,
        ErrorCode.SLOT_IN_USE,
        ErrorCode.STAGING_IN_PROGRESS,
        ErrorCode.ADAPTER_TOO_LARGE,
        ErrorCode.ADAPTER_REFUSED,
        ErrorCode.BASE_CHANGED,
        ErrorCode.STAGE_FAILED,
    ),
    query=("version",),
    takes_payload=True,
)
ACTIVATE = Route(
    method="POST",
    path="/orbit/activate",
    summary="Activate a staged version",
    answer=answers.Activated,
    needs_key=True,
    refusals=(*_BAD_BODY, ErrorCode.VERSION_NOT_STAGED, ErrorCode.VERSION_OLDER),
    body=("version", "inflight"),
    required=("version",),
)
ROLLBACK = Route(
    method="POST",
    path="/orbit/rollback",
    summary="Go back to an older version, by default the one before",
    answer=answers.Activated,
    needs_key=True,
    refusals=(
        *_BAD_BODY,
        ErrorCode.NOTHING_TO_ROLL_BACK,
        ErrorCode.VERSION_NOT_STAGED,
        ErrorCode.VERSION_NEWER,
    ),
    body=("version", "inflight"),
)
DISCARD = Route(
    method="POST",
    path="/orbit/discard",
    summary="Empty the inactive slots",
    answer=answers.Discarded,
    needs_key=True,
    refusals=(ErrorCode.SLOT_IN_USE, ErrorCode.STAGING_IN_PROGRESS),
)
ADAPTER = Route(
    method="GET",
    path="/orbit/adapter",
    summary="A version's payload, as it was staged",
    answer=None,
    needs_key=True,
    refusals=(ErrorCode.BAD_VERSION, ErrorCode.VERSION_NOT_HELD),
    query=("version",),
)

ROUTES = (STATUS, BASE, STAGE, ACTIVATE, ROLLBACK, DISCARD, ADAPTER)

STOCK_REFUSALS = (ErrorCode.BAD_BODY, ErrorCode.VERSION_NOT_HELD, ErrorCode.ROUTE_REFUSED)
"""A server with slots refuses requests to SGLang's own routes with these codes."""
