"""This module has the checks of ``orbit doctor --server``, which ask what a running server says of its slots.

It imports neither verl nor SGLang.
"""

from orbit_cli.doctor import Check, State
from orbit_kernels.contract.answers import Base, FilledSlot, Status
from orbit_kernels.contract.client import UNAUTHORIZED, CallError, SlotClient
from orbit_kernels.contract.errors import ErrorCode
from orbit_kernels.contract.versions import BASE_VERSION

TIMEOUT_S = 30.0
"""A status waits for the batch that is running."""

NOT_FOUND = 404


def server_checks(url: str, key: str | None) -> list[Check]:
    """Asks a server about its slots, version, requests and base; the last check has failed when it cannot say."""
    checks: list[Check] = []
    try:
        server = SlotClient(url, key, TIMEOUT_S)
        checks += _status_checks(server.status())
        checks.append(_key_check(server, key))
        checks.append(_base_check(server.base()))
    except CallError as error:
        checks.append(Check("server", State.FAILED, _finding(error, key)))
    except ValueError as error:
        checks.append(Check("server", State.FAILED, str(error)))
    return checks


def _finding(error: CallError, key: str | None) -> str:
    if error.status is None:
        return f"cannot be reached: {error.message}; is it running, and is this its URL?"
    if error.status == UNAUTHORIZED and key is not None:
        return "refuses the key; pass the one of the server's --api-key"
    if error.status == UNAUTHORIZED:
        return "needs a key; pass the one of its --api-key as --api-key"
    if error.status == NOT_FOUND:
        return "answers, but has no slots; start it with --enable-orbit-slots"
    return f"does not answer as a server with slots does: {error}; is this its URL?"


def _status_checks(status: Status) -> list[Check]:
    filled = [slot for slot in status.slots if isinstance(slot, FilledSlot)]
    pause_ms = status.last_activate_pause_ms
    requests = [f"{number} on version {version}" for version, number in status.requests.items()]
    found = {
        "slots": ", ".join(f"{key} {value}" for key, value in status.adapter.items()),
        "active version": _held(filled, "active") or "0, the base",
        "staged version": _held(filled, "staged") or "none",
        "requests in flight": ", ".join(requests) or "none",
        "last activation": "none yet" if pause_ms is None else f"held the scheduler for {pause_ms:.3g} ms",
    }
    if status.staging is not None:
        found["staged version"] += f"; {status.staging} is being staged"
    return [Check(f"server, {subject}", State.OK, detail) for subject, detail in found.items()]


def _held(slots: list[FilledSlot], state: str) -> str:
    return ", ".join(
        f"{slot.version} ({slot.num_bytes} bytes, digest {slot.digest[:12]})" for slot in slots if slot.state == state
    )


def _key_check(server: SlotClient, key: str | None) -> Check:
    """Checks whether the routes that change slots accept the key, or its absence; it asks without changing any."""
    if _may_ask_for_payloads(server):
        return Check("server, key", State.OK, "none needed" if key is None else "accepted by every route")
    if key is None:
        return Check("server, key", State.OK, "none given; the routes that change slots need one")
    try:
        SlotClient(server.url, timeout_s=TIMEOUT_S).status()
    except CallError:
        return Check("server, key", State.OK, "accepted; the routes that change slots need that of --admin-api-key")
    return Check("server, key", State.FAILED, "refused by the routes that change slots; pass the server's")


def _may_ask_for_payloads(server: SlotClient) -> bool:
    """Returns whether the server answers for payloads.

    The base has no payload: whoever may ask is told that no slot holds it.
    """
    try:
        server.adapter(BASE_VERSION)
    except CallError as error:
        if error.code is not ErrorCode.VERSION_NOT_HELD and error.status != UNAUTHORIZED:
            raise
        return error.status != UNAUTHORIZED
    return True


def _base_check(base: Base) -> Check:
    # Importing torch costs seconds.
    from orbit_kernels.checkpoint.manifest import BaseManifest

    manifest = BaseManifest(formats=base.formats, tensors=base.tensors)
    return Check("server, base", State.OK, f"{len(manifest.tensors)} tensors, digest {manifest.digest}")
