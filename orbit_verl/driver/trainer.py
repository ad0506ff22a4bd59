"""These V1 trainers of verl have one model for policy and reference, and publish versions instead of weights."""

import itertools
import logging
import math
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import ray
import transfer_queue as tq
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
from orbit_kernels.upstream.ledger import NotInPlaceError
from orbit_verl.driver.base_check import check_bases, served_manifest
from orbit_verl.driver.parity_gate import ParityGate
from orbit_verl.driver.rewards import RewardCheck
from orbit_verl.driver.run_config import is_orbit, read_orbit_config
from orbit_verl.driver.samples import VALIDATION_PARTITION, group_of, sampled_versions
from orbit_verl.driver.server_watch import ServerWatch
from orbit_verl.driver.step_folders import ACTOR, ADAPTER, StepFolders, write_data
from orbit_verl.publishing.checkpoint_engine import OrbitCheckpointManager
from orbit_verl.upstream.imports import Process, require_applied
from orbit_verl.upstream.methods import SAMPLE, SYNC_METADATA, WAIT_FOR_NEXT_POLL
from orbit_verl.worker.actor import OrbitActorWorker

logger = logging.getLogger(__name__)

MAX_BATCHES_WITHOUT_UPDATE = 16


class OrbitTrainer(PPOTrainer):
    """An `OrbitTrainer` holds what both trainer modes share; it is mixed in before verl's trainer of a mode."""

    # verl decides by LoRA's rank whether the reference is the actor without its adapter (v1/trainer_base.py::PPOTrainer._setup).
    ref_in_actor = property(lambda self: True, lambda self, value: None)

    def __init__(self, config: DictConfig):
        require_applied(Process.DRIVER)
        RolloutReplicaRegistry.register("sglang", load_replica)
        self.orbit = read_orbit_config(config)
        self._submission_order: dict[str, int] = {}
        self._submissions = itertools.count()
        self._prompts_since_update = 0
        self._validated_versions: set[int] = set()
        self._num_skipped_steps = 0
        self._steps = StepFolders(Path(os.path.abspath(config.trainer.default_local_dir)))
        self._servers = ServerWatch(self._server_addresses, self.orbit.slots.timeout_s, lambda: self.global_steps)
        super().__init__(config)
        self.replay_buffer.poll_interval = self.orbit.poll_interval_s

    @property
    def trained_version(self) -> int:
        """Returns the version whose log-probs this step computes, which the step before published."""
        steps_before = self.global_steps - 1
        return version_of(steps_before)

    def _init_resource_pool_mgr(self):
        super()._init_resource_pool_mgr()
        role = Role.Actor if Role.Actor in self.role_worker_mapping else Role.ActorRollout
        for other in (Role.ActorRolloutRef, Role.RefPolicy):
            self.role_worker_mapping.pop(other, None)
            self.mapping.pop(other, None)
        self.role_worker_mapping[role] = ray.remote(OrbitActorWorker)
        self.mapping[role] = "global_pool"

    def _init_dataloader(self):
        """Builds verl's data loaders; the steps that were asked for are made, in as many epochs as they need.

        Raises:
            ValueError: the data set has no whole batch.
        """
        super()._init_dataloader()
        rows, batch = len(self.train_dataset), self.config.data.train_batch_size
        if rows < batch:
            raise ValueError(
                f"data.train_files has {rows} rows (after data.filter_overlong_prompts), data.train_batch_size={batch}: an "
                f"epoch has no whole batch; add rows, or set train_batch_size to at most {rows}"
            )
        epochs = math.ceil(self.total_training_steps / self.steps_per_epoch)
        if epochs > self.config.trainer.total_epochs:
            # verl would end after its epochs, without the last step's validation and checkpoint (v1/trainer_base.py::PPOTrainer.fit).
            logger.info("orbit: trainer.total_epochs=%d, for trainer.total_training_steps", epochs)
            self.config.trainer.total_epochs = epochs

    def _setup(self):
        super()._setup()
        self.checkpoint_manager = OrbitCheckpointManager(self.checkpoint_manager, self.orbit.slots)
        servers = self._server_addresses()
        served = {server: served_manifest(server, self.orbit.slots.timeout_s) for server in servers}
        self._cuts = served[servers[0]].cuts
        self._bases = self.actor_rollout_wg.base_manifest(self._cuts)
        check_bases(self._bases, served)
        temperature = self.config.actor_rollout_ref.rollout.temperature
        self._parity = ParityGate(self.actor_rollout_wg, self.orbit.parity, temperature)

    def fit(self, agent_loop_manager):
        """Trains; then proves that the base did not change, and leaves the trained adapter in peft's format.

        Raises:
            RuntimeError: a frozen tensor is not what it was at the start, or a server does not answer.
        """
        _keep_earlier_metrics()
        try:
            super().fit(agent_loop_manager)
        except ray.exceptions.RayError:
            self._servers.check()  # Ray names an actor that died, not the server that it was
            raise
        self._check_base_is_unchanged()
        logger.info("orbit: base unchanged (%s)", self._bases[0].digest)
        if not self.config.trainer.val_only:
            folder = self._steps.root / ADAPTER
            self.actor_rollout_wg.save_adapter(str(folder))
            logger.info("orbit: adapter in %s", folder)

    def _save_checkpoint(self):
        """Saves a step; removes older ones once it is committed.

        Raises:
            RuntimeError: a part could not be written. What was committed before is left.
        """
        step, folder = self.global_steps, self._steps.folder(self.global_steps)
        try:
            with self._steps.saved(step) as partial:
                self.actor_rollout_wg.save_checkpoint(str(partial / ACTOR), None, step)
                write_data(partial, self.train_dataloader.state_dict())
                if self.trainer_mode != "sync":
                    tq.save_checkpoint(str(partial / "transfer_queue"), metadata={"global_steps": step})
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise RuntimeError(
                f"step {step} could not be saved to {folder} ({error}); see to it, and resume with trainer.resume_mode=auto"
            ) from error
        if keep := self._steps_to_keep():
            self._steps.remove_old(keep)
        self.checkpoint_callback.on_save(trainer=self, global_step=step, checkpoint_dir=str(folder), async_save=False)

    def _steps_to_keep(self) -> int | None:
        trainer = self.config.trainer
        keep = 1 if trainer.get("remove_previous_ckpt_in_save") else trainer.max_actor_ckpt_to_keep
        return keep if keep and keep > 0 else None

    def _check_base_is_unchanged(self) -> None:
        holders = ("the trainer at the start", "the trainer now")
        for rank, (before, now) in enumerate(
            zip(self._bases, self.actor_rollout_wg.base_manifest(self._cuts), strict=True)
        ):
            difference = first_difference(before, now, holders)
            if difference is not None:
                raise RuntimeError(f"the frozen base changed during the run, on rank {rank}: {difference}")

    def _build_replay_buffer(self):
        """Builds verl's buffer.

        It looks after the servers while it waits for samples, fails groups by their rewards, and notes validated versions.
        """
        buffer = super()._build_replay_buffer()
        rewards = RewardCheck(buffer, lambda: self.global_steps)

        def wait_for_next_poll(*args, **kwargs):
            self._servers.check_now_and_then()
            return wait(*args, **kwargs)

        def sync_metadata():
            sync()
            # A colocated reward model gives its rewards after the batch is sampled.
            if self.reward_loop_manager.reward_loop_worker_handles is not None:
                rewards.check_ended()

        def sample(*args, **kwargs):
            batch, metrics = take(*args, **kwargs)
            if batch.partition_id == VALIDATION_PARTITION:
                self._validated_versions |= sampled_versions(batch)
            else:
                metrics["orbit/rewards/failed_groups"] = rewards.take_count()
            return batch, metrics

        wait = WAIT_FOR_NEXT_POLL.replace_on(buffer, wait_for_next_poll)
        sync = SYNC_METADATA.replace_on(buffer, sync_metadata)
        take = SAMPLE.replace_on(buffer, sample)
        return buffer

    def _validate(self) -> dict[str, float]:
        self._validated_versions = set()
        metrics = super()._validate()
        if self._validated_versions:
            metrics["orbit/version/validated"] = min(self._validated_versions)
            metrics["orbit/version/validated_newest"] = max(self._validated_versions)
        return metrics

    def _submit_batch_to_rollout(self, batch) -> int:
        self._servers.check()
        self._refuse_endless_refills(len(batch["uid"]))
        for uid in batch["uid"]:
            self._submission_order[uid] = next(self._submissions)
        return super()._submit_batch_to_rollout(batch)

    def _balance_batch(self, batch: KVBatchMeta, metrics, *args, **kwargs) -> KVBatchMeta:
        """Puts rows in the order of submission, not of completion: batch sums can then be repeated bit for bit."""
        batch.reorder(sorted(range(len(batch.keys)), key=lambda row: self._row_order(batch.keys[row])))
        for key in batch.keys:
            self._submission_order.pop(group_of(key), None)
        return super()._balance_batch(batch, metrics, *args, **kwargs)

    def _row_order(self, key: str) -> tuple[int, int, int]:
        uid, session, index = key.rsplit("_", 2)
        return self._submission_order.get(uid, -1), int(session), int(index)

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        self._prompts_since_update = 0
        batch = super()._compute_old_log_prob(batch, metrics)
        metrics.update(self._parity.measure(batch, self.trained_version, audit=self.local_trigger_step == 0))
        self._parity.check(metrics, f"step {self.global_steps}, version {self.trained_version}")
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """Does verl's update, and ends a run whose steps are skipped.

        Raises:
            RuntimeError: more steps in a row were skipped than ``orbit.max_skipped_steps``.
        """
        batch = super()._update_actor(batch, metrics)
        skipped, in_a_row = self.actor_rollout_wg.skipped_steps()[0]
        metrics["orbit/update/skipped_steps"] = skipped - self._num_skipped_steps
        self._num_skipped_steps = skipped
        if in_a_row > self.orbit.max_skipped_steps:
            raise RuntimeError(
                f"step {self.global_steps}: {in_a_row} optimiser steps in a row were skipped because the gradient is not "
                f"finite, more than orbit.max_skipped_steps={self.orbit.max_skipped_steps}; the adapter is that of the last step "
                "that was not. Look for rewards so large that their advantages overflow, log-probs that are not finite "
                "(orbit/parity/*, actor/entropy, actor/kl_loss), and a learning rate that let the policy run away"
            )
        return batch

    def _consume_sync_metrics(self) -> dict:
        metrics = super()._consume_sync_metrics()
        served = metrics.get("orbit/version/served")
        if served is not None:
            metrics["orbit/version/trainer"] = version_of(self.global_steps)
            metrics["orbit/version/lag"] = version_of(self.global_steps) - served
        metrics["orbit/trainer_wait_s"] = self.timing_raw.get("gen", 0.0)
        return metrics

    def _refuse_endless_refills(self, num_prompts: int) -> None:
        """Ends a run in which a fault fails every group, since verl replaces every group that fails."""
        self._prompts_since_update += num_prompts
        limit = MAX_BATCHES_WITHOUT_UPDATE * self.config.data.train_batch_size
        if self._prompts_since_update > limit:
            raise RuntimeError(
                f"step {self.global_steps}: {self._prompts_since_update} prompts were submitted and not one batch of "
                "samples came of them; the first error of an agent loop, reward or server in the log says why"
            )

    def _server_addresses(self) -> list[str]:
        return [address for manager in self._rollout_server_managers() for address in manager.get_addresses()]


