"""verl's actor and engine configuration for ``trainer.strategy=orbit``: Megatron's, with Orbit's settings."""

import dataclasses

from verl.workers.config import McoreActorConfig, McoreEngineConfig
from verl.workers.config.engine import EngineConfig

from orbit_verl.config import AdapterSettings, BaseSettings


@dataclasses.dataclass
class OrbitEngineConfig(McoreEngineConfig):
    """Megatron-Core's parallel layout (``actor_rollout_ref.actor.megatron``) plus adapter and base.

    The parameters' precision is the checkpoint's own: ``dtype`` is not used, and fp32 bases are allowed.
    """

    strategy: str = "orbit"
    adapter: AdapterSettings = dataclasses.field(default_factory=AdapterSettings)
    base: BaseSettings = dataclasses.field(default_factory=BaseSettings)

    def __post_init__(self):
        # McoreEngineConfig.__post_init__ asserts strategy == "megatron" (verl 0.9.1, workers/config/engine.py:217).
        EngineConfig.__post_init__(self)
        if self.strategy != "orbit":
            raise ValueError(f"actor_rollout_ref.actor.megatron.strategy={self.strategy!r}: leave it at 'orbit'")
        for key in ("tensor_model", "pipeline_model", "context", "expert_tensor"):
            size = getattr(self, f"{key}_parallel_size")
            if size not in (1, None):
                raise ValueError(
                    f"actor_rollout_ref.actor.megatron.{key}_parallel_size={size}: not implemented yet; use 1 and add "
                    "data-parallel ranks instead, over which expert_model_parallel_size divides a model's experts"
                )
        self.sequence_parallel = False


@dataclasses.dataclass
class OrbitActorConfig(McoreActorConfig):
    """``actor_rollout_ref.actor`` under ``trainer.strategy=orbit``."""

    strategy: str = "orbit"
    megatron: OrbitEngineConfig = dataclasses.field(default_factory=OrbitEngineConfig)
