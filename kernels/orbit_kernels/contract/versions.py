"""This module numbers adapter versions; it can be imported without torch."""

BASE_VERSION = 0
"""Version 0 is the adapter-off base model: it is always available and never staged."""

MAX_VERSION = 2**53 - 1
"""This is the largest integer that every JSON reader, and a Prometheus value, holds exactly."""


def version_of(global_steps: int) -> int:
    """Returns the adapter version that holds the result of this many steps.

    Version 0 is the base, so the start is 1.
    """
    return global_steps + 1


def steps_of(version: int) -> int:
    """Returns the steps whose result a version holds, as ``version_of`` counts them.

    The result is -1 for the base, which is before the start.
    """
    return version - 1
