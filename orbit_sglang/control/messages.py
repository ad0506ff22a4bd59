"""What the HTTP process and the scheduler process say to each other, over SGLang's own sockets.

An adapter's bytes do not travel here: the scheduler reads them from a file that the HTTP process has spooled.
"""

import dataclasses
from typing import Any, Literal, get_args

from sglang.srt.managers.io_struct import BaseReq

INFO_KEY = "orbit_version"
"""Key of SGLang's ``customized_info`` that carries one version per request and step."""

INIT_INFO_KEY = "orbit_slots"
"""Key of the scheduler's start-up information; its presence proves that the slots are in place."""

InflightMode = Literal["finish", "switch"]
"""What a change of version does to running requests."""
INFLIGHT_MODES: tuple[str, ...] = get_args(InflightMode)


@dataclasses.dataclass(kw_only=True)
class ControlRequest(BaseReq):
    """A control operation; ``ticket`` comes back with its reply."""

    ticket: int = -1


@dataclasses.dataclass(kw_only=True)
class StatusRequest(ControlRequest):
    """``GET /orbit/status``."""


@dataclasses.dataclass(kw_only=True)
class BaseManifestRequest(ControlRequest):
    """``GET /orbit/base``."""


@dataclasses.dataclass(kw_only=True)
class StageRequest(ControlRequest):
    """``POST /orbit/stage``; ``path`` is the spooled payload, readable until the reply."""

    version: int
    path: str


@dataclasses.dataclass(kw_only=True)
class ActivateRequest(ControlRequest):
    """``POST /orbit/activate``."""

    version: int
    inflight: InflightMode = "finish"


@dataclasses.dataclass(kw_only=True)
class RollbackRequest(ControlRequest):
    """``POST /orbit/rollback``."""

    version: int | None = None
    inflight: InflightMode = "finish"


@dataclasses.dataclass(kw_only=True)
class DiscardRequest(ControlRequest):
    """``POST /orbit/discard``."""


@dataclasses.dataclass(kw_only=True)
class ControlReply(BaseReq):
    """HTTP status and JSON body of the answer; ``versions`` are those that the slots hold from then on, and the base."""

    ticket: int
    status: int
    body: dict[str, Any]
    versions: list[int]
