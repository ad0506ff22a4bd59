"""These messages are what the HTTP process and the scheduler process say to each other, over SGLang's own sockets.

An adapter's bytes do not travel here: the scheduler reads them from a file that the HTTP process has spooled.
"""

import dataclasses
from typing import Any

from sglang.srt.managers.io_struct import BaseReq

from orbit_kernels.contract.errors import Refusal
from orbit_kernels.contract.keys import DEFAULT_INFLIGHT, InflightMode

INFO_KEY = "orbit_version"
"""This key of SGLang's ``customized_info`` carries one version per request and step."""

INIT_INFO_KEY = "orbit_slots"
"""This key of the scheduler's start-up information proves by its presence that the slots are in place."""


@dataclasses.dataclass(kw_only=True)
class ControlRequest(BaseReq):
    """A ``ControlRequest`` asks for a control operation; ``ticket`` comes back with its reply."""

    ticket: int = -1


@dataclasses.dataclass(kw_only=True)
class StatusRequest(ControlRequest):
    """A ``StatusRequest`` carries ``GET /orbit/status``."""


@dataclasses.dataclass(kw_only=True)
class BaseManifestRequest(ControlRequest):
    """A ``BaseManifestRequest`` carries ``GET /orbit/base``."""


@dataclasses.dataclass(kw_only=True)
class StageRequest(ControlRequest):
    """A ``StageRequest`` carries ``POST /orbit/stage``; ``path`` is the spooled payload, readable until the reply."""

    version: int
    path: str


@dataclasses.dataclass(kw_only=True)
class ActivateRequest(ControlRequest):
    """An ``ActivateRequest`` carries ``POST /orbit/activate``."""

    version: int
    inflight: InflightMode = DEFAULT_INFLIGHT


@dataclasses.dataclass(kw_only=True)
class RollbackRequest(ControlRequest):
    """A ``RollbackRequest`` carries ``POST /orbit/rollback``."""

    version: int | None = None
    inflight: InflightMode = DEFAULT_INFLIGHT


@dataclasses.dataclass(kw_only=True)
class DiscardRequest(ControlRequest):
    """A ``DiscardRequest`` carries ``POST /orbit/discard``."""


@dataclasses.dataclass(kw_only=True)
class ControlReply(BaseReq):
    """A ``ControlReply`` carries the JSON body of the answer, or the refusal.

    ``versions`` are those that the slots hold from then on, and the base.
    """

    ticket: int
    versions: list[int]
    body: dict[str, Any] = dataclasses.field(default_factory=dict)
    refusal: Refusal | None = None