class OrbitTrainerSync(OrbitTrainer, PPOTrainerSync):
    """An `OrbitTrainerSync` is for ``trainer.v1.trainer_mode=sync``: it generates, trains, publishes."""

    def on_step_end(self):
        """Publishes the step's version and keeps the sync's metrics (verl's own drops them)."""
        self._pending_sync_metrics = dict(self.checkpoint_manager.update_weights(self.global_steps))


class OrbitTrainerSeparateAsync(OrbitTrainer, PPOTrainerSeparateAsync):
    """An `OrbitTrainerSeparateAsync` is for ``trainer.v1.trainer_mode=separate_async``.

    Servers generate while it trains.
    """

    def _setup(self):
        # verl logs with print's flush= when there are no hybrid replicas, a TypeError
        # (trainer_separate_async.py::PPOTrainerSeparateAsync._setup).
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
        """Returns the plain client: no request is ever aborted for a new version, so none has to be resumed."""
        return self.standalone_server_manager.get_client()


def register_sync(module: ModuleType) -> None:
    """Lets mode ``sync`` build Orbit's trainer for runs with the strategy, once ``verl.trainer.ppo.v1`` is imported."""
    _choose_trainer(module.trainer_base.TRAINER_REGISTRY, "sync", PPOTrainerSync, OrbitTrainerSync)


