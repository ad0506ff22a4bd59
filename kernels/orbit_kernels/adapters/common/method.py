"""This module defines what every adapter method knows about itself.

The dimension suffixes are: T tokens, I input width, O output width.
"""

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeGuard

if TYPE_CHECKING:
    from torch import Generator, Tensor

# Options of every peft method that the slots do not implement, with the only accepted value.
COMMON_PEFT_VALUES: dict[str, Any] = {
    "bias": "none",
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "modules_to_save": None,
}


class AdapterMethod(abc.ABC):
    """An adapter method says how an adapter changes one linear ``y = x W^T``.

    Subclasses are frozen dataclasses of the method's own numbers. ``tensors`` are one linear's trained tensors by leaf:
    the word between the linear's name and ``.weight`` in peft's tensor name.
    """

    type: ClassVar[str]
    """This is Orbit's name of the method."""
    size_field: ClassVar[str]
    """This field fixes the tensors' shapes for a given linear."""
    peft_type: ClassVar[str]
    """This is peft's name of the method."""
    leaves: ClassVar[tuple[str, ...]]
    """These are the tensors of one linear."""
    input_leaf: ClassVar[str]
    """This tensor acts on the input: the parts of a fused projection, which read the same input, may share it."""
    acts_on_input: ClassVar[bool]
    """This says whether the method changes nothing but the input.

    Parts that share ``input_leaf`` are then adapted all or none.
    """

    @abc.abstractmethod
    def shapes(self, rows: int, columns: int, name: str = "input") -> dict[str, tuple[int, ...]]:
        """Returns the shape of each tensor for a weight [rows, columns].

        Raises:
            ValueError: the method cannot adapt that weight; the message starts with ``name``.
        """

    @abc.abstractmethod
    def to_peft(self) -> dict[str, Any]:
        """Returns the method's own keys of peft's ``adapter_config.json``."""

    @classmethod
    @abc.abstractmethod
    def from_peft(cls, peft: Mapping[str, Any]) -> Self:
        """Reads the method's own keys.

        Raises:
            ValueError: an option is out of range, or changes the mathematics in a way that is not implemented.
        """

    @abc.abstractmethod
    def initial(self, rows: int, columns: int, generator: "Generator") -> dict[str, "Tensor"]:
        """Returns tensors that leave the linear as it is, fp32 on the generator's device."""

    @abc.abstractmethod
    def linear(self, x_TI: "Tensor", weight_OI: "Tensor", tensors: Mapping[str, "Tensor"]) -> "Tensor":
        """Returns the adapted linear [T, O] in the dtype of ``x_TI``.

        It is the specification of trainer and server.
        """

    @abc.abstractmethod
    def merge(self, weight_OI: "Tensor", tensors: Mapping[str, "Tensor"]) -> "Tensor":
        """Returns the weight, at least fp32, whose plain linear equals the adapted one."""

    @abc.abstractmethod
    def shard_rows(self, tensors: Mapping[str, "Tensor"], start: int, stop: int) -> dict[str, "Tensor"]:
        """Returns the tensors for rows ``start:stop`` of the weight, as views."""

    @abc.abstractmethod
    def shard_columns(self, tensors: Mapping[str, "Tensor"], start: int, stop: int) -> dict[str, "Tensor"]:
        """Returns the tensors for columns ``start:stop`` of the weight, as views.

        Raises:
            ValueError: a boundary cuts what the method keeps whole.
        """


def refuse_options(peft: Mapping[str, Any], accepted: Mapping[str, Any]) -> None:
    """Refuses options that change the mathematics; an absent or empty one is as good as its empty default.

    Raises:
        ValueError: names the first option with another value than the accepted one.
    """
    for key, required in accepted.items():
        value = peft.get(key, required)
        if value != required and (value or required):
            raise ValueError(
                f"{key} {value!r}: only {required!r} is supported; save the adapter with {key}={required!r}"
            )


def required(peft: Mapping[str, Any], key: str) -> Any:
    """Returns an option without which the adapter could be another one: peft's defaults are not those of every release.

    Raises:
        ValueError: there is no such key.
    """
    if key not in peft:
        raise ValueError(
            f"{key} is missing: it changes what the adapter computes; add the value that it was trained with"
        )
    return peft[key]


def is_int(value: object) -> TypeGuard[int]:
    """Returns whether a value read from JSON is an integer and not a truth value."""
    return isinstance(value, int) and not isinstance(value, bool)
