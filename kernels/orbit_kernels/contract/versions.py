"""Numbers of adapter versions. Importable without torch."""

BASE_VERSION = 0
"""The adapter-off base model: always available, never staged."""

MAX_VERSION = 2**53 - 1
"""The largest integer that every JSON reader, and a Prometheus value, holds exactly."""


def version_of(global_steps: int) -> int:
    """The adapter version that holds the result of this many steps. Version 0 is the base, so the start is 1."""
    return global_steps + 1
