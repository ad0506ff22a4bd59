"""This is the control inside SGLang's scheduler process.

It holds the version of every request, and the operations on the slots. Everything here runs on the scheduler's own
thread, between two batches, so no lock is needed.
"""

import collections
import dataclasses
import json
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from pydantic import BaseModel
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.utils import TypeBasedDispatcher

from orbit_kernels.contract.answers import Activated, Base, Discarded, Staged, Status
from orbit_kernels.contract.errors import ErrorCode, Refusal
from orbit_kernels.contract.keys import REQUESTED_VERSION_KEY, InflightMode
from orbit_kernels.contract.versions import BASE_VERSION
from orbit_sglang.control import gate, messages
from orbit_sglang.control.metrics import SlotMetrics
from orbit_sglang.control.refusals import VersionNotHeld
from orbit_sglang.control.slots import BASE_SLOT
from orbit_sglang.model.ranks import ServerRanks
from orbit_sglang.model.resident import ResidentBase
from orbit_sglang.model.slots import SlotBank
from orbit_sglang.scheduler.staging import StageJob, StageOutcome, base_changed
from orbit_sglang.scheduler.versions import SlotVersions
from orbit_sglang.startup.options import SlotsConfig
from orbit_sglang.upstream import hooks

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class RequestVersion:
    """A ``RequestVersion`` is the version that a request generates with, kept on SGLang's ``Req`` as ``orbit``.

    ``chosen`` is true when the request named it: it then never moves to another one.
    """

    version: int
    slot: int
    chosen: bool
    base_key: str | None

    @property
    def extra_key(self) -> str:
        """Returns the namespace of the prefix cache, in which no entry of another version can match."""
        return f"orbit:{self.version}|{self.base_key or ''}"


