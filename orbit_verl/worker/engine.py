"""Orbit's engine is verl's Megatron engine with a frozen base and a trained adapter.

Everything that computes (schedule, packing, log-probs, entropy) is verl's; what is built, stepped, saved and exported
is the adapter's.
"""

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.workers.config import HFModelConfig, McoreOptimizerConfig
from verl.workers.engine.base import BaseEngine, EngineRegistry
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from orbit_kernels.checkpoint.manifest import BaseManifest, Cut
from orbit_kernels.contract.payload import Adapter
from orbit_kernels.contract.peft_folder import read_peft_folder
from orbit_kernels.families import read_architecture
from orbit_verl.cpu import megatron as megatron_cpu
from orbit_verl.model.attention import as_served
from orbit_verl.model.build import build_model, transformer_config
from orbit_verl.model.naming import adapted_linears
from orbit_verl.model.replay import RouterReplay, token_places
from orbit_verl.model.targets import adapted_shapes
from orbit_verl.worker import checkpoint
from orbit_verl.worker.adapter import TrainerAdapter
from orbit_verl.worker.base_manifest import base_manifest
from orbit_verl.worker.engine_config import OrbitEngineConfig
from orbit_verl.worker.optimizer import AdapterOptimizer, build_scheduler
from orbit_verl.worker.parallel import check_groups, layout_of_this_rank

logger = logging.getLogger(__name__)


