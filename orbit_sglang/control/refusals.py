"""This module is how the scheduler says that no slot holds a request's version.

``http.refusals`` shows what becomes of it.
"""

from http import HTTPStatus
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT

from orbit_kernels.contract.errors import ErrorCode, error_body
from orbit_kernels.contract.keys import ERROR_KEY, REQUESTED_VERSION_KEY


class VersionNotHeld(FINISH_ABORT):
    """A ``VersionNotHeld`` says why a request ended before its first token.

    In a stream that has begun it is part of its ``finish_reason``.
    """

    def __init__(self, version: object, versions: list[int]):
        message = f"{REQUESTED_VERSION_KEY} {version!r}: must be one of the live versions {versions}"
        super().__init__(message, HTTPStatus(ErrorCode.VERSION_NOT_HELD.status), "BadRequestError")
        self._error = error_body(ErrorCode.VERSION_NOT_HELD, message, {"versions": versions})

    def to_json(self) -> dict[str, Any]:
        """Returns SGLang's fields and the body of the answer."""
        return {**super().to_json(), ERROR_KEY: self._error}