class SlotScheduler:
    """A ``SlotScheduler`` has the slots of one scheduler.

    The ranks of a server have one each, and all take the same steps.
    """

    def __init__(
        self, scheduler: Scheduler, bank: SlotBank, base: ResidentBase, config: SlotsConfig, ranks: ServerRanks
    ):
        self._scheduler = scheduler
        self._base_in_memory = base
        self._bank = bank
        self._config = config
        self._ranks = ranks
        self._versions = SlotVersions()
        self._job: StageJob | None = None
        self._switching: list[Req] = []
        self._counters: collections.Counter[str] = collections.Counter()
        self._metrics = SlotMetrics(exported=ranks.is_first)
        self._last_pause_ms: float | None = None
        self._busy_s = 0.0
        self._busy_since: float | None = None

    def handlers(self) -> TypeBasedDispatcher:
        """Returns the handlers by message type, for the scheduler's dispatcher."""
        return TypeBasedDispatcher(
            [
                (messages.StatusRequest, self._guarded(self._status)),
                (messages.BaseManifestRequest, self._guarded(self._base)),
                (messages.StageRequest, self._guarded(self._stage)),
                (messages.ActivateRequest, self._guarded(self._activate)),
                (messages.RollbackRequest, self._guarded(self._rollback)),
                (messages.DiscardRequest, self._guarded(self._discard)),
            ]
        )

    def admit(self, req: Req) -> None:
        """Gives a request that enters the waiting queue its version and its namespace of the prefix cache.

        A request that comes back (retracted) keeps its version. Its KV cache is gone and will be recomputed with that
        version alone, so it may enter the prefix cache again.
        """
        if not hasattr(req, "orbit"):
            req.orbit = self._choose(req)
            req.customized_info = {messages.INFO_KEY: []}
        req.skip_radix_cache_insert = False
        req.extra_key = req.orbit.extra_key

    def poll(self) -> None:
        """Finishes what was waiting for another thread or for a prefill; it is called once per scheduler iteration."""
        self._count_busy_time()
        if self._switching:
            self._switch_prefilled()
        if self._job is not None and self._ranks.all(self._job.done):
            self._finish_stage(self._job)
        if self._metrics.is_due():
            self._metrics.refresh(self._versions.active_version, self._in_use())

    def _count_busy_time(self) -> None:
        now = time.perf_counter()
        if self._busy_since is not None:
            self._busy_s += now - self._busy_since
        busy = self._scheduler.waiting_queue or self._started_requests()
        self._busy_since = now if busy else None

    @property
    def is_staging(self) -> bool:
        """Returns whether a staging waits for ``poll`` to notice its end."""
        return self._job is not None

    def _choose(self, req: Req) -> RequestVersion:
        custom_params = req.sampling_params.custom_params
        requested = custom_params.get(REQUESTED_VERSION_KEY) if isinstance(custom_params, dict) else None
        version = self._versions.active_version if requested is None else requested
        is_int = isinstance(version, int) and not isinstance(version, bool)
        slot = self._versions.slot_of(version) if is_int else None
        if slot is None:
            refusal = VersionNotHeld(version, self._versions.versions)
            req.set_finish_with_abort(refusal.message)
            req.to_finish = refusal
            version, slot = BASE_VERSION, BASE_SLOT
        return RequestVersion(version, slot, chosen=requested is not None, base_key=req.extra_key)

    def _guarded(self, handler: Callable[[Any], BaseModel | None]) -> Callable[[Any], messages.ControlReply | None]:
        def handle(request: messages.ControlRequest) -> messages.ControlReply | None:
            try:
                answer = handler(request)
            except Refusal as refusal:
                self._counters[f"rejected_{refusal.code}"] += 1
                return self._refuse(request, refusal)
            return None if answer is None else self._reply(request, answer)

        return handle

    def _reply(self, request: messages.ControlRequest, answer: BaseModel) -> messages.ControlReply:
        body = answer.model_dump(mode="json")
        return messages.ControlReply(ticket=request.ticket, versions=self._versions.versions, body=body)

    def _refuse(self, request: messages.ControlRequest, refusal: Refusal) -> messages.ControlReply:
        return messages.ControlReply(ticket=request.ticket, versions=self._versions.versions, refusal=refusal)

    def _status(self, request: messages.StatusRequest) -> Status:
        return Status(
            active_version=self._versions.active_version,
            versions=self._versions.versions,
            highest_seen=self._versions.highest_seen,
            slots=self._versions.describe(),
            staging=self._versions.staging_version,
            adapter={
                "type": self._config.type,
                self._config.method.size_field: self._config.size,
                "fused": self._config.fused,
            },
            requests=self._in_use(),
            counters=self._counters,
            last_activate_pause_ms=self._last_pause_ms,
            busy_s=self._busy_s,
        )

    def _base(self, request: messages.BaseManifestRequest) -> Base:
        changed = [name for of_rank in self._ranks.gather(self._base_in_memory.changed()) for name in of_rank]
        if changed:
            raise Refusal(ErrorCode.BASE_CHANGED, base_changed(changed), changed)
        # Not validated: it has an entry for each of a checkpoint's tensors, and the scheduler's loop waits.
        return Base.model_construct(**self._scheduler.tp_worker.model_runner.model.orbit_base)

    def _stage(self, request: messages.StageRequest) -> None:
        try:
            slot = self._versions.begin_stage(request.version, self._in_use())
        except Refusal as refusal:
            self._metrics.count_rejection(refusal.code)
            raise
        self._job = StageJob(request, self._bank, self._base_in_memory, slot)
        self._job.start()

    def _finish_stage(self, job: StageJob) -> None:
        self._job = None
        outcome = StageOutcome.of_ranks(self._ranks.gather(job.outcome))
        if outcome.staged is not None:
            self._versions.finish_stage(outcome.staged)
            self._counters["staged"] += 1
            self._metrics.observe_stage(outcome.seconds)
            staged = outcome.staged
            self._log("staged", version=staged.version, digest=staged.digest, bytes=staged.num_bytes, s=outcome.seconds)
            reply = self._reply(job.request, Staged(**staged.model_dump(), stage_s=outcome.seconds))
        else:
            self._versions.fail_stage(outcome.overwritten)
            failure, code = outcome.failure, outcome.failure.code
            self._counters[f"rejected_{code}" if code is ErrorCode.ADAPTER_REFUSED else code.value] += 1
            self._metrics.count_rejection(code)
            self._log("stage refused", version=job.request.version, code=code, message=failure.message)
            reply = self._refuse(job.request, Refusal(code, failure.message, failure.problems))
        self._scheduler.send_to_tokenizer.send_output(reply, job.request)

    def _activate(self, request: messages.ActivateRequest) -> Activated:
        start = time.perf_counter()
        self._versions.activate(request.version)
        self._counters["activated"] += 1
        return self._move_requests("activated", request.inflight, start)

    def _rollback(self, request: messages.RollbackRequest) -> Activated:
        start = time.perf_counter()
        self._versions.rollback(request.version)
        self._counters["rolled_back"] += 1
        self._metrics.count_rollback()
        return self._move_requests("rolled back", request.inflight, start)

    def _discard(self, request: messages.DiscardRequest) -> Discarded:
        return Discarded(discarded=self._versions.discard(self._in_use()))

    def _move_requests(self, event: str, inflight: InflightMode, start: float) -> Activated:
        """Gives requests that have not started the active version.

        Started ones take it too when they are to switch.
        """
        started = self._started_requests()
        for req in self._scheduler.waiting_queue:
            if inflight == "switch" or not req.output_ids:
                self._move(req)
                req.extra_key = req.orbit.extra_key
        if inflight == "switch":
            for req in started:
                if req is self._scheduler.chunked_req:
                    self._switching.append(req)
                else:
                    self._switch(req)
        in_use = self._in_use()
        pause_s = time.perf_counter() - start
        self._last_pause_ms = pause_s * 1e3
        self._metrics.observe_pause(pause_s)
        version = self._versions.active_version
        self._log(event, version=version, inflight=inflight, pause_ms=self._last_pause_ms, requests=in_use)
        return Activated(active_version=version, pause_ms=self._last_pause_ms, busy_s=self._busy_s, requests=in_use)

    def _log(self, event: str, **fields: Any) -> None:
        """Logs one line per event, its fields as JSON."""
        if self._ranks.is_first:
            logger.info("orbit: %s %s", event, json.dumps(fields))

    def _move(self, req: Req) -> bool:
        version = self._versions.active_version
        if req.orbit.chosen or req.orbit.version == version:
            return False
        req.orbit.version, req.orbit.slot = version, self._versions.slot_of(version)
        return True

    def _switch(self, req: Req) -> None:
        """Moves a request whose KV cache holds another version: its cache must not be shared with anyone."""
        if self._move(req):
            req.skip_radix_cache_insert = True

    def _switch_prefilled(self) -> None:
        """Switches requests whose chunked prefill has ended: SGLang carries a chunk to the next through the tree."""
        prefilling = self._scheduler.chunked_req
        for req in [req for req in self._switching if req is not prefilling]:
            self._switching.remove(req)
            if req in self._scheduler.waiting_queue:
                self._move(req)
                req.extra_key = req.orbit.extra_key
            elif not req.finished():
                self._switch(req)

    def _started_requests(self) -> list[Req]:
        """Returns the unfinished requests that hold KV cache."""
        scheduler = self._scheduler
        batches = (scheduler.running_batch, scheduler.last_batch, scheduler.cur_batch)
        reqs = {id(req): req for batch in batches if batch is not None for req in batch.reqs}
        if scheduler.chunked_req is not None:
            reqs[id(scheduler.chunked_req)] = scheduler.chunked_req
        waiting = {id(req) for req in scheduler.waiting_queue}
        return [req for key, req in reqs.items() if key not in waiting and not req.finished()]

    def _in_use(self) -> dict[int, int]:
        """Counts requests, running and waiting, by version, in the versions' order."""
        reqs: Iterable[Req] = [*self._started_requests(), *self._scheduler.waiting_queue]
        return dict(sorted(collections.Counter(req.orbit.version for req in reqs).items()))


