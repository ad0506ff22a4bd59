"""verl's actor and engine configuration for ``trainer.strategy=orbit`` is Megatron's with Orbit's settings."""

import dataclasses

from verl.workers.config import McoreActorConfig, McoreEngineConfig
from verl.workers.config.engine import EngineConfig

from orbit_kernels.families import DecoderArchitecture
from orbit_verl.config.keys import AdapterSettings, BaseSettings
from orbit_verl.model.build import transformer_config
from orbit_verl.model.layout import MEGATRON, ParallelSizes
from orbit_verl.model.replay import check_replay
from orbit_verl.model.sharding import check_stages, check_tensor_parallel
from orbit_verl.model.targets import check_targets

_NOT_IMPLEMENTED = {
    "context_parallel_size": "sequences are divided by tensor_model_parallel_size between attentions",
    "virtual_pipeline_model_parallel_size": "a stage has consecutive layers",
}
_OFF = ("use_fused_kernels", "use_dist_checkpointing", "use_megatron_fsdp", "dynamic_context_parallel")


@dataclasses.dataclass
class OrbitEngineConfig(McoreEngineConfig):
    """An `OrbitEngineConfig` is Megatron-Core's layout (``actor_rollout_ref.actor.megatron``) plus adapter and base.

    The parameters' precision is the checkpoint's own: ``dtype`` is not used, and fp32 bases are allowed. Tensor
    parallelism divides the sequence too, whatever ``sequence_parallel`` says.
    """

    _mutable_fields = McoreEngineConfig._mutable_fields | {"expert_tensor_parallel_size"}

    strategy: str = "orbit"
    adapter: AdapterSettings = dataclasses.field(default_factory=AdapterSettings)
    base: BaseSettings = dataclasses.field(default_factory=BaseSettings)

    def __post_init__(self):
        # workers/config/engine.py::McoreEngineConfig.__post_init__ asserts strategy == "megatron".
        EngineConfig.__post_init__(self)
        if self.strategy != "orbit":
            raise ValueError(f"actor_rollout_ref.actor.megatron.strategy={self.strategy!r}: leave it at 'orbit'")
        for key, instead in _NOT_IMPLEMENTED.items():
            value = getattr(self, key)
            if value not in (1, None):
                raise ValueError(f"{MEGATRON}.{key}={value}: not implemented; leave it out, {instead}")
        for key in _OFF:
            if getattr(self, key):
                raise ValueError(
                    f"{MEGATRON}.{key}={getattr(self, key)}: not implemented by Orbit's engine; set it to False"
                )
        if self.expert_tensor_parallel_size is None:
            self.expert_tensor_parallel_size = 1  # Megatron-Core would divide experts like the other linears
        self.sequence_parallel = self.tensor_model_parallel_size > 1

    @property
    def parallel_sizes(self) -> ParallelSizes:
        """Returns how many ways the model is divided."""
        return ParallelSizes(
            tensor=self.tensor_model_parallel_size,
            pipeline=self.pipeline_model_parallel_size,
            expert=self.expert_model_parallel_size,
            expert_tensor=self.expert_tensor_parallel_size,
            first_stage=self.override_transformer_config.get("num_layers_in_first_pipeline_stage"),
            last_stage=self.override_transformer_config.get("num_layers_in_last_pipeline_stage"),
        )

    def check(self, architecture: DecoderArchitecture, num_ranks: int) -> None:
        """Holds everything that depends on the model against it, and the layout against the trainer's ranks.

        Raises:
            ValueError: ``ParallelSizes.check``, ``check_targets``, ``check_stages``, ``check_tensor_parallel``,
                ``check_replay`` or ``transformer_config`` refuses.
        """
        adapter, sizes = self.adapter.to_adapter_config(), self.parallel_sizes
        sizes.check(architecture.num_layers, architecture.num_experts, num_ranks)
        check_targets(architecture, self.adapter)
        check_stages(architecture, sizes, adapter)
        check_tensor_parallel(architecture, sizes, adapter)
        check_replay(self.router_replay.mode, architecture)
        transformer_config(architecture, self.override_transformer_config, sizes)


@dataclasses.dataclass
class OrbitActorConfig(McoreActorConfig):
    """An `OrbitActorConfig` is ``actor_rollout_ref.actor`` under ``trainer.strategy=orbit``."""

    strategy: str = "orbit"
    megatron: OrbitEngineConfig = dataclasses.field(default_factory=OrbitEngineConfig)
