"""This module decides which of SGLang's messages may reach the scheduler of a server with slots.

The routes are refused in front of the application (``http.stock_routes``). ``sgl.Engine``, verl's server actor and the
remote calls of ``Engine.collective_rpc`` have none, so the messages are held against a list of their own, where they are sent and
where they arrive. What is not listed is refused.
"""

import logging
from collections.abc import Callable
from typing import Any

import zmq
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.managers import io_struct

from orbit_kernels.contract.errors import ErrorCode, Refusal
from orbit_kernels.upstream.ledger import Method
from orbit_sglang.control.messages import ControlRequest

logger = logging.getLogger(__name__)

SEND = Method("zmq.Socket.send_pyobj", ("self", "obj"))

SERVED: tuple[type, ...] = (
    ControlRequest,
    io_struct.TokenizedGenerateReqInput,
    io_struct.TokenizedEmbeddingReqInput,
    io_struct.BatchTokenizedGenerateReqInput,
    io_struct.BatchTokenizedEmbeddingReqInput,
    io_struct.AbortReq,
    io_struct.FlushCacheReqInput,
    io_struct.OpenSessionReqInput,
    io_struct.CloseSessionReqInput,
    io_struct.PauseGenerationReqInput,
    io_struct.ContinueGenerationReqInput,
    io_struct.BlockReqInput,
    io_struct.SlowDownReqInput,
    io_struct.FreezeGCReq,
    io_struct.ProfileReq,
    io_struct.ExpertDistributionReq,
    io_struct.GetInternalStateReq,
    io_struct.SetInternalStateReq,
    io_struct.GetLoadsReqInput,
    io_struct.GetWeightsByNameReqInput,
)
_OF_MEMORY = (io_struct.ReleaseMemoryOccupationReqInput, io_struct.ResumeMemoryOccupationReqInput)


def reason_to_refuse(message: object) -> str | None:
    """Returns why a message is refused; None where it may be sent.

    The memory of the KV cache alone may be released, as verl does between two steps.
    """
    if isinstance(message, SERVED):
        return None
    if isinstance(message, _OF_MEMORY):
        return (
            None
            if message.tags == [GPU_MEMORY_TYPE_KV_CACHE]
            else "the frozen base keeps its memory; name kv_cache alone"
        )
    return "the base is frozen, and adapters come by POST /orbit/stage"


def guard(socket: zmq.Socket) -> None:
    """Lets a socket to the scheduler send nothing that is refused; it raises ``Refusal`` instead."""

    def send_pyobj(message: Any, *args: Any, **kwargs: Any) -> Any:
        reason = reason_to_refuse(message)
        if reason is not None:
            name = type(message).__name__
            raise Refusal(ErrorCode.ROUTE_REFUSED, f"{name} is refused with --enable-orbit-slots: {reason}")
        return send(message, *args, **kwargs)

    send: Callable = SEND.replace_on(socket, send_pyobj)


def refuse(message: object) -> io_struct.RpcReqOutput | None:
    """Logs a message that arrived and is refused, and returns the answer where its sender waits for one."""
    text = f"{type(message).__name__} is refused with --enable-orbit-slots: {reason_to_refuse(message)}"
    logger.error("orbit: %s", text)
    return io_struct.RpcReqOutput(False, text) if isinstance(message, io_struct.RpcReqInput) else None
