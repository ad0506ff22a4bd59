"""This module says whether a process serves with slots."""

from sglang.srt.server_args import get_global_server_args


def slots_enabled() -> bool:
    """Returns whether this process serves with slots; without them SGLang is left as it is."""
    return get_global_server_args().enable_orbit_slots
