"""The trainer's Ray worker is verl's actor worker with an adapter to publish, snapshot and swap."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.device import get_device_name
from verl.utils.distributed import initialize_global_process_group_ray

import orbit_verl.worker.engine  # noqa: F401  registers the engine with verl
from orbit_kernels import folders
from orbit_kernels.checkpoint.manifest import BaseManifest, Cut
from orbit_kernels.contract.peft_folder import write_peft_folder
from orbit_kernels.contract.versions import version_of
from orbit_verl.upstream.imports import Process, require_applied
from orbit_verl.worker.memory import PeakMeter, resident_bytes


class OrbitActorWorker(DetachActorWorker):
    """An `OrbitActorWorker` holds the engine of ``trainer.strategy=orbit``.

    The reference policy is the same engine with the adapter off.
    """

    MAX_PUBLISHED = 8

    def __init__(self, *args, **kwargs):
        require_applied(Process.WORKER)
        if get_device_name() == "cpu":
            # verl asks torch for "cpu:gloo,cpu:gloo", which torch refuses
            # (verl/utils/distributed.py::initialize_global_process_group_ray).
            initialize_global_process_group_ray(backend="cpu:gloo")
        super().__init__(*args, **kwargs)
        # verl reads the mode only of the strategies that it knows (workers/engine_workers.py::ActorRolloutRefWorker.__init__).
        self._replay_mode = self.config.actor.megatron.router_replay.mode
        self.enable_routing_replay = self._replay_mode != "disabled"
        self._published: OrderedDict[int, dict[str, torch.Tensor]] = OrderedDict()
        self._current: dict[str, torch.Tensor] | None = None
        self._update_peak = PeakMeter()

    @property
    def copy_handler(self):
        """Returns verl's hook to save a policy (here the adapter) before others are evaluated."""
        return lambda module: self.actor.engine.snapshot_adapter()

    @property
    def restore_handler(self):
        """Returns verl's hook to bring a saved policy back."""
        return lambda module, snapshot: self.actor.engine.restore_adapter(snapshot)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def update_actor(self, data):
        """Does verl's update of the policy, and measures its memory peak."""
        with self._update_peak.measure():
            return super().update_actor(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def skipped_steps(self) -> tuple[int, int]:
        """Returns how many optimiser steps were skipped since the start, and how many of them are the last in a row."""
        optimizer = self.actor.engine.optimizer
        return optimizer.num_skipped_steps, optimizer.num_skipped_in_a_row

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto"):
        """Publishes the adapter as the version of ``global_steps``; returns metrics on the sending rank."""
        engine = self.actor.engine
        self._published[version_of(global_steps)] = engine.snapshot_adapter()
        while len(self._published) > self.MAX_PUBLISHED:
            self._published.popitem(last=False)
        # All ranks take part in these, the first one alone has something to send and to say.
        adapter, of_adapter = engine.export_adapter(everywhere=False), engine.adapter.metrics()
        metrics = await self.checkpoint_engine.send_weights(adapter, global_steps=global_steps)
        if not metrics:
            return {}
        replayed = engine.replay.metrics()
        return {**metrics, **resident_bytes(engine), **self._update_peak.metrics(), **of_adapter, **replayed}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None):
        """Saves verl's checkpoint, labelled with the version that these steps become when they are published."""
        self.actor.engine.adapter_version = version_of(global_step)
        super().save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def base_manifest(self, cuts: Mapping[str, Sequence[Cut]]) -> BaseManifest:
        """Returns formats and digests of all ranks' frozen tensors, some in parts, as ``OrbitEngine.base_manifest``."""
        return self.actor.engine.base_manifest(cuts)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_adapter(self, folder: str) -> None:
        """Writes the adapter as peft saves it, from the first rank, in place of an older one."""
        adapter = self.actor.engine.export_adapter(everywhere=False)
        if self.rank == 0:
            with folders.written(Path(folder)) as partial:
                write_peft_folder(adapter, partial, self.actor.engine.model_config.path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def published_versions(self) -> list[int]:
        """Returns the versions whose adapters are still held, oldest first."""
        return list(self._published)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def use_published(self, version: int) -> None:
        """Puts a published version in place of the trained one, to evaluate it until ``use_current``.

        What the server recorded (R3) is that version's; what the trainer recorded (R2) is the current one's, and is
        left.
        """
        self.enable_routing_replay = self._replay_mode == "R3"
        self._current = self.actor.engine.snapshot_adapter()
        self.actor.engine.restore_adapter(self._published[version])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def use_current(self) -> None:
        """Goes back to the adapter that is being trained."""
        self.enable_routing_replay = self._replay_mode != "disabled"
        self.actor.engine.restore_adapter(self._current)
        self._current = None
