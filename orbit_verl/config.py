"""The ``orbit.*`` keys of a run: frozen, validated when built, importable without torch or verl."""

import dataclasses
from typing import Literal

from orbit_kernels.adapter import LINEAR_TARGETS, AdapterConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """``orbit.adapter``: the trained part of the policy."""

    type: Literal["oft"] = "oft"
    """Kind of adapter."""
    block_size: int = 32
    """Width of one rotation block; must divide the input width of every targeted linear."""
    cayley_neumann_terms: int | None = 5
    """Terms of the Cayley-Neumann series (peft's counting); null for the exact Cayley transform."""
    fused: Literal["tied", "split"] = "tied"
    """One rotation for all parts of a fused projection (one GEMM), or one for each part."""
    target_modules: tuple[str, ...] = LINEAR_TARGETS
    """Hugging Face leaf names of the linears that carry a rotation."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Precision in which the adapter is applied and sent; the optimiser keeps fp32 masters either way."""
    init_path: str | None = None
    """peft adapter folder to start from; null starts from the identity, that is, from the base model."""
    reference: Literal["base", "init"] = "base"
    """Reference policy of the KL terms: the base model, or the adapter that the run started from."""

    def __post_init__(self):
        _one_of("orbit.adapter.fused", self.fused, ("tied", "split"))
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
        return AdapterConfig(
            type=self.type,
            block_size=self.block_size,
            cayley_neumann_terms=self.cayley_neumann_terms,
            target_modules=self.target_modules,
        )


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
    """``orbit.parity``: the gate on |log-prob sampled with - log-prob trained on|, tokens of the trained version only."""

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
