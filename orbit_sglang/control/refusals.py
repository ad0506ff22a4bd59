"""How the scheduler says that no slot holds a request's version; see ``http.refusals`` for what becomes of it."""

from http import HTTPStatus
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT

from orbit_kernels.contract.errors import error_body

CODE = "version_not_held"
ERROR_KEY = "orbit_error"
"""Key of ``finish_reason`` that carries the body of the answer."""


class VersionNotHeld(FINISH_ABORT):
    """Why a request ended before its first token; in a stream that has begun, part of its ``finish_reason``."""

    def __init__(self, version: object, versions: list[int]):
        message = f"orbit_version {version!r}: must be one of the live versions {versions}"
        super().__init__(message, HTTPStatus.BAD_REQUEST, "BadRequestError")
        self._error = error_body(CODE, message, {"versions": versions})

    def to_json(self) -> dict[str, Any]:
        """SGLang's fields, and the body of the answer."""
        return {**super().to_json(), ERROR_KEY: self._error}
