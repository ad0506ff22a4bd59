"""This module says why a request is refused: it has every code with its HTTP status, and the form of every refusal.

It can be imported without torch.
"""

import enum
from typing import Any


class ErrorCode(enum.StrEnum):
    """An error code says what is wrong, for programs; ``status`` is the HTTP status, one for each code."""

    status: int

    def __new__(cls, code: str, status: int):
        """Makes a member that is its code."""
        member = str.__new__(cls, code)
        member._value_ = code
        member.status = status
        return member

    BAD_JSON = "bad_json", 400
    BAD_BODY = "bad_body", 400
    BAD_VERSION = "bad_version", 400
    BAD_INFLIGHT = "bad_inflight", 400
    VERSION_NOT_HELD = "version_not_held", 400
    ROUTE_REFUSED = "route_refused", 403
    BODY_TIMEOUT = "body_timeout", 408
    STAGING_IN_PROGRESS = "staging_in_progress", 409
    SLOT_IN_USE = "slot_in_use", 409
    VERSION_NOT_NEW = "version_not_new", 409
    VERSION_NOT_STAGED = "version_not_staged", 409
    VERSION_OLDER = "version_older", 409
    VERSION_NEWER = "version_newer", 409
    NOTHING_TO_ROLL_BACK = "nothing_to_roll_back", 409
    ADAPTER_TOO_LARGE = "adapter_too_large", 413
    ADAPTER_REFUSED = "adapter_refused", 422
    BASE_CHANGED = "base_changed", 500
    STAGE_FAILED = "stage_failed", 500
    SERVER_FAILED = "server_failed", 500
    SCHEDULER_TIMEOUT = "scheduler_timeout", 503


def error_body(code: ErrorCode, message: str, detail: Any = None) -> dict[str, Any]:
    """Returns the JSON body of every refusal: ``{"error": {"code", "message", "detail"}}``."""
    return {"error": {"code": code.value, "message": message, "detail": detail}}


class Refusal(Exception):
    """A server does not do what a request asks for; the exception travels between the server's processes."""

    def __init__(self, code: ErrorCode, message: str, detail: Any = None):
        super().__init__(code, message, detail)  # pickle makes the copy from these
        self.code = code
        self.message = message
        self.detail = detail

    def __str__(self) -> str:
        return self.message

    @property
    def body(self) -> dict[str, Any]:
        """Returns the answer's body; its HTTP status is the code's."""
        return error_body(self.code, self.message, self.detail)
