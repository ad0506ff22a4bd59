"""This module says what an adapter is: the part of its description that trainer, server and peft must agree on.

It can be imported without torch.
"""

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping
from typing import Any

from orbit_kernels.adapters import METHODS, AdapterMethod, OFTMethod
from orbit_kernels.adapters.common.method import COMMON_PEFT_VALUES, is_int, refuse_options
from orbit_kernels.linears.fusing import fused_with
from orbit_kernels.linears.names import layer_number

PEFT_PREFIX = "base_model.model."
PEFT_SUFFIX = ".weight"

LINEAR_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""These are the linears of a dense decoder layer, by their Hugging Face leaf names."""

_LEAVES = frozenset(leaf for method in METHODS.values() for leaf in method.leaves)

FROZEN_TARGETS = ("embed_tokens", "lm_head")
"""These are matrices outside the decoder layers, which no adapter may name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """An ``AdapterConfig`` describes an adapter as it is written to peft's ``adapter_config.json``.

    Args:
        method: how each linear is adapted, with the method's own numbers.
        target_modules: linears that carry the adapter, by the last parts of their names, as peft reads them.
        layers: decoder layers that carry the adapter, ``None`` for all of them (peft's ``layers_to_transform``).

    Raises:
        ValueError: a field is out of range.
    """

    method: AdapterMethod = OFTMethod()
    target_modules: tuple[str, ...] = LINEAR_TARGETS
    layers: tuple[int, ...] | None = None

    def __post_init__(self):
        if not self.target_modules or not all(isinstance(target, str) for target in self.target_modules):
            raise ValueError(
                f"target_modules {self.target_modules!r}: must name at least one of {', '.join(LINEAR_TARGETS)}"
            )
        if frozen := sorted({target.rsplit(".", 1)[-1] for target in self.target_modules} & set(FROZEN_TARGETS)):
            raise ValueError(
                f"target_modules {frozen}: an adapter sits on linears of the decoder layers only; a head that is tied to the "
                "embeddings shares their matrix, so adapting one would leave the other behind; leave them out"
            )
        if not self.method.acts_on_input and "kv_b_proj" in {
            target.rsplit(".", 1)[-1] for target in self.target_modules
        }:
            raise ValueError(
                f"target_modules ['kv_b_proj'] with {self.type}: a server multiplies that weight into queries and values "
                "(absorbed latent attention), so an update of its output would change the weight of every slot; take it out of "
                "target_modules, or use oft, which rotates the latent"
            )
        if self.layers is not None and not all(is_int(layer) for layer in self.layers):
            raise ValueError(f"layers {self.layers!r}: must be decoder layers' numbers")
        # peft writes both from sets, in any order: equal adapters must compare, and hash, as equal.
        object.__setattr__(self, "target_modules", tuple(sorted(set(self.target_modules))))
        if self.layers is not None:
            object.__setattr__(self, "layers", tuple(sorted(set(self.layers))))

    @property
    def type(self) -> str:
        """Returns the method's name, ``oft`` or ``lora``."""
        return self.method.type

    @functools.cached_property
    def _suffixes(self) -> tuple[str, ...]:
        return tuple(f".{target}" for target in self.target_modules)

    def targets(self, module: str) -> bool:
        """Returns whether the linear with this Hugging Face module name carries the adapter."""
        if not f".{module}".endswith(self._suffixes):
            return False
        return self.layers is None or layer_number(module) in self.layers

    def tied_names(self, tensor: str) -> tuple[str, ...]:
        """Returns peft's names for what is one tensor where the parts of a fused projection are tied.

        The first name is the owner's. The names are those of the tensor on the input of each part that carries the
        adapter, in the order of the parts. Any other tensor goes by its own name alone.
        """
        module, leaf = split_name(tensor) or ("", "")
        if leaf != self.method.input_leaf:
            return (tensor,)
        return tuple(tensor_name(part, leaf) for part in fused_with(module) if self.targets(part)) or (tensor,)

    def check_targets(self, modules: Iterable[str]) -> None:
        """Holds the targets against the linears of a model.

        Args:
            modules: Hugging Face names of those that can carry an adapter.

        Raises:
            ValueError: a target matches none of them.
        """
        names = [f".{module}" for module in modules]
        unknown = [target for target in self.target_modules if not any(name.endswith(f".{target}") for name in names)]
        if unknown:
            known = sorted({name.rpartition(".")[2] for name in names})
            raise ValueError(
                f"target_modules {unknown} match no linear of the model; known: {known}, or with what stands in front of "
                "them, e.g. mlp.up_proj"
            )

    def to_peft(self) -> dict[str, Any]:
        """Returns the configuration as peft's ``adapter_config.json`` holds it."""
        return {
            "peft_type": self.method.peft_type,
            "task_type": "CAUSAL_LM",
            "inference_mode": True,
            "target_modules": list(self.target_modules),
            "layers_to_transform": None if self.layers is None else list(self.layers),
            **COMMON_PEFT_VALUES,
            **self.method.to_peft(),
        }

    def to_peft_json(self) -> str:
        """Returns ``to_peft`` as the text of ``adapter_config.json``."""
        return json.dumps(self.to_peft(), indent=2, sort_keys=True)

    @classmethod
    def from_peft(cls, peft: Mapping[str, Any]) -> "AdapterConfig":
        """Reads a peft configuration.

        Raises:
            ValueError: it is no known method, or it asks for an option that changes the mathematics.
        """
        method = next((known for known in METHODS.values() if known.peft_type == peft.get("peft_type")), None)
        if method is None:
            raise ValueError(
                f"peft_type {peft.get('peft_type')!r}: the slots hold OFT or LoRA adapters; save one with OFTConfig or LoraConfig"
            )
        refuse_options(peft, COMMON_PEFT_VALUES)
        targets = peft.get("target_modules")
        if isinstance(targets, str) or not isinstance(targets, Iterable):
            raise ValueError(f"target_modules {targets!r}: must be a list of module names, not a pattern")
        layers: list[int] | None = peft.get("layers_to_transform")
        if is_int(layers):
            layers = [layers]
        if layers is not None and not isinstance(layers, list):
            raise ValueError(f"layers_to_transform {layers!r}: must be a list of layer numbers")
        return cls(
            method=method.from_peft(peft),
            target_modules=tuple(targets),
            layers=None if layers is None else tuple(layers),
        )

    @classmethod
    def from_peft_json(cls, text: str) -> "AdapterConfig":
        """Reads the text of ``adapter_config.json``.

        Raises:
            ValueError: the text is not a JSON object, or ``from_peft`` refuses it.
        """
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"adapter_config is not JSON: {error}") from None
        if not isinstance(parsed, dict):
            raise ValueError(f"adapter_config is a JSON {type(parsed).__name__}: must be an object as peft writes it")
        return cls.from_peft(parsed)


def tensor_name(module: str, leaf: str = OFTMethod.input_leaf) -> str:
    """Returns peft's name for an adapter tensor of a linear, from the linear's Hugging Face module name."""
    return f"{PEFT_PREFIX}{module}.{leaf}{PEFT_SUFFIX}"


def split_name(tensor: str) -> tuple[str, str] | None:
    """Returns a linear's Hugging Face module name and the leaf from peft's tensor name; None if it is no adapter's."""
    if not (tensor.startswith(PEFT_PREFIX) and tensor.endswith(PEFT_SUFFIX)):
        return None
    module, _, leaf = tensor[len(PEFT_PREFIX) : -len(PEFT_SUFFIX)].rpartition(".")
    return (module, leaf) if module and leaf in _LEAVES else None


def module_name(tensor: str) -> str | None:
    """Returns the linear's Hugging Face module name from peft's tensor name; None when it is no adapter's."""
    names = split_name(tensor)
    return names and names[0]
