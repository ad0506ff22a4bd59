"""This is the HTTP process's side of the control.

It sends operations to the scheduler, and keeps the payloads that it has taken.
"""

import asyncio
import itertools
import logging
import os
import tempfile
from collections.abc import AsyncIterator
from typing import IO, Any

from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.utils import TypeBasedDispatcher

from orbit_kernels.contract.errors import ErrorCode, Refusal
from orbit_sglang.control import messages
from orbit_sglang.control.metrics import SlotMetrics
from orbit_sglang.startup.options import SlotsConfig

logger = logging.getLogger(__name__)


class Spool:
    """A ``Spool`` keeps payloads in unnamed temporary files, which are gone when the process is, however it ends."""

    def __init__(self):
        self._kept: dict[int, IO[bytes]] = {}

    @staticmethod
    def path(file: IO[bytes]) -> str:
        """Returns a path by which another process of this user opens the file, while this process keeps it open."""
        return f"/proc/{os.getpid()}/fd/{file.fileno()}"

    async def receive(self, chunks: AsyncIterator[bytes], max_bytes: int, timeout_s: float) -> IO[bytes]:
        """Writes a request's body to a new file.

        Raises:
            Refusal: the body is longer than ``max_bytes``, has not ended after ``timeout_s``, or has no room on disk.
        """
        try:
            file = tempfile.TemporaryFile(prefix="orbit-")
            async with asyncio.timeout(timeout_s):
                async for chunk in chunks:
                    file.write(chunk)
                    if file.tell() > max_bytes:
                        raise Refusal(
                            ErrorCode.ADAPTER_TOO_LARGE,
                            f"the body is larger than {max_bytes} bytes; raise --orbit-max-adapter-bytes",
                        )
            file.flush()
        except TimeoutError:
            problem = f"the body did not end within {timeout_s} s; send it again"
            raise Refusal(ErrorCode.BODY_TIMEOUT, problem) from None
        except OSError as error:
            problem = (
                f"the body cannot be kept in {tempfile.gettempdir()}: {error.strerror}; free space there, or set TMPDIR"
            )
            raise Refusal(ErrorCode.STAGE_FAILED, problem) from None
        return file

    def keep(self, version: int, file: IO[bytes]) -> None:
        """Keeps a received payload as that of a version."""
        self._kept[version] = file

    def find(self, version: int) -> IO[bytes] | None:
        """Returns the payload of a version, if it is kept."""
        return self._kept.get(version)

    def prune(self, versions: list[int]) -> None:
        """Drops the payloads of all other versions."""
        self._kept = {version: file for version, file in self._kept.items() if version in versions}


class Frontend:
    """A ``Frontend`` carries out control operations for the routes; each tokenizer manager has one."""

    def __init__(self, tokenizer_manager: TokenizerManager, config: SlotsConfig):
        self.config = config
        self._tokenizer_manager = tokenizer_manager
        self._spool = Spool()
        self._metrics = SlotMetrics()
        self._tickets = itertools.count()
        self._waiting: dict[int, asyncio.Future[messages.ControlReply]] = {}

    def handlers(self) -> TypeBasedDispatcher:
        """Returns the handlers by message type, for the tokenizer manager's dispatcher."""
        return TypeBasedDispatcher([(messages.ControlReply, self._receive)])

    async def call(self, request: messages.ControlRequest) -> dict[str, Any]:
        """Has the scheduler carry out an operation, and returns its body.

        Raises:
            Refusal: the scheduler refused, or did not answer in time.
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
            problem = f"the scheduler did not answer within {self.config.stage_timeout_s} s"
            raise Refusal(ErrorCode.SCHEDULER_TIMEOUT, problem) from None
        finally:
            del self._waiting[request.ticket]
        if reply.refusal is not None:
            raise reply.refusal
        return reply

    async def stage(self, version: int, chunks: AsyncIterator[bytes]) -> dict[str, Any]:
        """Receives a payload and stages it.

        Nothing is reserved while the body arrives, so a stalled one blocks nobody.
        """
        try:
            file = await self._spool.receive(chunks, self.config.max_adapter_bytes, self.config.stage_timeout_s)
        except Refusal as refusal:
            self._metrics.count_rejection(refusal.code)
            raise
        try:
            reply = await self._reply(messages.StageRequest(version=version, path=self._spool.path(file)))
        except Refusal as refusal:
            if refusal.code is ErrorCode.SCHEDULER_TIMEOUT:
                self._spool.keep(version, file)  # the scheduler may still come to read it
            raise
        self._spool.keep(version, file)
        self._spool.prune(reply.versions)
        return reply.body

    async def payload(self, version: int) -> str:
        """Returns the path of a version's payload, as it was staged.

        Raises:
            Refusal: no slot holds the version.
        """
        versions = (await self.call(messages.StatusRequest()))["versions"]
        file = self._spool.find(version)
        if version not in versions or file is None:
            problem = f"no slot holds version {version}"
            raise Refusal(ErrorCode.VERSION_NOT_HELD, problem, {"versions": versions})
        return self._spool.path(file)

    def _receive(self, reply: messages.ControlReply) -> None:
        future = self._waiting.get(reply.ticket)
        if future is None or future.done():
            logger.warning("A reply of the scheduler came too late: %s", reply.refusal or reply.body)
            return
        future.set_result(reply)
