"""verl's V1 trainers for ``trainer.strategy=orbit``: one model for policy and reference, versions instead of weights."""

import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import ray
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import RolloutReplicaRegistry

from orbit_kernels.checkpoint.manifest import first_difference
from orbit_kernels.contract.versions import version_of
from orbit_verl.driver.base_check import check_bases, served_manifest
from orbit_verl.driver.parity import ParityError, parity_metrics, violations
from orbit_verl.driver.run_config import is_orbit, read_orbit_config
from orbit_verl.driver.samples import UNKNOWN_VERSION, VALIDATION_PARTITION, SampledTokens, sampled_versions
from orbit_verl.publishing.checkpoint_engine import OrbitCheckpointManager
from orbit_verl.worker.actor import OrbitActorWorker

logger = logging.getLogger(__name__)

MAX_BATCHES_WITHOUT_UPDATE = 16
SERVER_CHECK_INTERVAL_S = 5.0


class OrbitTrainer(PPOTrainer):
    """What both trainer modes share. Mixed in before verl's trainer of a mode."""

    # verl decides by LoRA's rank whether the reference is the actor without its adapter (trainer_base.py:233).
    ref_in_actor = property(lambda self: True, lambda self, value: None)

    def __init__(self, config: DictConfig):
        RolloutReplicaRegistry.register("sglang", _load_replica)
        self.orbit = read_orbit_config(config)
        self._submission_order: dict[str, int] = {}
        self._submissions = itertools.count()
        self._prompts_since_update = 0
        self._next_server_check = 0.0
        self._validated_versions: set[int] = set()
        super().__init__(config)
        self.replay_buffer.poll_interval = self.orbit.poll_interval_s

    @property
    def trained_version(self) -> int:
        """The version whose log-probs this step computes: the one published by the step before."""
        return version_of(self.global_steps - 1)

    def _init_resource_pool_mgr(self):
        super()._init_resource_pool_mgr()
        role = Role.Actor if Role.Actor in self.role_worker_mapping else Role.ActorRollout
        for other in (Role.ActorRolloutRef, Role.RefPolicy):
            self.role_worker_mapping.pop(other, None)
            self.mapping.pop(other, None)
        self.role_worker_mapping[role] = ray.remote(OrbitActorWorker)
        self.mapping[role] = "global_pool"

    def _setup(self):
        super()._setup()
        self.checkpoint_manager = OrbitCheckpointManager(self.checkpoint_manager, self.orbit.slots)
        servers = [address for manager in self._rollout_server_managers() for address in manager.get_addresses()]
        served = {server: served_manifest(server, self.orbit.slots.timeout_s) for server in servers}
        self._cuts = served[servers[0]].cuts
        self._bases = self.actor_rollout_wg.base_manifest(self._cuts)
        check_bases(self._bases, served)

    def fit(self, agent_loop_manager):
        """Train; then prove that the base did not change, and leave the adapter in peft's format.

        Raises:
            RuntimeError: a frozen tensor is not what it was at the start, or a server does not answer.
        """
        _keep_earlier_metrics()
        try:
            super().fit(agent_loop_manager)
        except ray.exceptions.RayError:
            self._check_servers()  # Ray names an actor that died, not the server that it was
            raise
        self._check_base_is_unchanged()
        folder = os.path.join(self.config.trainer.default_local_dir, "adapter")
        self.actor_rollout_wg.save_adapter(folder)
        logger.info("orbit: base unchanged (%s); adapter in %s", self._bases[0].digest, folder)

    def _check_base_is_unchanged(self) -> None:
        holders = ("the trainer at the start", "the trainer now")
        for rank, (before, now) in enumerate(
            zip(self._bases, self.actor_rollout_wg.base_manifest(self._cuts), strict=True)
        ):
            difference = first_difference(before, now, holders)
            if difference is not None:
                raise RuntimeError(f"the frozen base changed during the run, on rank {rank}: {difference}")

    def _build_replay_buffer(self):
        """verl's, which looks after the servers while it waits for samples, and notes which versions were validated."""
        buffer = super()._build_replay_buffer()
        buffer._wait_for_next_poll = self._while_watching_servers(buffer._wait_for_next_poll)
        buffer.sample = self._noting_validated_versions(buffer.sample)
        return buffer

    def _while_watching_servers(self, wait_for_next_poll: Callable) -> Callable:
        def wait(*args, **kwargs):
            if time.monotonic() >= self._next_server_check:
                self._check_servers()
                self._next_server_check = time.monotonic() + SERVER_CHECK_INTERVAL_S
            return wait_for_next_poll(*args, **kwargs)

        return wait

    def _noting_validated_versions(self, sample: Callable) -> Callable:
        def sample_and_note(*args, **kwargs):
            batch, metrics = sample(*args, **kwargs)
            if batch.partition_id == VALIDATION_PARTITION:
                self._validated_versions |= sampled_versions(batch)
            return batch, metrics

        return sample_and_note

    def _validate(self) -> dict[str, float]:
        self._validated_versions = set()
        metrics = super()._validate()
        if self._validated_versions:
            metrics["orbit/version/validated"] = min(self._validated_versions)
            metrics["orbit/version/validated_newest"] = max(self._validated_versions)
        return metrics

    def _submit_batch_to_rollout(self, batch) -> int:
        self._check_servers()
        self._refuse_endless_refills(len(batch["uid"]))
        for uid in batch["uid"]:
            self._submission_order[uid] = next(self._submissions)
        return super()._submit_batch_to_rollout(batch)

    def _balance_batch(self, batch: KVBatchMeta, metrics, *args, **kwargs) -> KVBatchMeta:
        """Rows in the order of submission, not of completion: sums over the batch can then be repeated bit for bit."""
        batch.reorder(sorted(range(len(batch.keys)), key=lambda row: self._row_order(batch.keys[row])))
        for key in batch.keys:
            self._submission_order.pop(key.rsplit("_", 2)[0], None)
        return super()._balance_batch(batch, metrics, *args, **kwargs)

    def _row_order(self, key: str) -> tuple[int, int, int]:
        uid, session, index = key.rsplit("_", 2)
        return self._submission_order.get(uid, -1), int(session), int(index)

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        self._prompts_since_update = 0
        batch = super()._compute_old_log_prob(batch, metrics)
        metrics.update(self._measure_parity(batch))
        self._gate(metrics)
        return batch

    def _measure_parity(self, batch: KVBatchMeta) -> dict[str, float]:
        tokens = SampledTokens.read(batch)
        current_T = tokens.versions_T == self.trained_version
        age_T = (self.trained_version - tokens.versions_T[tokens.versions_T != UNKNOWN_VERSION]).double()
        staleness = {}
        if age_T.numel():
            staleness = {"orbit/staleness/mean": age_T.mean().item(), "orbit/staleness/max": age_T.max().item()}
        return {
            **parity_metrics(tokens.sampled_T[current_T], tokens.trained_T[current_T]),
            **parity_metrics(tokens.sampled_T[~current_T], tokens.trained_T[~current_T], "stale_"),
            **(self._audit(batch, tokens) if self.local_trigger_step == 0 else {}),
            **staleness,
        }

    def _audit(self, batch: KVBatchMeta, tokens: SampledTokens) -> dict[str, float]:
        """Parity of stale sequences at the version that sampled them, recomputed from the adapter kept for it."""
        held = self.actor_rollout_wg.published_versions()[0] if self.orbit.parity.audit_samples else []
        stale = [
            (row, version)
            for row, version in tokens.version_of_row.items()
            if version in held and version != self.trained_version
        ]
        if not stale:
            return {}
        version = Counter(version for _, version in stale).most_common(1)[0][0]
        rows = [row for row, row_version in stale if row_version == version][: self.orbit.parity.audit_samples]
        num_ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        rows = rows[: len(rows) // num_ranks * num_ranks]
        if not rows:
            return {}
        audited = KVBatchMeta(
            partition_id=batch.partition_id,
            keys=[batch.keys[row] for row in rows],
            tags=[batch.tags[row] for row in rows],
            extra_info={
                "calculate_entropy": False,
                "compute_loss": False,
                "temperature": self.config.actor_rollout_ref.rollout.temperature,
                "micro_batch_size_per_gpu": len(rows) // num_ranks,
            },
        )
        self.actor_rollout_wg.use_published(version)
        try:
            self.actor_rollout_wg.compute_log_prob(audited)
        finally:
            self.actor_rollout_wg.use_current()
        recomputed = SampledTokens.read(audited, trained_field="log_probs")
        return parity_metrics(recomputed.sampled_T, recomputed.trained_T, "audit_")

    def _gate(self, metrics: dict[str, float]) -> None:
        found = violations(metrics, self.orbit.parity)
        if not found:
            return
        message = f"step {self.global_steps}, version {self.trained_version}: {'; '.join(found)}"
        if self.orbit.parity.on_violation == "stop":
            raise ParityError(
                f"{message}. Trainer and server compute different policies; nothing was trained on this mini-batch"
            )
        logger.warning("orbit: parity: %s", message)

    def _consume_sync_metrics(self) -> dict:
        metrics = super()._consume_sync_metrics()
        served = metrics.get("orbit/version/served")
        if served is not None:
            metrics["orbit/version/trainer"] = version_of(self.global_steps)
            metrics["orbit/version/lag"] = version_of(self.global_steps) - served
        metrics["orbit/trainer_wait_s"] = self.timing_raw.get("gen", 0.0)
        return metrics

    def _refuse_endless_refills(self, num_prompts: int) -> None:
        """verl replaces every group that fails: a fault that fails all of them must end the run."""
        self._prompts_since_update += num_prompts
        limit = MAX_BATCHES_WITHOUT_UPDATE * self.config.data.train_batch_size
        if self._prompts_since_update > limit:
            raise RuntimeError(
                f"step {self.global_steps}: {self._prompts_since_update} prompts were submitted and not one batch of "
                "samples came of them; the first error of an agent loop, reward or server in the log says why"
            )

    def _check_servers(self) -> None:
        for manager in self._rollout_server_managers():
            for address in manager.get_addresses():
                try:
                    httpx.get(f"http://{address}/orbit/status", timeout=self.orbit.slots.timeout_s, trust_env=False)
                except httpx.TransportError as error:
                    raise RuntimeError(
                        f"step {self.global_steps}: the SGLang server at {address} does not answer "
                        f"({type(error).__name__}); see its log above, then resume with trainer.resume_mode=auto"
                    ) from error


class OrbitTrainerSync(OrbitTrainer, PPOTrainerSync):
    """``trainer.v1.trainer_mode=sync``: generate, train, publish."""

    def on_step_end(self):
        """Publish the step's version, keeping the sync's metrics (verl's own drops them)."""
        self._pending_sync_metrics = dict(self.checkpoint_manager.update_weights(self.global_steps))


class OrbitTrainerSeparateAsync(OrbitTrainer, PPOTrainerSeparateAsync):
    """``trainer.v1.trainer_mode=separate_async``: servers generate while the trainer trains."""

    def _setup(self):
        # verl logs with print's flush= when there are no hybrid replicas (trainer_separate_async.py:180): a TypeError.
        upstream_logger = logging.getLogger(PPOTrainerSeparateAsync.__module__)
        level = upstream_logger.level
        upstream_logger.setLevel(logging.WARNING)
        try:
            super()._setup()
        finally:
            upstream_logger.setLevel(level)
        self.standalone_checkpoint_manager = OrbitCheckpointManager(
            self.standalone_checkpoint_manager, self.orbit.slots
        )

    def get_llm_client(self) -> LLMServerClient:
        """The plain client: no request is ever aborted for a new version, so none has to be resumed."""
        return self.standalone_server_manager.get_client()


_TRAINERS = {PPOTrainerSync: OrbitTrainerSync, PPOTrainerSeparateAsync: OrbitTrainerSeparateAsync}


def install(registry: dict) -> None:
    """Make verl's trainer registry build Orbit's trainer for a run with the strategy, verl's own otherwise."""
    for mode, upstream in list(registry.items()):
        if upstream in _TRAINERS:
            registry[mode] = _choose_trainer(upstream)


def _choose_trainer(upstream: type[PPOTrainer]):
    def build(config: DictConfig) -> PPOTrainer:
        return (_TRAINERS[upstream] if is_orbit(config) else upstream)(config=config)

    return build


def _keep_earlier_metrics() -> None:
    """verl's file logger empties its file when a run is resumed (verl 0.9.1, utils/tracking.py:541): move it away."""
    path = Path(os.environ.get("VERL_FILE_LOGGER_PATH", ""))
    if path.is_file():
        number = next(n for n in itertools.count(1) if not path.with_suffix(f".{n}{path.suffix}").exists())
        kept = path.rename(path.with_suffix(f".{number}{path.suffix}"))
        logger.warning("orbit: the metrics of the run before are kept in %s", kept)


def _load_replica():
    from orbit_verl.rollout.replica import OrbitReplica

    return OrbitReplica
