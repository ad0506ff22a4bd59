"""verl's checkpoint engine ``orbit`` sends a step's adapter to every server's inactive slot and then activates it.

Nothing is aborted, resubmitted or paused: servers keep generating while a version is staged.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineManager, CheckpointEngineRegistry
from verl.utils.ray_utils import auto_await
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout

from orbit_kernels.contract.answers import Activated, FilledSlot, StagedAdapter
from orbit_kernels.contract.payload import Adapter
from orbit_kernels.contract.versions import version_of
from orbit_verl.config.keys import SlotSettings
from orbit_verl.publishing.publisher import Publisher, SlotError

BACKEND = "orbit"


@CheckpointEngineRegistry.register(BACKEND)
class OrbitCheckpointEngine(CheckpointEngine):
    """An `OrbitCheckpointEngine` sends adapters from the trainer's first rank; others only take part in gathering them.

    Args:
        bucket_size: verl's bucket in bytes; unused, an adapter is one payload.
        is_master: whether this rank sends.
    """

    def __init__(self, bucket_size: int, is_master: bool = False):
        self.is_master = is_master
        self._publishers: list[Publisher] = []
        self._slots = SlotSettings()
        self._busy: dict[str, tuple[float, float]] = {}

    def connect(self, servers: list[str], slots: SlotSettings) -> None:
        """Sets the servers (``host:port``) of the next versions."""
        self._slots = slots
        self._publishers = [Publisher(server, slots.timeout_s, slots.attempts) for server in servers]

    async def send_weights(self, weights: Adapter, global_steps: int | None = None) -> dict[str, float]:
        """Stages the adapter on every server, then activates it on every server.

        Returns:
            The ``orbit/sync/*`` and ``orbit/version/served`` metrics; empty on other ranks than the first.

        Raises:
            SlotError: a server refused the version or did not answer. While one has not staged it none activates it;
                one that cannot activate it stays a version behind the others, and the message says which. Sending this
                version again, or the next one, brings all to the same.
        """
        if not self.is_master:
            return {}
        version, started = version_of(global_steps), time.perf_counter()
        payload, digest = weights.encode(), weights.digest()
        encoded = time.perf_counter()
        await self._on_every_server(version, lambda server: server.stage(version, payload, digest))
        staged = time.perf_counter()
        answers = await self._on_every_server(version, lambda server: server.activate(version, self._slots.inflight))
        return {
            "orbit/sync/bytes": len(payload),
            "orbit/sync/export_s": encoded - started,
            "orbit/sync/stage_s": staged - encoded,
            "orbit/version/served": min((answer.active_version for answer in answers), default=version),
            **_activation_metrics(answers),
            **self._utilization(answers),
        }

    async def _on_every_server[T: StagedAdapter | Activated](
        self, version: int, call: Callable[[Publisher], Awaitable[T]]
    ) -> list[T]:
        """Returns all servers' answers.

        All have ended, well or not, before a failure is raised: nothing is left running.
        """
        outcomes = await asyncio.gather(*map(call, self._publishers), return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if not failures:
            return outcomes
        if other := next((failure for failure in failures if not isinstance(failure, SlotError)), None):
            raise other
        active = [
            server.address
            for server, outcome in zip(self._publishers, outcomes, strict=True)
            if _says_active(outcome, version)
        ]
        where = f"only on {', '.join(active)}, until the next sync" if active else "on no server"
        raise SlotError(f"version {version} is active {where}: {'; '.join(map(str, failures))}")

    def _utilization(self, answers: list[Activated]) -> dict[str, float]:
        """Returns the share of the time since the last activation in which servers had requests.

        One metric is the average, the other the idlest server's.
        """
        now, shares = time.perf_counter(), []
        for server, answer in zip(self._publishers, answers, strict=True):
            if server.address in self._busy:
                last_busy_s, last = self._busy[server.address]
                shares.append(min(1.0, (answer.busy_s - last_busy_s) / (now - last)))
            self._busy[server.address] = (answer.busy_s, now)
        if not shares:
            return {}
        return {
            "orbit/rollout_utilization": sum(shares) / len(shares),
            "orbit/rollout_utilization_min": min(shares),
        }

    def prepare(self) -> dict[str, Any]:
        """Does nothing, since there is nothing to allocate."""
        return {}

    @classmethod
    def build_topology(cls, actor_wg_world_size, rollout_world_size, metadata):
        """Builds no process group: the servers are reached over HTTP."""
        return {}, {}

    def init_process_group(self, **kwargs):
        """Does nothing, since there is no process group."""

    def finalize(self):
        """Does nothing, since there is nothing to free."""

    async def receive_weights(self, global_steps=None):
        """Refuses, since rollout workers receive nothing; the servers do."""
        raise NotImplementedError("adapters reach the servers over HTTP, not through rollout workers")


class OrbitCheckpointManager(CheckpointEngineManager):
    """An `OrbitCheckpointManager` moves versions from the trainer's workers to the replicas, without pausing them.

    Args:
        upstream: the manager that verl built; its workers and replicas are taken over.
        slots: how versions are handed over.
    """

    def __init__(self, upstream: CheckpointEngineManager, slots: SlotSettings):
        self.config = upstream.config
        self.backend = BACKEND
        self.backend_cls = OrbitCheckpointEngine
        self.actor_wg = upstream.actor_wg
        self.replicas = upstream.replicas
        self._slots = slots

    @auto_await
    async def update_weights(self, global_steps: int | None = None) -> dict[str, float]:
        """Publishes the adapter after ``global_steps`` steps and returns the sync's metrics.

        verl also calls this without steps, to wake replicas that slept while another model had the memory.
        """
        await self.resume_kv_cache_replicas()
        if global_steps is None:
            return {}
        num_workers = self.actor_wg.world_size
        servers = [replica.server_address for replica in self.replicas]
        ray.get(
            self.actor_wg.execute_checkpoint_engine(
                method=["connect"] * num_workers, servers=[servers] * num_workers, slots=[self._slots] * num_workers
            )
        )
        results = ray.get(self.actor_wg.update_weights(global_steps=global_steps, mode=BACKEND))
        await asyncio.gather(
            *(replica.server_handle.set_global_steps.remote(global_steps) for replica in self.replicas)
        )
        return {key: value for result in results for key, value in (result or {}).items()}


class FrozenBaseRollout(BaseRollout):
    """A `FrozenBaseRollout` replaces verl's per-worker rollout adapter, which moves weights and memory.

    A frozen base needs neither.
    """

    def __init__(self, config, model_config, device_mesh, replica_rank: int = -1):
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = replica_rank
        self.is_leader_rank = True

    async def resume(self, tags):
        """Does nothing, since the base stays resident."""

    async def release(self):
        """Does nothing, since the base stays resident."""

    async def update_weights(self, weights, **kwargs):
        """Refuses, since it is never called: ``OrbitCheckpointManager`` talks to the servers."""
        raise NotImplementedError("the base is frozen; adapters travel through the checkpoint engine 'orbit'")


# verl names the class by a dotted path and imports it in each worker; the stock one would import SGLang in the trainer.
_ROLLOUT_REGISTRY["sglang", "async"] = f"{__name__}.{FrozenBaseRollout.__name__}"


def _says_active(outcome: object, version: int) -> bool:
    """Says whether a server's answer, to a stage or an activation, says that the version is active."""
    if isinstance(outcome, Activated):
        return outcome.active_version == version
    return isinstance(outcome, FilledSlot) and outcome.state == "active"


def _activation_metrics(answers: list[Activated]) -> dict[str, float]:
    return {
        "orbit/sync/activate_pause_ms": max((answer.pause_ms for answer in answers), default=0.0),
        "orbit/sync/requests_in_flight": sum(sum(answer.requests.values()) for answer in answers),
    }
