"""This module has the client of the slots of an engine in this process, ``sglang.Engine(enable_orbit_slots=True)``.

That of a server over HTTP is ``orbit_kernels.contract.client.SlotClient``, which has the same methods.
"""

from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import TYPE_CHECKING

from orbit_kernels.contract.answers import Activated, Base, Discarded, Staged, Status
from orbit_kernels.contract.client import CallError
from orbit_kernels.contract.errors import Refusal
from orbit_kernels.contract.keys import DEFAULT_INFLIGHT, InflightMode
from orbit_sglang.control import messages

if TYPE_CHECKING:
    from sglang import Engine


class EngineSlots:
    """``EngineSlots`` calls the slots of an engine, from the thread that made it; its methods are those of ``SlotClient``.

    Raises:
        ValueError: the engine has no slots.
        CallError: from every call: refused.
    """

    def __init__(self, engine: "Engine"):
        frontend = getattr(engine.tokenizer_manager, "orbit", None)
        if frontend is None:
            raise ValueError("the engine has no slots: make it with enable_orbit_slots=True")
        self._engine, self._frontend = engine, frontend

    def status(self) -> Status:
        """Returns what the slots hold."""
        return Status.model_validate(self._call(self._frontend.call(messages.StatusRequest())))

    def base(self) -> Base:
        """Returns what the frozen base is."""
        return Base.model_validate(self._call(self._frontend.call(messages.BaseManifestRequest())))

    def stage(self, version: int, payload: bytes) -> Staged:
        """Puts a payload into an inactive slot."""
        return Staged.model_validate(self._call(self._frontend.stage(version, _chunks(payload))))

    def activate(self, version: int, inflight: InflightMode = DEFAULT_INFLIGHT) -> Activated:
        """Makes a staged version the one that new requests get."""
        request = messages.ActivateRequest(version=version, inflight=inflight)
        return Activated.model_validate(self._call(self._frontend.call(request)))

    def rollback(self, version: int | None = None, inflight: InflightMode = DEFAULT_INFLIGHT) -> Activated:
        """Goes back to an older version, by default the one before."""
        request = messages.RollbackRequest(version=version, inflight=inflight)
        return Activated.model_validate(self._call(self._frontend.call(request)))

    def discard(self) -> Discarded:
        """Empties the inactive slots."""
        return Discarded.model_validate(self._call(self._frontend.call(messages.DiscardRequest())))

    def adapter(self, version: int) -> bytes:
        """Returns a version's payload, as it was staged."""
        return Path(self._call(self._frontend.payload(version))).read_bytes()

    def _call[Answer](self, operation: Awaitable[Answer]) -> Answer:
        try:
            return self._engine.loop.run_until_complete(operation)
        except Refusal as refusal:
            status, code = refusal.code.status, refusal.code
            raise CallError(refusal.message, status=status, code=code, detail=refusal.detail) from None


async def _chunks(payload: bytes) -> AsyncIterator[bytes]:
    yield payload
