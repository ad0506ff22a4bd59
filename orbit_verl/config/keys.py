"""The ``orbit.*`` keys of a run are frozen, checked when built, and importable without torch or verl."""

import dataclasses
from typing import ClassVar, Literal

from orbit_kernels.adapters import METHODS, LoRAMethod, OFTMethod
from orbit_kernels.adapters.config import LINEAR_TARGETS, AdapterConfig
from orbit_kernels.contract.keys import DEFAULT_INFLIGHT, InflightMode
from orbit_kernels.contract.options import AdapterOptions, BaseOptions, Options, option


class Keys(Options):
    """A `Keys` is a group of keys; messages name them as a run's command line does."""

    group: ClassVar[str]
    """This stands in front of each key's name."""

    @classmethod
    def written(cls, name: str, value: str) -> str:
        """Returns a key and its value as a command line has them, e.g. ``orbit.adapter.rank=8``."""
        return f"{cls.group}.{name}={value}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterSettings(Keys, AdapterOptions):
    """An `AdapterSettings` is ``orbit.adapter``, which describes the trained part of the policy."""

    group: ClassVar[str] = "orbit.adapter"

    cayley_neumann_terms: int | None = option(
        OFTMethod.cayley_neumann_terms,
        "OFT: terms of the Cayley-Neumann series (peft's counting); null for the exact Cayley transform",
    )
    alpha: float = option(LoRAMethod.alpha, "LoRA: updates are scaled by alpha / rank")
    init_seed: int = option(0, "LoRA: seed of the initial A; B starts at zero")
    target_modules: tuple[str, ...] = option(
        LINEAR_TARGETS,
        "linears that carry the adapter, by the last parts of their Hugging Face names: up_proj, or shared_experts.up_proj",
    )
    dtype: Literal["bf16", "fp32"] = option(
        "bf16", "precision in which the adapter is applied and sent; the optimiser keeps fp32 masters either way"
    )
    init_path: str | None = option(None, "peft adapter folder to start from; null starts from the base model")
    reference: Literal["base", "init"] = option(
        "base", "reference policy of the KL terms: the base model, or the adapter that the run started from"
    )

    def __post_init__(self):
        super().__post_init__()
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
        """Returns the part that travels with the adapter."""
        numbers = {field.name: getattr(self, field.name) for field in dataclasses.fields(METHODS[self.type])}
        return AdapterConfig(method=METHODS[self.type](**numbers), target_modules=self.target_modules)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseSettings(Keys, BaseOptions):
    """A `BaseSettings` is ``orbit.base``: it says how trainer and servers compute with the frozen, stored base."""

    group: ClassVar[str] = "orbit.base"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotSettings(Keys):
    """A `SlotSettings` is ``orbit.slots``: it says how a new adapter version reaches the servers."""

    group: ClassVar[str] = "orbit.slots"

    inflight: InflightMode = option(
        DEFAULT_INFLIGHT,
        "whether a running request ends on its version or continues on the new one from its next token",
    )
    timeout_s: float = option(
        60.0,
        "limit of one request to a server's slots; also how long a stage waits for the inactive slot to drain",
        above=0,
    )
    attempts: int = option(
        3, "how often a stage or an activation is tried on one server before the step fails", at_least=1
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParitySettings(Keys):
    """A `ParitySettings` is ``orbit.parity``, the gate on |log-prob sampled with - log-prob trained on|.

    It covers tokens of the version being trained, and audited ones of older versions at their own.
    """

    group: ClassVar[str] = "orbit.parity"

    max_mean: float | None = option(
        2e-2, "largest mean over a mini-batch's tokens, in nats; null switches the bound off", above=0
    )
    max_p99: float | None = option(
        2e-1, "largest 99th percentile over a mini-batch's tokens, in nats; null switches the bound off", above=0
    )
    on_violation: Literal["stop", "warn"] = option("stop", "what happens when a bound is passed")
    audit_samples: int = option(
        8,
        "stale sequences of each step that are recomputed at the version that sampled them; 0 switches the audit off",
        at_least=0,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StalenessSettings(Keys):
    """A `StalenessSettings` is ``orbit.staleness``: it says how far behind the trainer a sample may be."""

    group: ClassVar[str] = "orbit.staleness"

    max_versions: int = option(
        8,
        "versions that a prompt may wait between its submission and its training; older ones are dropped and replaced",
        at_least=1,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrbitConfig(Keys):
    """An `OrbitConfig` holds all keys under ``orbit``."""

    group: ClassVar[str] = "orbit"

    adapter: AdapterSettings = dataclasses.field(default_factory=AdapterSettings)
    base: BaseSettings = dataclasses.field(default_factory=BaseSettings)
    slots: SlotSettings = dataclasses.field(default_factory=SlotSettings)
    parity: ParitySettings = dataclasses.field(default_factory=ParitySettings)
    staleness: StalenessSettings = dataclasses.field(default_factory=StalenessSettings)
    seed: int | None = option(
        None,
        "seed of every sample's tokens, for runs that can be repeated exactly; null uses the server's own generator",
    )
    max_skipped_steps: int = option(
        2,
        "optimiser steps in a row that may be skipped because a gradient is not finite; one more stops the run",
        at_least=0,
    )
    poll_interval_s: float = option(0.1, "how often the trainer looks for finished samples, in seconds", above=0)


def check_key(key: str) -> None:
    """Refuses a dotted key that no field of ``OrbitConfig`` has.

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
