"""This module makes LoRA an adapter method, ``y = x W^T + s (x A^T) B^T``.

``orbit_kernels.adapters.lora.reference`` has the mathematics.
"""

import dataclasses
import math
import reprlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from orbit_kernels.adapters.common.method import AdapterMethod, is_int, refuse_options, required

if TYPE_CHECKING:
    from torch import Generator, Tensor

# Variants of LoRA in peft that compute something else, with the value that switches each off.
_ACCEPTED_PEFT_VALUES: dict[str, Any] = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "kasa_config": None,
    "layer_replication": None,
    "lora_bias": False,
    "monteclora_config": None,
    "rank_pattern": {},
    "target_parameters": None,
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "velora_config": None,
}

# Initialisations that leave the base weight as it is; the others (PiSSA, OLoRA, LoftQ, CorDA, LoRA-GA) subtract from it.
_INITIALISATIONS = (True, False, "gaussian", "orthogonal", "eva", "mica")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRAMethod(AdapterMethod):
    """``LoRAMethod`` adds a low-rank update to a linear.

    Args:
        rank: R.
        alpha: the update is scaled by ``alpha / rank``.

    Raises:
        ValueError: a field is out of range.
    """

    type: ClassVar[str] = "lora"
    size_field: ClassVar[str] = "rank"
    peft_type: ClassVar[str] = "LORA"
    leaves: ClassVar[tuple[str, ...]] = ("lora_A", "lora_B")
    input_leaf: ClassVar[str] = "lora_A"
    acts_on_input: ClassVar[bool] = False

    rank: int = 16
    alpha: float = 32.0

    def __post_init__(self):
        if not is_int(self.rank) or self.rank < 1:
            raise ValueError(f"rank {self.rank!r}: must be an integer of at least 1, e.g. 16")
        number = is_int(self.alpha) or isinstance(self.alpha, float)
        if not number or not 0 < self.alpha <= sys.float_info.max:
            raise ValueError(f"alpha {reprlib.repr(self.alpha)}: must be a number greater than 0, e.g. twice the rank")
        # Configurations are compared and hashed as text: 32 and 32.0 are one adapter.
        object.__setattr__(self, "alpha", float(self.alpha))

    @property
    def scaling(self) -> float:
        """Returns the factor s."""
        return self.alpha / self.rank

    def shapes(self, rows: int, columns: int, name: str = "input") -> dict[str, tuple[int, ...]]:
        """Returns the shapes of A [R, I] and B [O, R]."""
        return {"lora_A": (self.rank, columns), "lora_B": (rows, self.rank)}

    def to_peft(self) -> dict[str, Any]:
        """Returns the keys of peft's ``LoraConfig``."""
        return {
            "r": self.rank,
            "lora_alpha": self.alpha,
            "use_rslora": False,
            "init_lora_weights": True,
            "lora_dropout": 0.0,
            **_ACCEPTED_PEFT_VALUES,
        }

    @classmethod
    def from_peft(cls, peft: Mapping[str, Any]) -> "LoRAMethod":
        """Reads ``LoraConfig``.

        Where the update is scaled by ``lora_alpha / sqrt(r)`` (rank-stabilised LoRA, https://arxiv.org/abs/2312.03732),
        ``alpha`` is ``lora_alpha * sqrt(r)``.
        """
        refuse_options(peft, _ACCEPTED_PEFT_VALUES)
        initialisation = peft.get("init_lora_weights", True)
        if initialisation not in _INITIALISATIONS:
            raise ValueError(
                f"init_lora_weights {initialisation!r}: it changes the base weights, so the adapter does not fit the frozen "
                "base; convert it when saving (peft's path_initial_model_for_weight_conversion)"
            )
        method = cls(rank=required(peft, "r"), alpha=required(peft, "lora_alpha"))
        # A file without the key is of a release of peft that had no such scaling.
        stabilised = peft.get("use_rslora", False)
        if not isinstance(stabilised, bool):
            raise ValueError(f"use_rslora {stabilised!r}: must be true or false, as it was trained")
        if not stabilised:
            return method
        return cls(rank=method.rank, alpha=method.alpha * math.sqrt(method.rank))

    def initial(self, rows: int, columns: int, generator: "Generator") -> dict[str, "Tensor"]:
        """Draws A uniformly within ``1 / sqrt(I)`` and sets B to zero, as peft starts.

        The bound is Kaiming's rule with ``a = sqrt(5)``.
        """
        import torch

        shapes = self.shapes(rows, columns)
        a_RI = torch.empty(shapes["lora_A"], device=generator.device)
        bound = 1 / math.sqrt(columns)
        return {
            "lora_A": a_RI.uniform_(-bound, bound, generator=generator),
            "lora_B": torch.zeros(shapes["lora_B"], device=generator.device),
        }

    def linear(self, x_TI: "Tensor", weight_OI: "Tensor", tensors: Mapping[str, "Tensor"]) -> "Tensor":
        """Returns ``x W^T + s (x A^T) B^T``."""
        from orbit_kernels.adapters.lora import reference as lora

        down_RI, up_OR = tensors["lora_A"], lora.scaled(tensors["lora_B"], self.scaling)
        return x_TI @ weight_OI.T + lora.update(x_TI, down_RI, up_OR)

    def merge(self, weight_OI: "Tensor", tensors: Mapping[str, "Tensor"]) -> "Tensor":
        """Returns ``W + s B A``."""
        from orbit_kernels.adapters.lora import reference as lora

        return lora.merge(weight_OI, tensors["lora_A"], tensors["lora_B"], self.scaling)

    def shard_rows(self, tensors: Mapping[str, "Tensor"], start: int, stop: int) -> dict[str, "Tensor"]:
        """Returns the whole of A and those rows of B."""
        return {"lora_A": tensors["lora_A"], "lora_B": tensors["lora_B"][start:stop]}

    def shard_columns(self, tensors: Mapping[str, "Tensor"], start: int, stop: int) -> dict[str, "Tensor"]:
        """Returns those columns of A and the whole of B; the shards' updates add up."""
        return {"lora_A": tensors["lora_A"][:, start:stop], "lora_B": tensors["lora_B"]}
