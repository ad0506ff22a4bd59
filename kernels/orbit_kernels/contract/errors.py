"""The form of every refusal. Importable without torch."""

from typing import Any


def error_body(code: str, message: str, detail: Any = None) -> dict[str, Any]:
    """The JSON body of every refusal: ``{"error": {"code", "message", "detail"}}``."""
    return {"error": {"code": code, "message": message, "detail": detail}}
