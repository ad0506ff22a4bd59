"""The ``orbit.*`` keys of a run: frozen, validated when built, importable without torch or verl."""

import dataclasses
from typing import Literal

from orbit_kernels.adapters import METHODS
from orbit_kernels.adapters.config import LINEAR_TARGETS, AdapterConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """``orbit.adapter``: the trained part of the policy."""

    type: Literal["oft", "lora"] = "oft"
    """Method: a rotation of each linear's input, or a low-rank update of its output."""
    block_size: int = 32
    """OFT: width of one rotation block; must divide the input width of every targeted linear."""
    cayley_neumann_terms: int | None = 5
    """OFT: terms of the Cayley-Neumann series (peft's counting); null for the exact Cayley transform."""
    rank: int = 16
    """LoRA: rank of every update."""
    alpha: float = 32.0
    """LoRA: updates are scaled by alpha / rank."""
    init_seed: int = 0
    """LoRA: seed of the initial A; B starts at zero."""
    fused: Literal["tied", "split"] = "tied"
    """One rotation (OFT) or one A (LoRA) for all parts of a fused projection, or one for each part."""
    experts: Literal["each", "shared"] = "each"
    """An adapter for each routed expert, or one that all experts of a layer share and that rotates before dispatch (OFT, tied)."""
    target_modules: tuple[str, ...] = LINEAR_TARGETS
    """Linears that carry the adapter, by the last parts of their Hugging Face names: up_proj, or shared_experts.up_proj."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Precision in which the adapter is applied and sent; the optimiser keeps fp32 masters either way."""
    init_path: str | None = None
    """peft adapter folder to start from; null starts from the base model."""
    reference: Literal["base", "init"] = "base"
    """Reference policy of the KL terms: the base model, or the adapter that the run started from."""

    def __post_init__(self):
        _one_of("orbit.adapter.type", self.type, tuple(METHODS))
        _one_of("orbit.adapter.fused", self.fused, ("tied", "split"))
        _one_of("orbit.adapter.experts", self.experts, ("each", "shared"))
        if self.experts == "shared" and (self.type, self.fused) != ("oft", "tied"):
            raise ValueError(
                f"orbit.adapter.experts=shared with type={self.type} and fused={self.fused}: one rotation of the experts' input "
                "needs type=oft and fused=tied; set these, or experts=each"
            )
        _one_of("orbit.adapter.dtype", self.dtype, ("bf16", "fp32"))
        _one_of("orbit.adapter.reference", self.reference, ("base", "init"))
        if isinstance(self.target_modules, str):
            raise ValueError(
                f"orbit.adapter.target_modules={self.target_modules!r}: must be a list, e.g. [q_proj,k_proj,v_proj]"
            )
        object.__setattr__(self, "target_modules", tuple(self.target_modules))
        if self.reference == "init" and self.init_path is None:
            raise ValueError(
                "orbit.adapter.reference=init without orbit.adapter.init_path: set init_path to a peft adapter folder, "
                "or reference=base"
            )
        try:
            self.to_adapter_config()
        except ValueError as error:
            raise ValueError(f"orbit.adapter: {error}") from None

    def to_adapter_config(self) -> AdapterConfig:
        """The part that travels with the adapter."""
        numbers = {field.name: getattr(self, field.name) for field in dataclasses.fields(METHODS[self.type])}
        return AdapterConfig(method=METHODS[self.type](**numbers), target_modules=self.target_modules)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseSettings:
    """``orbit.base``: how trainer and servers compute with the frozen base, as it is stored."""

    activations: Literal["deployed", "none"] = "deployed"
    """Round the inputs of FP8 and NVFP4 linears as the deployed kernel does, or read them unrounded."""
    dequant_chunk_mb: int = 64
    """Most memory for weights that are dequantised at one time, in MiB; experts have ``experts_per_chunk`` instead."""
    experts_per_chunk: int = 4
    """Experts of a mixture that are dequantised at one time."""

    def __post_init__(self):
        _one_of("orbit.base.activations", self.activations, ("deployed", "none"))
        for name in ("dequant_chunk_mb", "experts_per_chunk"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"orbit.base.{name}={value!r}: must be a whole number of at least 1")

    @property
    def chunk_bytes(self) -> int:
        """``dequant_chunk_mb`` in bytes."""
        return self.dequant_chunk_mb * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotSettings:
    """``orbit.slots``: how a new adapter version reaches the servers."""

    inflight: Literal["finish", "switch"] = "finish"
    """Whether a running request ends on its version or continues on the new one from its next token."""
    timeout_s: float = 60.0
    """Limit of one request to a server's slots; also how long a stage waits for the inactive slot to drain."""
    attempts: int = 3
    """How often a stage or an activation is tried on one server before the step fails."""

    def __post_init__(self):
        _one_of("orbit.slots.inflight", self.inflight, ("finish", "switch"))
        _positive("orbit.slots.timeout_s", self.timeout_s)
        _positive("orbit.slots.attempts", self.attempts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParitySettings:
    """``orbit.parity``: the gate on |log-prob sampled with - log-prob trained on|.

    It covers tokens of the version being trained, and audited ones of older versions at their own.
    """

    max_mean: float | None = 2e-2
    """Largest mean over a mini-batch's tokens, in nats; null switches the bound off."""
    max_p99: float | None = 2e-1
    """Largest 99th percentile over a mini-batch's tokens, in nats; null switches the bound off."""
    on_violation: Literal["stop", "warn"] = "stop"
    """What happens when a bound is passed."""
    audit_samples: int = 8
    """Stale sequences of each step that are recomputed at the version that sampled them; 0 switches the audit off."""

    def __post_init__(self):
        _one_of("orbit.parity.on_violation", self.on_violation, ("stop", "warn"))
        for name in ("max_mean", "max_p99"):
            if getattr(self, name) is not None:
                _positive(f"orbit.parity.{name}", getattr(self, name))
        if self.audit_samples < 0:
            raise ValueError(f"orbit.parity.audit_samples={self.audit_samples}: must be 0 or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StalenessSettings:
    """``orbit.staleness``: how far behind the trainer a sample may be."""

    max_versions: int = 8
    """Versions that a prompt may wait between its submission and its training; older ones are dropped and replaced."""

    def __post_init__(self):
        _positive("orbit.staleness.max_versions", self.max_versions)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrbitConfig:
    """All keys under ``orbit``."""

    adapter: AdapterSettings = dataclasses.field(default_factory=AdapterSettings)
    base: BaseSettings = dataclasses.field(default_factory=BaseSettings)
    slots: SlotSettings = dataclasses.field(default_factory=SlotSettings)
    parity: ParitySettings = dataclasses.field(default_factory=ParitySettings)
    staleness: StalenessSettings = dataclasses.field(default_factory=StalenessSettings)
    seed: int | None = None
    """Seed of every sample's tokens, for runs that can be repeated exactly; null uses the server's own generator."""
    poll_interval_s: float = 0.1
    """How often the trainer looks for finished samples."""

    def __post_init__(self):
        _positive("orbit.poll_interval_s", self.poll_interval_s)


def check_key(key: str) -> None:
    """Refuse a dotted key that no field of ``OrbitConfig`` has.

    Raises:
        ValueError: names the part that is unknown and what is known there.
    """
    prefix, schema = "orbit", OrbitConfig
    for part in key.split(".")[1:]:
        fields = (
            {field.name: field.type for field in dataclasses.fields(schema)} if dataclasses.is_dataclass(schema) else {}
        )
        if part not in fields:
            known = f"the keys of {prefix} are {', '.join(sorted(fields))}" if fields else f"{prefix} has no keys"
            raise ValueError(f"{prefix}.{part}: unknown key; {known}")
        prefix, schema = f"{prefix}.{part}", fields[part]


def _one_of(key: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{key}={value!r}: must be one of {', '.join(allowed)}")


def _positive(key: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{key}={value!r}: must be greater than 0")