@EngineRegistry.register(model_type="language_model", backend="orbit", device=["cpu", "cuda"])
class OrbitEngine(MegatronEngineWithLMHead):
    """An `OrbitEngine` trains an adapter over a frozen base model, with data, tensor, pipeline and expert parallelism.

    Ranks that divide the model between them gather in ``export_adapter``, ``get_per_tensor_param``, ``base_manifest``,
    ``base_digest`` and ``save_checkpoint``: all ranks call these, in the same order.

    Attributes:
        adapter_version: version that the servers know the adapter by; set by whoever publishes it, saved and restored
            with a checkpoint.

    Raises:
        ValueError: an option or checkpoint content that is not implemented, or a model or ranks that cannot be divided.
    """

    def __init__(
        self,
        model_config: HFModelConfig,
        engine_config: OrbitEngineConfig,
        optimizer_config: McoreOptimizerConfig,
        checkpoint_config: CheckpointConfig,
    ):
        checkpoint.check_contents(checkpoint_config)
        self._architecture = read_architecture(model_config.hf_config)
        engine_config.check(self._architecture, torch.distributed.get_world_size())
        megatron_cpu.install()
        super().__init__(_language_model(model_config), engine_config, optimizer_config, checkpoint_config)
        check_groups(engine_config.parallel_sizes)
        self._is_reference = False
        self.adapter_version = 0

    def initialize(self) -> None:
        """Builds model, adapter and, unless the engine only infers, optimiser and scheduler.

        Raises:
            ValueError: the model folder, its configuration or the adapter's settings are refused.
        """
        settings = self.engine_config.adapter
        self._build_tf_config()
        self._layout = layout_of_this_rank(self._architecture, self.tf_config)
        self.module = self._build_megatron_module()
        (model,) = self.module
        recomputes = self.tf_config.recompute_granularity is not None
        self.replay = RouterReplay(model.decoder.layers, self._architecture, recomputes=recomputes)
        shapes = adapted_shapes(self._architecture, settings)
        self.adapter = TrainerAdapter(list(adapted_linears(model, settings)), shapes, settings, self._layout)
        if settings.init_path is not None:
            self.adapter.load(read_peft_folder(settings.init_path))
        self._reference = self._reference_digest = None
        if settings.reference == "init":
            # Untied, as the adapter of a checkpoint is: a digest that is in checkpoints of earlier releases too.
            self._reference, self._reference_digest = self.adapter.snapshot(), self.adapter.export().untied().digest()
        self.optimizer = self.lr_scheduler = None
        if not self.engine_config.forward_only:
            self.optimizer = self._build_optimizer()
            self.lr_scheduler = self._build_lr_scheduler()
        self.to("cpu", model=self._is_offload_param, optimizer=self._is_offload_optimizer, grad=self._is_offload_param)

    def optimizer_zero_grad(self) -> None:
        """Drops the adapter's gradients."""
        self.optimizer.zero_grad()

    def optimizer_step(self) -> float:
        """Updates the adapter (see ``AdapterOptimizer.step``) and returns the gradient norm before clipping."""
        return self.optimizer.step()

    def forward_step(
        self, batch_iter: Iterator[TensorDict], model, logits_processor_func, postprocess_micro_batch_func
    ):
        """Does verl's forward step, with the batch's experts where they are replayed (``orbit_verl.model.replay``).

        On a CPU, attention rounds as it did in the server (``orbit_verl.model.attention``).
        """
        # Recorded experts are put beside the routers' own choice, on the model's device.
        batch = next(batch_iter).to(get_device_id())
        arguments = (iter([batch]), model, logits_processor_func, postprocess_micro_batch_func)
        with self._routing(batch), _attending(batch):
            return super().forward_step(*arguments)

    def forward_backward_batch(self, data: TensorDict, loss_function: Callable | None, forward_only: bool = False):
        """Does what verl's engine does, but the reference policy routes by itself."""
        if self._is_reference:
            tu.assign_non_tensor(data, enable_routing_replay=False)
        with self.replay.through_backward():
            return super().forward_backward_batch(data, loss_function, forward_only)

    def _routing(self, batch: TensorDict) -> contextlib.AbstractContextManager[None]:
        """Replays, records or does neither, as verl asks for with this micro-batch."""
        if not tu.get_non_tensor_data(batch, key="enable_routing_replay", default=False):
            return contextlib.nullcontext()
        input_ids = batch["input_ids"]
        places_T = token_places(
            input_ids,
            packed=self.engine_config.use_remove_padding,
            padded_length=tu.get_non_tensor_data(batch, key="forced_max_seqlen", default=None),
        )
        if tu.get_non_tensor_data(batch, key="record_r2_routes", default=False):
            tu.assign_non_tensor(batch, record_r2_routes=False)  # verl would look for Megatron-Core's own routers
            return self.replay.recording(input_ids, places_T, self.mini_layer_topk_idx_list)
        record = batch.get("routed_experts", None)
        if record is None:
            raise ValueError(
                f"router_replay.mode={self.engine_config.router_replay.mode}: the batch has no routed_experts; R3 needs a server "
                "that reports them, R2 an update that follows compute_log_prob"
            )
        return self.replay.replaying(record, input_ids, places_T)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Moves base and adapter, or the optimiser's masters, gradients and moments; nothing moves on a CPU."""
        BaseEngine.to(self, device=device, model=model, optimizer=optimizer, grad=grad)
        target = torch.device("cpu") if device == "cpu" else torch.device(get_device_id())
        if model:
            for chunk in self.module:
                chunk.to(target)
        if optimizer and self.optimizer is not None:
            self.optimizer.to(target)

    @contextlib.contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Makes the engine the reference policy in the body: the base, or the adapter that the run started from.

        It chooses its experts itself, whatever is replayed for the policy that is trained.
        """
        self._is_reference = True
        try:
            with self.adapter.disabled() if self._reference is None else self.adapter.replaced_by(self._reference):
                yield
        finally:
            self._is_reference = False

    def export_adapter(self, *, everywhere: bool = True) -> Adapter:
        """Returns a copy of the whole adapter.

        Args:
            everywhere: whether every rank gets it. Otherwise the first rank does, on the CPU, and others get no
                tensors.
        """
        if everywhere:
            return self.adapter.export()
        return Adapter(_on_first_rank(self.adapter.whole()), self.adapter.config, self.adapter.tied)

    def get_per_tensor_param(self, **_verl: Any) -> tuple[Iterator[tuple[str, torch.Tensor]], dict[str, Any]]:
        """Returns copies of the whole adapter as (peft name, tensor), made as they are taken, and peft's configuration.

        A copy that parts share comes under each part's name. All ranks take them to the end, before the next step: what
        has changed by then is refused, not handed out. The base never travels.
        """
        return self.adapter.whole_of_parts(), self.adapter.config.to_peft()

    def snapshot_adapter(self) -> dict[str, torch.Tensor]:
        """Clones this rank's trained tensors, for ``restore_adapter``; masters and moments are not part of it."""
        return self.adapter.snapshot()

    def restore_adapter(self, snapshot: Mapping[str, torch.Tensor]) -> None:
        """Puts the tensors of ``snapshot_adapter`` back; the optimiser keeps training from its own masters."""
        self.adapter.restore(snapshot)

    def base_manifest(self, cuts: Mapping[str, Sequence[Cut]] | None = None) -> BaseManifest:
        """Returns formats of the linears and digests of the live frozen tensors, as stored, of all ranks together.

        Args:
            cuts: names of tensors that are to be digested in parts, and the parts.
        """
        (model,) = self.module
        return base_manifest(model, self._architecture, cuts)

    def base_digest(self) -> str:
        """Returns the SHA-256 over the manifest of the live base."""
        return self.base_manifest().digest

    @functools.cached_property
    def _base_at_start(self) -> str:
        # A digest reads the whole base: once for all checkpoints, live when one is loaded and when the run ends.
        return self.base_digest()

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        *_: Any,
        **_verl: Any,
    ) -> None:
        """Saves what ``checkpoint.save_contents`` names; see ``orbit_verl.worker.checkpoint`` for the layout.

        The driver removes old steps, since it commits the new one.

        Raises:
            ValueError: an HDFS path is given.
        """
        _refuse_hdfs(hdfs_path)
        contents = set(self.checkpoint_config.save_contents)
        checkpoint.save(local_path, self._training_state(contents, global_step), self.model_config.path)

    def load_checkpoint(self, local_path: str, hdfs_path: str | None = None, *_: Any, **_verl: Any) -> None:
        """Restores what ``checkpoint.load_contents`` names.

        Without ``optimizer``, moments are fresh and the step is the restored one.

        Raises:
            ValueError: the checkpoint is of another base, adapter configuration or reference, or lacks a content.
        """
        _refuse_hdfs(hdfs_path)
        contents = set(self.checkpoint_config.load_contents)
        state = checkpoint.load(local_path)
        self._check_state(local_path, state, contents)
        self.adapter.load(state.adapter)
        self.adapter_version = state.version
        if self.optimizer is not None:
            self._restore_training(state, contents)
        torch.distributed.barrier()

    def _build_tf_config(self) -> None:
        self.is_value_model = False
        self.share_embeddings_and_output_weights = self._architecture.tied_embeddings
        self.bridge = self.provider = self.peft_cls = None
        self.vanilla_bridge = False
        overrides, sizes = self.engine_config.override_transformer_config, self.engine_config.parallel_sizes
        self.tf_config = transformer_config(self._architecture, overrides, sizes)
        self.param_dtype = self.dtype = self.tf_config.params_dtype

    def _build_megatron_module(self) -> list[torch.nn.Module]:
        device = torch.device(get_device_id())
        folder, base = self.model_config.local_path, self.engine_config.base
        return [build_model(self._architecture, base, self.tf_config, folder, device, self._layout)]

    def _build_optimizer(self) -> AdapterOptimizer:
        parameters, shapes = self.adapter.named_parameters(), self.adapter.whole_shapes()
        return AdapterOptimizer(parameters, self.optimizer_config, self._layout, shapes)

    def _build_lr_scheduler(self):
        return build_scheduler(self.optimizer, self.optimizer_config)

    def _training_state(self, contents: set[str], global_step: int) -> checkpoint.TrainingState:
        extra = "extra" in contents
        return checkpoint.TrainingState(
            adapter=self.export_adapter(everywhere=False),
            optimizer=_on_first_rank(self.optimizer.whole_state()) if "optimizer" in contents else None,
            scheduler=self.lr_scheduler.state_dict() if extra else None,
            rng=checkpoint.rng_state() if extra else {},
            num_ranks=torch.distributed.get_world_size(),
            base_digest=self._base_at_start,
            reference_digest=self._reference_digest,
            version=self.adapter_version,
            global_step=global_step,
        )

    def _restore_training(self, state: checkpoint.TrainingState, contents: set[str]) -> None:
        if "optimizer" in contents:
            self.optimizer.load_state_tensors(state.optimizer)
        else:
            self.optimizer.reset()
        if "extra" in contents:
            # It adds to the present step (optimizer_param_scheduler.py::OptimizerParamScheduler.load_state_dict).
            self.lr_scheduler.num_steps = 0
            self.lr_scheduler.load_state_dict(dict(state.scheduler))
            if state.rng:
                checkpoint.set_rng_state(state.rng)
            else:
                logger.warning(
                    "the checkpoint is of %d ranks, this run has %d: random-number states are left as they are",
                    state.num_ranks,
                    torch.distributed.get_world_size(),
                )

    def _check_state(self, path: str, state: checkpoint.TrainingState, contents: set[str]) -> None:
        ours = {"base_digest": self.base_digest(), "reference_digest": self._reference_digest}
        for name, value in ours.items():
            if getattr(state, name) != value:
                raise ValueError(
                    f"checkpoint {path}: {name} {getattr(state, name)} differs from this run's {value}; resume with the "
                    "model and orbit.adapter settings that the checkpoint was trained with"
                )
        other_ranks = state.num_ranks != torch.distributed.get_world_size()
        extra = state.scheduler is not None and (bool(state.rng) or other_ranks)
        held = {"optimizer": state.optimizer is not None, "extra": extra}
        missing = sorted(content for content, present in held.items() if content in contents and not present)
        if missing and self.optimizer is not None:
            raise ValueError(f"checkpoint {path} holds no {missing}: take them out of checkpoint.load_contents")
        self.adapter.check(state.adapter)
        if self.optimizer is not None and "optimizer" in contents:
            self.optimizer.check_state(state.optimizer)


def _attending(batch: TensorDict) -> contextlib.AbstractContextManager[None]:
    """Makes attention take the server's shapes on a CPU."""
    if get_device_name() != "cpu" or not batch["loss_mask"].is_nested:
        return contextlib.nullcontext()
    response_lengths = batch["loss_mask"].offsets().diff()
    return as_served((batch["input_ids"].offsets().diff() - response_lengths).tolist())


def _language_model(model_config: HFModelConfig) -> HFModelConfig:
    """Returns the configuration without what sees images: verl packs batches otherwise for one that has it."""
    text_only = copy.copy(model_config)
    object.__setattr__(text_only, "hf_config", model_config.hf_config.get_text_config())  # verl freezes the fields
    return text_only


def _on_first_rank(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Returns the tensors on the CPU; other ranks only take part in making them."""
    first = torch.distributed.get_rank() == 0
    return {name: tensor.cpu() for name, tensor in tensors if first}


def _refuse_hdfs(hdfs_path: str | None) -> None:
    if hdfs_path is not None:
        raise ValueError(f"hdfs_path={hdfs_path!r}: checkpoints go to a local or mounted folder; leave it null")
