"""What an adapter is: the part of its description that trainer, server and peft must agree on."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from packaging.version import InvalidVersion, Version

PEFT_PREFIX = "base_model.model."
PEFT_VERSION = "0.18.0"
"""First peft whose Cayley-Neumann series is the one in ``oft``; also the first that writes its version."""

OFT_SUFFIX = ".oft_R.weight"

LINEAR_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linears of a dense decoder layer, by their Hugging Face leaf names."""

MAX_CAYLEY_NEUMANN_TERMS = 64
"""More terms than any adapter needs: bounds the work that a payload can ask for."""

# peft options that change the mathematics in ways the two slots do not implement, with the only accepted value.
_REQUIRED_PEFT_VALUES: dict[str, Any] = {
    "bias": "none",
    "block_share": False,
    "coft": False,
    "fan_in_fan_out": False,
    "module_dropout": 0.0,
    "modules_to_save": None,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """An OFT adapter, as written to peft's ``adapter_config.json``.

    Args:
        block_size: width of one rotation block; divides the input width of every target.
        cayley_neumann_terms: terms of the Cayley-Neumann series in peft's counting, ``None`` for the exact
            Cayley transform. Trainer and server use the same value, because it is part of the adapter.
        target_modules: leaf names of the linears that carry a rotation.
        layers: decoder layers that carry the adapter, ``None`` for all of them (peft's ``layers_to_transform``).

    Raises:
        ValueError: a field is out of range.
    """

    block_size: int = 32
    cayley_neumann_terms: int | None = 5
    target_modules: tuple[str, ...] = LINEAR_TARGETS
    layers: tuple[int, ...] | None = None
    type: Literal["oft"] = "oft"

    def __post_init__(self):
        if self.type != "oft":
            raise ValueError(f"adapter type {self.type!r}: only 'oft' is implemented; set type='oft'")
        if not _is_int(self.block_size) or self.block_size < 2:
            raise ValueError(f"block_size {self.block_size!r}: must be an integer of at least 2, e.g. 32")
        terms = self.cayley_neumann_terms
        if terms is not None and (not _is_int(terms) or not 2 <= terms <= MAX_CAYLEY_NEUMANN_TERMS):
            raise ValueError(
                f"cayley_neumann_terms {terms!r}: must be an integer from 2 to {MAX_CAYLEY_NEUMANN_TERMS} "
                "(5 is peft's default), or None for the exact Cayley transform"
            )
        if not self.target_modules or not all(isinstance(target, str) for target in self.target_modules):
            raise ValueError(
                f"target_modules {self.target_modules!r}: must name at least one of {', '.join(LINEAR_TARGETS)}"
            )
        if self.layers is not None and not all(_is_int(layer) for layer in self.layers):
            raise ValueError(f"layers {self.layers!r}: must be decoder layers' numbers")
        # peft writes both from sets, in any order: equal adapters must compare, and hash, as equal.
        object.__setattr__(self, "target_modules", tuple(sorted(set(self.target_modules))))
        if self.layers is not None:
            object.__setattr__(self, "layers", tuple(sorted(set(self.layers))))

    def targets(self, module: str) -> bool:
        """Whether the linear with this Hugging Face module name carries the adapter."""
        if not any(module == target or module.endswith(f".{target}") for target in self.target_modules):
            return False
        return self.layers is None or _layer_index(module) in self.layers

    def to_peft(self) -> dict[str, Any]:
        """The configuration as peft's ``adapter_config.json`` holds it."""
        return {
            "peft_type": "OFT",
            "peft_version": PEFT_VERSION,
            "task_type": "CAUSAL_LM",
            "inference_mode": True,
            "r": 0,
            "oft_block_size": self.block_size,
            "use_cayley_neumann": self.cayley_neumann_terms is not None,
            "num_cayley_neumann_terms": self.cayley_neumann_terms or 5,
            "target_modules": list(self.target_modules),
            "layers_to_transform": None if self.layers is None else list(self.layers),
            "init_weights": True,
            **_REQUIRED_PEFT_VALUES,
        }

    def to_peft_json(self) -> str:
        """``to_peft`` as the text of ``adapter_config.json``."""
        return json.dumps(self.to_peft(), indent=2, sort_keys=True)

    @classmethod
    def from_peft(cls, peft: Mapping[str, Any]) -> "AdapterConfig":
        """Read a peft configuration.

        Raises:
            ValueError: it is not OFT, or it asks for an option that changes the mathematics.
        """
        if peft.get("peft_type") != "OFT":
            raise ValueError(
                f"peft_type {peft.get('peft_type')!r}: the slots hold OFT adapters; save one with OFTConfig"
            )
        for key, required in _REQUIRED_PEFT_VALUES.items():
            value = peft.get(key, required)
            if value != required:
                raise ValueError(
                    f"{key} {value!r}: only {required!r} is supported; save the adapter with {key}={required!r}"
                )
        if peft.get("use_cayley_neumann", True) and _peft_version(peft) < Version(PEFT_VERSION):
            raise ValueError(
                f"peft_version {peft.get('peft_version')!r}: before {PEFT_VERSION} peft summed another Cayley-Neumann series, "
                "so the adapter would mean something else; train it with a newer peft"
            )
        targets = peft.get("target_modules")
        if isinstance(targets, str) or not isinstance(targets, Iterable):
            raise ValueError(f"target_modules {targets!r}: must be a list of module names, not a pattern")
        layers = peft.get("layers_to_transform")
        if layers is not None and not _is_int(layers) and not isinstance(layers, list):
            raise ValueError(f"layers_to_transform {layers!r}: must be a list of layer numbers")
        terms = None
        if peft.get("use_cayley_neumann", True):
            terms = peft.get("num_cayley_neumann_terms", 5)
            if terms is None:
                raise ValueError("num_cayley_neumann_terms None: must be a number when use_cayley_neumann is true")
        return cls(
            block_size=peft.get("oft_block_size", 32),
            cayley_neumann_terms=terms,
            target_modules=tuple(targets),
            layers=None if layers is None else ((layers,) if _is_int(layers) else tuple(layers)),
        )

    @classmethod
    def from_peft_json(cls, text: str) -> "AdapterConfig":
        """Read the text of ``adapter_config.json``.

        Raises:
            ValueError: the text is not a JSON object, or ``from_peft`` refuses it.
        """
        try:
            parsed = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"adapter_config is not JSON: {error}") from None
        if not isinstance(parsed, dict):
            raise ValueError(f"adapter_config is a JSON {type(parsed).__name__}: must be an object as peft writes it")
        return cls.from_peft(parsed)


def tensor_name(module: str) -> str:
    """peft's name for the OFT tensor of a linear, from its Hugging Face module name."""
    return f"{PEFT_PREFIX}{module}{OFT_SUFFIX}"


def module_name(tensor: str) -> str | None:
    """The linear's Hugging Face module name from peft's tensor name; None when it is not an OFT tensor."""
    if not (tensor.startswith(PEFT_PREFIX) and tensor.endswith(OFT_SUFFIX)):
        return None
    return tensor[len(PEFT_PREFIX) : -len(OFT_SUFFIX)]


def _peft_version(peft: Mapping[str, Any]) -> Version:
    try:
        return Version(str(peft.get("peft_version") or "0").partition("@")[0])
    except InvalidVersion:
        return Version("0")


def _layer_index(module: str) -> int | None:
    parts = module.split(".")
    return next((int(part) for part in parts if part.isdigit()), None)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
