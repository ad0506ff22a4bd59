"""This module declares each option once: its name, default, rule and help text. It can be imported without torch.

What trainer and server must both know stands here. From its declaration come the key of a run (``orbit.adapter.rank``),
the flag of a server (``--orbit-rank``), and what a run passes on to its servers.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from orbit_kernels.adapters import LoRAMethod, OFTMethod

AdapterType = Literal["oft", "lora"]
FusedMode = Literal["tied", "split"]
ExpertsMode = Literal["each", "common"]
Activations = Literal["deployed", "none"]
"""The value says whether the input of a linear is quantised as the deployed kernel does it, or not at all."""

ENABLE_FLAG = "enable_orbit_slots"
"""This is the server's switch, as a field of SGLang's ``ServerArgs``."""

SEEDED_SAMPLING_FLAG = "orbit_seeded_sampling"
"""A run with a seed asks this of its servers, as a field of ``ServerArgs``."""

_METADATA_KEY = "option"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """An ``Option`` is what is said of a field of ``Options`` beside its name, type and default.

    Args:
        help: what it does, as a user reads it.
        at_least: the smallest value.
        above: what the value must be greater than.
        flag: field of SGLang's ``ServerArgs`` that sets it on a server; None where servers do not know it.
    """

    help: str
    at_least: int | None = None
    above: float | None = None
    flag: str | None = None


def option(default: Any, help: str, **rule: Any) -> Any:
    """Declares a field of ``Options``; a type ``Literal`` limits it to those values."""
    return dataclasses.field(default=default, metadata={_METADATA_KEY: Option(help=help, **rule)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """``Options`` is a group of options, and each value is checked when the group is built.

    Subclasses are frozen dataclasses.

    Raises:
        ValueError: a value breaks its option's rule; the message names the option as its user wrote it.
    """

    def __post_init__(self):
        for field, rule in self.declared():
            value = getattr(self, field.name)
            if problem := _problem(field, rule, value):
                raise ValueError(f"{self.written(field.name, repr(value))}: {problem}")

    @classmethod
    def declared(cls) -> Iterator[tuple[dataclasses.Field, Option]]:
        """Yields every option with its field."""
        for field in dataclasses.fields(cls):
            if _METADATA_KEY in field.metadata:
                yield field, field.metadata[_METADATA_KEY]

    @classmethod
    def written(cls, name: str, value: str) -> str:
        """Returns an option and its value as the user of this group writes them."""
        return f"{name}={value}"


def choices(field: dataclasses.Field) -> tuple[str, ...] | None:
    """Returns the values that an option may have, where its type lists them."""
    return get_args(field.type) if get_origin(field.type) is Literal else None


def _problem(field: dataclasses.Field, rule: Option, value: Any) -> str | None:
    """Returns why an option cannot have a value; None when it can."""
    if (allowed := choices(field)) is not None:
        return None if value in allowed else f"must be one of {', '.join(allowed)}"
    types = get_args(field.type) or (field.type,)
    if value is None and type(None) in types:
        return None
    is_number = float in types or int in types
    if is_number and (problem := _number_problem(rule, value, whole=float not in types)):
        return problem if field.default is None else f"{problem}, e.g. {field.default}"
    return None


def _number_problem(rule: Option, value: Any, *, whole: bool) -> str | None:
    """Returns what a number must be and is not; None when it is as it must be."""
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        return "must be a whole number" if whole else "must be a number"
    if rule.at_least is not None and value < rule.at_least:
        return f"must be at least {rule.at_least}"
    if rule.above is not None and not value > rule.above:
        return f"must be greater than {rule.above}"
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterOptions(Options):
    """``AdapterOptions`` are what the slots of a server must know of the adapters that a run trains."""

    type: AdapterType = option(
        "oft",
        "adapter method: a rotation of each linear's input, or a low-rank update of its output",
        flag="orbit_adapter",
    )
    block_size: int = option(
        OFTMethod.block_size,
        "OFT: width of a rotation block; must divide the input width of every targeted linear",
        at_least=2,
        flag="orbit_block_size",
    )
    rank: int = option(LoRAMethod.rank, "LoRA: rank of every update", at_least=1, flag="orbit_rank")
    fused: FusedMode = option(
        "tied",
        "one rotation (OFT) or one A (LoRA) for all parts of a fused projection, or one for each part",
        flag="orbit_fused",
    )
    experts: ExpertsMode = option(
        "each",
        "an adapter for each routed expert, or one that all experts of a layer share and that rotates before dispatch (OFT, "
        "tied)",
        flag="orbit_experts",
    )

    def __post_init__(self):
        super().__post_init__()
        if self.experts == "common" and (self.type, self.fused) != ("oft", "tied"):
            got = [self.written(name, getattr(self, name)) for name in ("experts", "type", "fused")]
            fix = [
                self.written(name, value) for name, value in (("type", "oft"), ("fused", "tied"), ("experts", "each"))
            ]
            raise ValueError(
                f"{got[0]} with {got[1]} and {got[2]}: one rotation of the experts' input needs {fix[0]} and {fix[1]}; set "
                f"these, or {fix[2]}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseOptions(Options):
    """``BaseOptions`` say how trainer and servers compute with the frozen base as it is stored.

    On a GPU, servers compute as deployed.
    """

    activations: Activations = option(
        "deployed",
        "round the inputs of FP8 and NVFP4 linears as the deployed kernel does, or read them unrounded (not on a server's GPU)",
        flag="orbit_base_activations",
    )
    dequant_chunk_mb: int = option(
        64,
        "most memory for weights that are dequantised at one time, in MiB, by the trainer and by servers on a CPU; experts have "
        "experts_per_chunk instead",
        at_least=1,
        flag="orbit_dequant_chunk_mb",
    )
    experts_per_chunk: int = option(
        4,
        "experts of a mixture that are dequantised at one time, by the trainer and by servers on a CPU",
        at_least=1,
        flag="orbit_experts_per_chunk",
    )

    @property
    def chunk_bytes(self) -> int:
        """Returns ``dequant_chunk_mb`` in bytes."""
        return self.dequant_chunk_mb * 2**20
