"""The HTTP process's side of the control: sends operations to the scheduler, and keeps the payloads it has taken."""

import asyncio
import itertools
import logging
import os
import tempfile
from collections.abc import AsyncIterator
from typing import IO, Any

from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.utils import TypeBasedDispatcher

from orbit_kernels.contract.errors import error_body
from orbit_sglang.control import messages
from orbit_sglang.control.metrics import SlotMetrics
from orbit_sglang.startup.options import SlotsConfig

logger = logging.getLogger(__name__)


class Refusal(Exception):
    """An answer other than 200, as an HTTP status and the body of ``wire.error_body``."""

    def __init__(self, status: int, code: str, message: str, detail: Any = None):
        self.status = status
        self.body = error_body(code, message, detail)
        super().__init__(message)


class Spool:
    """Payloads in unnamed temporary files: they are gone when the process is, however it ends."""

    def __init__(self):
        self._kept: dict[int, IO[bytes]] = {}

    @staticmethod
    def path(file: IO[bytes]) -> str:
        """A path by which another process of this user opens the file, while this process keeps it open."""
        return f"/proc/{os.getpid()}/fd/{file.fileno()}"

    async def receive(self, chunks: AsyncIterator[bytes], max_bytes: int, timeout_s: float) -> IO[bytes]:
        """Write a request's body to a new file.

        Raises:
            Refusal: 413 beyond ``max_bytes``, 408 when the body has not ended after ``timeout_s``.
        """
        file = tempfile.TemporaryFile(prefix="orbit-")
        try:
            async with asyncio.timeout(timeout_s):
                async for chunk in chunks:
                    file.write(chunk)
                    if file.tell() > max_bytes:
                        raise Refusal(
                            413,
                            "adapter_too_large",
                            f"the body is larger than {max_bytes} bytes; raise --orbit-max-adapter-bytes",
                        )
        except TimeoutError:
            raise Refusal(408, "body_timeout", f"the body did not end within {timeout_s} s; send it again") from None
        file.flush()
        return file

    def keep(self, version: int, file: IO[bytes]) -> None:
        """Keep a received payload as that of a version."""
        self._kept[version] = file

    def find(self, version: int) -> IO[bytes] | None:
        """The payload of a version, if it is kept."""
        return self._kept.get(version)

    def prune(self, versions: list[int]) -> None:
        """Drop the payloads of all other versions."""
        self._kept = {version: file for version, file in self._kept.items() if version in versions}


class Frontend:
    """Control operations for the routes; one per tokenizer manager."""

    def __init__(self, tokenizer_manager: TokenizerManager, config: SlotsConfig):
        self.config = config
        self._tokenizer_manager = tokenizer_manager
        self._spool = Spool()
        self._metrics = SlotMetrics()
        self._tickets = itertools.count()
        self._waiting: dict[int, asyncio.Future[messages.ControlReply]] = {}

    def handlers(self) -> TypeBasedDispatcher:
        """Handlers by message type, for the tokenizer manager's dispatcher."""
        return TypeBasedDispatcher([(messages.ControlReply, self._receive)])

    async def call(self, request: messages.ControlRequest) -> dict[str, Any]:
        """Have the scheduler carry out an operation, and return its body.

        Raises:
            Refusal: the scheduler refused, or did not answer in time (503).
        """
        return (await self._reply(request)).body

    async def _reply(self, request: messages.ControlRequest) -> messages.ControlReply:
        self._tokenizer_manager.auto_create_handle_loop()
        request.ticket = next(self._tickets)
        future = asyncio.get_running_loop().create_future()
        self._waiting[request.ticket] = future
        try:
            self._tokenizer_manager.send_to_scheduler.send_pyobj(request)
            reply = await asyncio.wait_for(future, self.config.stage_timeout_s)
        except TimeoutError:
            raise Refusal(
                503, "scheduler_timeout", f"the scheduler did not answer within {self.config.stage_timeout_s} s"
            ) from None
        finally:
            del self._waiting[request.ticket]
        if reply.status != 200:
            error = reply.body["error"]
            raise Refusal(reply.status, error["code"], error["message"], error["detail"])
        return reply

    async def stage(self, version: int, chunks: AsyncIterator[bytes]) -> dict[str, Any]:
        """Receive a payload and stage it. Nothing is reserved while the body arrives, so a stalled one blocks nobody."""
        try:
            file = await self._spool.receive(chunks, self.config.max_adapter_bytes, self.config.stage_timeout_s)
        except Refusal as refusal:
            self._metrics.count_rejection(refusal.body["error"]["code"])
            raise
        try:
            reply = await self._reply(messages.StageRequest(version=version, path=self._spool.path(file)))
        except Refusal as refusal:
            if refusal.status == 503:
                self._spool.keep(version, file)  # the scheduler may still come to read it
            raise
        self._spool.keep(version, file)
        self._spool.prune(reply.versions)
        return reply.body

    async def payload(self, version: int) -> str:
        """Path of a version's payload, as it was staged.

        Raises:
            Refusal: 404 when no slot holds the version.
        """
        versions = (await self.call(messages.StatusRequest()))["versions"]
        file = self._spool.find(version)
        if version not in versions or file is None:
            raise Refusal(404, "version_not_held", f"no slot holds version {version}", {"versions": versions})
        return self._spool.path(file)

    def _receive(self, reply: messages.ControlReply) -> None:
        future = self._waiting.get(reply.ticket)
        if future is None or future.done():
            logger.warning("A reply of the scheduler came too late: %s", reply.body)
            return
        future.set_result(reply)