def register_separate_async(module: ModuleType) -> None:
    """Lets mode ``separate_async`` build Orbit's trainer likewise, once ``verl.trainer.ppo.v1`` is imported."""
    registry = module.trainer_base.TRAINER_REGISTRY
    _choose_trainer(registry, "separate_async", PPOTrainerSeparateAsync, OrbitTrainerSeparateAsync)


def _choose_trainer(registry: dict[str, Any], mode: str, upstream: type[PPOTrainer], ours: type[OrbitTrainer]) -> None:
    if registry.get(mode) is not upstream:
        raise NotInPlaceError(
            f"verl's trainer mode {mode!r} is {registry.get(mode)}, expected {upstream}; install the pinned verl (make setup)"
        )

    def build(config: DictConfig) -> PPOTrainer:
        return (ours if is_orbit(config) else upstream)(config=config)

    registry[mode] = build


def _keep_earlier_metrics() -> None:
    """Moves verl's metrics file away, which a resumed run would empty (verl/utils/tracking.py::FileLogger)."""
    path = Path(os.environ.get("VERL_FILE_LOGGER_PATH", ""))
    if path.is_file():
        number = next(n for n in itertools.count(1) if not path.with_suffix(f".{n}{path.suffix}").exists())
        kept = path.rename(path.with_suffix(f".{number}{path.suffix}"))
        logger.warning("orbit: the metrics of the run before are kept in %s", kept)


def load_replica():
    """Loads the replica class ``sglang`` for verl; that imports SGLang."""
    from orbit_verl.rollout.replica import OrbitReplica

    return OrbitReplica
