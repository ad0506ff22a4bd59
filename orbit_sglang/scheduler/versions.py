"""This module knows which adapter version each slot holds, and which one is active.

It is importable without torch or SGLang. Version 0 is the base model with the adapter off. It needs no slot, is always
available and is active at the start. Two slots hold versions above 0; a version that was staged once is never accepted
again.
"""

from collections.abc import Mapping

from orbit_kernels.contract.answers import EmptySlot, FilledSlot, StagedAdapter
from orbit_kernels.contract.errors import ErrorCode, Refusal
from orbit_kernels.contract.versions import BASE_VERSION
from orbit_sglang.control.slots import BASE_SLOT, SLOTS


class SlotVersions:
    """``SlotVersions`` is the state machine of two slots.

    It is not thread-safe: the scheduler's thread owns it.
    """

    def __init__(self):
        self.active_version = BASE_VERSION
        self.highest_seen = BASE_VERSION
        self.staging_version: int | None = None
        self._held: dict[int, StagedAdapter | None] = dict.fromkeys(SLOTS)
        self._staging_slot: int | None = None
        self._rollback_version: int | None = None

    @property
    def versions(self) -> list[int]:
        """Returns the versions that a request may use now, ascending."""
        held = (adapter.version for slot, adapter in self._held.items() if adapter and slot != self._staging_slot)
        return sorted([BASE_VERSION, *held])

    def slot_of(self, version: int) -> int | None:
        """Returns the slot of a version that a request may use now, or None when there is none."""
        if version == BASE_VERSION:
            return BASE_SLOT
        for slot, adapter in self._held.items():
            if adapter and adapter.version == version and slot != self._staging_slot:
                return slot
        return None

    def begin_stage(self, version: int, in_use: Mapping[int, int]) -> int:
        """Reserves a slot for a new version.

        It takes an empty one first, else the older inactive one that no request uses.

        Args:
            version: the new version.
            in_use: running requests by version.

        Raises:
            Refusal: the version is not new, another staging is in progress, or requests use every inactive slot.
        """
        if self.staging_version is not None:
            raise Refusal(ErrorCode.STAGING_IN_PROGRESS, f"version {self.staging_version} is being staged; retry later")
        if version <= self.highest_seen:
            raise Refusal(ErrorCode.VERSION_NOT_NEW, f"version {version}: must be greater than {self.highest_seen}")
        slot = self._free_slot(in_use)
        self.staging_version, self._staging_slot = version, slot
        return slot

    def finish_stage(self, adapter: StagedAdapter) -> None:
        """Records that the reserved slot now holds ``adapter``."""
        assert self._staging_slot is not None and adapter.version == self.staging_version
        self._held[self._staging_slot] = adapter
        self.highest_seen = adapter.version
        self.staging_version = self._staging_slot = None

    def fail_stage(self, overwritten: bool) -> None:
        """Gives the reserved slot back; it is empty if its old content was already ``overwritten``."""
        assert self._staging_slot is not None
        if overwritten:
            self._held[self._staging_slot] = None
        self.staging_version = self._staging_slot = None

    def activate(self, version: int) -> None:
        """Makes a staged version the one that new requests get; it changes nothing when it already is.

        Raises:
            Refusal: the version is not staged, or is older than the active one.
        """
        if version == self.active_version:
            return
        if version < self.active_version:
            raise Refusal(
                ErrorCode.VERSION_OLDER,
                f"version {version} is older than the active {self.active_version}; use rollback",
            )
        self._require_held(version)
        self._rollback_version, self.active_version = self.active_version, version

    def rollback(self, version: int | None) -> int:
        """Goes back to an older version, by default the one that was active before, and returns it.

        Raises:
            Refusal: no slot holds that version any more, it is newer, or there is nothing to go back to.
        """
        target = self._rollback_version if version is None else version
        if target is None:
            raise Refusal(
                ErrorCode.NOTHING_TO_ROLL_BACK,
                f"name a version; available: {self.versions}",
                {"versions": self.versions},
            )
        if target > self.active_version:
            raise Refusal(
                ErrorCode.VERSION_NEWER,
                f"version {target} is newer than the active {self.active_version}; use activate",
            )
        self._require_held(target)
        if target != self.active_version:
            self.active_version, self._rollback_version = target, None
        return target

    def discard(self, in_use: Mapping[int, int]) -> list[int]:
        """Empties every inactive slot, and returns the versions dropped.

        Raises:
            Refusal: staging is in progress, or requests use an inactive version.
        """
        if self.staging_version is not None:
            raise Refusal(ErrorCode.STAGING_IN_PROGRESS, f"version {self.staging_version} is being staged; retry later")
        inactive = {slot: adapter.version for slot, adapter in self._inactive().items() if adapter}
        busy = {version: in_use[version] for version in inactive.values() if in_use.get(version)}
        if busy:
            raise Refusal(ErrorCode.SLOT_IN_USE, f"requests are running on {sorted(busy)}", {"requests": busy})
        for slot in inactive:
            self._held[slot] = None
        return sorted(inactive.values())

    def describe(self) -> list[EmptySlot | FilledSlot]:
        """Returns one entry per slot for the status route."""
        return [self._describe_slot(slot) for slot in SLOTS]

    def _describe_slot(self, slot: int) -> EmptySlot | FilledSlot:
        adapter, is_staging = self._held[slot], slot == self._staging_slot
        if adapter is None:
            return EmptySlot(slot=slot, state="staging" if is_staging else "empty")
        state = "active" if adapter.version == self.active_version else "staged"
        return FilledSlot(slot=slot, state="staging" if is_staging else state, **adapter.model_dump())

    def _inactive(self) -> dict[int, StagedAdapter | None]:
        return {
            slot: adapter
            for slot, adapter in self._held.items()
            if adapter is None or adapter.version != self.active_version
        }

    def _free_slot(self, in_use: Mapping[int, int]) -> int:
        inactive = self._inactive()
        candidates = sorted(inactive, key=lambda slot: inactive[slot].version if inactive[slot] else BASE_VERSION)
        busy = {}
        for slot in candidates:
            adapter = inactive[slot]
            if adapter is None or not in_use.get(adapter.version):
                return slot
            busy[adapter.version] = in_use[adapter.version]
        raise Refusal(
            ErrorCode.SLOT_IN_USE, f"running requests still use version {sorted(busy)}; retry later", {"requests": busy}
        )

    def _require_held(self, version: int) -> None:
        if self.slot_of(version) is None:
            raise Refusal(
                ErrorCode.VERSION_NOT_STAGED,
                f"version {version} is not staged; available: {self.versions}",
                {"versions": self.versions},
            )
