"""This module defines what the routes of the slots answer; it can be imported without torch."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from orbit_kernels.contract.options import AdapterType

Version = Annotated[int, Field(ge=0, description="0 is the base.")]
Requests = Annotated[dict[int, int], Field(description="Requests running and waiting, by version.")]
PauseMs = Annotated[float, Field(description="Time that the scheduler's loop was held.")]


class Error(BaseModel):
    """An error says why a request was refused; ``code`` is for programs."""

    code: str
    message: str
    detail: Any


class Refused(BaseModel):
    """This answer is a refusal; nothing was changed."""

    error: Error


class Unauthorized(BaseModel):
    """This is SGLang's own answer to a missing or wrong key."""

    error: Literal["Unauthorized"]


class Slot(BaseModel):
    """This is one of the slots."""

    slot: int
    state: Literal["empty", "staging", "staged", "active"]


class StagedAdapter(BaseModel):
    """This is what a slot holds; ``modules`` counts adapted linears by leaf name."""

    version: Version
    adapter_type: AdapterType
    digest: str
    num_bytes: int
    modules: dict[str, int]


class Staged(StagedAdapter):
    """A version is in its slot."""

    stage_s: float


class EmptySlot(Slot):
    """This slot holds no version."""

    state: Literal["empty", "staging"]
    version: None = None


class FilledSlot(StagedAdapter, Slot):
    """This slot holds a version, or is ``staging`` the next one over it."""

    state: Literal["staging", "staged", "active"]


class Status(BaseModel):
    """The status has slots, versions, requests and counters."""

    active_version: Version
    versions: Annotated[list[int], Field(description="Versions that a request may ask for.")]
    highest_seen: Annotated[int, Field(description="The next version to stage must be greater.")]
    slots: list[EmptySlot | FilledSlot]
    staging: Annotated[int | None, Field(description="Version that is being staged.")]
    adapter: Annotated[
        dict[str, str | int], Field(description="Type, size and fused mode that the slots are made for.")
    ]
    requests: Requests
    counters: dict[str, int]
    last_activate_pause_ms: PauseMs | None
    busy_s: Annotated[float, Field(description="Time with at least one request.")]

    def holder_of(self, version: int) -> FilledSlot | None:
        """Returns the slot with a version that a request may use; the base is in none."""
        filled = (slot for slot in self.slots if isinstance(slot, FilledSlot) and slot.state != "staging")
        return next((slot for slot in filled if slot.version == version), None)


class Activated(BaseModel):
    """This names the version that new requests get from now on."""

    active_version: Version
    pause_ms: PauseMs
    busy_s: float
    requests: Requests


class Discarded(BaseModel):
    """These versions were dropped."""

    discarded: list[int]


class Base(BaseModel):
    """The base has the format of every linear, and dtype, shape and SHA-256 of every stored tensor, by name."""

    formats: dict[str, dict[str, Any]]
    tensors: dict[str, dict[str, Any]]