def install(result: None, scheduler: Scheduler) -> None:
    """Attaches the slots to a scheduler that serves with them; runs after ``Scheduler.init_request_dispatcher``."""
    if not scheduler.server_args.enable_orbit_slots:
        return
    hooks.require_applied()
    runner = scheduler.tp_worker.model_runner
    config, ranks = SlotsConfig.from_server_args(scheduler.server_args), ServerRanks(scheduler.tp_group)
    scheduler.orbit = SlotScheduler(scheduler, runner.orbit_slots, runner.orbit_resident, config, ranks)
    scheduler._request_dispatcher += scheduler.orbit.handlers()


def before_queue(scheduler: Scheduler, req: Req, *args: Any, **kwargs: Any) -> None:
    """Admits a request; runs before ``Scheduler._add_request_to_queue``."""
    if scheduler.server_args.enable_orbit_slots:
        scheduler.orbit.admit(req)


def before_input(scheduler: Scheduler, recv_reqs: list) -> None:
    """Drops messages that would change the base; runs before ``Scheduler.process_input_requests``."""
    if not scheduler.server_args.enable_orbit_slots:
        return
    refused = [message for message in recv_reqs if gate.reason_to_refuse(message) is not None]
    for message in refused:
        recv_reqs.remove(message)
        answer = gate.refuse(message)
        if answer is not None and scheduler.recv_from_rpc is not None:
            scheduler.recv_from_rpc.send_pyobj(answer)


def after_input(result: None, scheduler: Scheduler, recv_reqs: list) -> None:
    """Polls the slots; runs after ``Scheduler.process_input_requests``."""
    if scheduler.server_args.enable_orbit_slots:
        scheduler.orbit.poll()


def around_sleep(original: Callable, scheduler: Scheduler) -> None:
    """Keeps an idle scheduler awake until a staging has ended; runs around ``Scheduler.maybe_sleep_on_idle``."""
    if not (scheduler.server_args.enable_orbit_slots and scheduler.orbit.is_staging):
        original(scheduler)


def after_init_info(result: dict[str, Any], scheduler: Scheduler) -> dict[str, Any]:
    """Tells the main process that the slots are in place; runs after ``Scheduler.get_init_info``."""
    if not scheduler.server_args.enable_orbit_slots:
        return result
    return {**result, messages.INIT_INFO_KEY: True}
