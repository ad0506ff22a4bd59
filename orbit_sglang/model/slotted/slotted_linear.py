"""This module holds what the slotted linears of all adapter methods have in common.

Dimension suffixes: T tokens of a batch, I input width, O output width.
"""

import abc
import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch

from orbit_kernels.adapters import AdapterMethod
from orbit_kernels.contract.payload import Adapter
from orbit_kernels.linears.share import Share
from orbit_sglang.control.slots import BASE_SLOT, SLOTS

Slots = int | torch.Tensor
"""``Slots`` are the slot of all rows, or the slot of each, int32 [T, 1]."""

Trained = tuple[str, torch.Tensor]
"""A ``Trained`` is a trained tensor behind its leaf."""


class SlottedLinear(abc.ABC):
    """A ``SlottedLinear`` holds an adapter per slot for one frozen linear, all at fixed addresses.

    The linear itself stays SGLang's.

    Args:
        parts: this rank's share of each part by its Hugging Face name, one for a linear that is not fused.
        method: the adapter's kind and size, which the slots are made for.
        split: whether each part has its own tensor on the input, or one is tied to all.
        dtype: dtype of the activations, in which the slots are kept.
        device: of the slots.

    ``parts`` are the rows that this rank holds of each part. ``slots`` holds each slot's tensors: their contents change
    while no request uses the slot, their addresses never.

    Raises:
        ValueError: the method cannot adapt a share of this width.
    """

    def __init__(
        self,
        parts: Mapping[str, Share],
        method: AdapterMethod,
        *,
        split: bool,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.parts = {part: len(share.rows) for part, share in parts.items()}
        self._shares = dict(parts)
        self._method = method
        self._split = split and len(parts) > 1
        self._shapes = {
            part: method.shapes(len(share.rows), len(share.columns), f"a rank's share of {part}")
            for part, share in parts.items()
        }
        identity = self._identity_tensors(dtype, device)
        self.slots = {
            slot: tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in identity) for slot in SLOTS
        }
        self._identity = self._pieces(*identity)
        self._targets = {slot: self._pieces(*tensors) for slot, tensors in self.slots.items()}
        self._adapted = dict.fromkeys((BASE_SLOT, *SLOTS), False)

    def problems(self, adapter: Adapter) -> list[str]:
        """Lists the parts that differ although this linear has one tensor for the input of all.

        In a tied adapter theirs is one tensor; those of an adapter that is not, as of one of peft's files, are
        compared.
        """
        if self._split:
            return []
        leaf = self._method.input_leaf
        tensors = {part: adapter.module_tensors(part).get(leaf) for part in self.parts}
        if not self._method.acts_on_input:
            tensors = {part: tensor for part, tensor in tensors.items() if tensor is not None}
        first = next(iter(tensors), None)
        differing = [part for part, tensor in tensors.items() if not _same(tensors[first], tensor)]
        if not differing:
            return []
        return [
            f"{', '.join(differing)}: {leaf} differs from {first}'s, and the server ties the parts of a fused projection; "
            "train with orbit.adapter.fused=tied or start the server with --orbit-fused split"
        ]

    @classmethod
    def prepare(cls, linears: Sequence["SlottedLinear"], adapter: Adapter) -> list[list[torch.Tensor] | None]:
        """Returns the pieces of each linear's slot, computed from an accepted adapter.

        They are None where it leaves the linear alone. All linears are prepared at once, because every call of torch
        competes with the forward pass for Python's lock. This touches no slot, and is safe on another thread while the
        linears run.
        """
        trained = [linear._trained(adapter) for linear in linears]
        dtype = linears[0].slots[SLOTS[0]][0].dtype
        computed = cls._computed(list(filter(None, itertools.chain(*trained))), adapter.config.method, dtype)
        return [
            [next(computed) if own else identity for own, identity in zip(of_linear, linear._identity, strict=True)]
            if any(of_linear)
            else None
            for of_linear, linear in zip(trained, linears, strict=True)
        ]

    @staticmethod
    def write(slot: int, linears: Sequence["SlottedLinear"], prepared: Sequence[list[torch.Tensor] | None]) -> None:
        """Copies the outcome of ``prepare`` into a slot that no request uses."""
        pieces = [of_linear or linear._identity for linear, of_linear in zip(linears, prepared, strict=True)]
        targets = [linear._targets[slot] for linear in linears]
        torch._foreach_copy_(list(itertools.chain(*targets)), list(itertools.chain(*pieces)))
        for linear, of_linear in zip(linears, prepared, strict=True):
            linear._adapted[slot] = of_linear is not None

    def _tensors(self, adapter: Adapter, part: str) -> dict[str, torch.Tensor]:
        """Returns this rank's share of an accepted adapter's tensors for a part.

        It is empty where the adapter leaves the part alone.
        """
        tensors = adapter.module_tensors(part)
        return self._shares[part].of(self._method, tensors) if tensors else {}

    def is_idle(self, slots: Slots) -> bool:
        """Returns whether these rows are known to have no adapter here.

        The frozen linear alone then computes them.
        """
        return isinstance(slots, int) and not self._adapted[slots]

    @abc.abstractmethod
    def inputs(self, x_TI: torch.Tensor, slots: Slots) -> list[torch.Tensor]:
        """Returns what the frozen weight reads: one input for all parts, or one for each."""

    @abc.abstractmethod
    def output(self, x_TI: torch.Tensor, y_TO: torch.Tensor, slots: Slots) -> torch.Tensor:
        """Returns the adapted output, from the linear's own input and from the frozen weight's output."""

    @abc.abstractmethod
    def _identity_tensors(self, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Returns what an empty slot holds, as views without memory of their own."""

    @abc.abstractmethod
    def _pieces(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Returns a slot's tensors as views, one for each tensor of an adapter that fills them."""

    @abc.abstractmethod
    def _trained(self, adapter: Adapter) -> list[Trained | None]:
        """Returns this rank's share of what an accepted adapter holds for each piece.

        It is None where the part has no adapter.
        """

    @classmethod
    @abc.abstractmethod
    def _computed(cls, trained: Sequence[Trained], method: AdapterMethod, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Yields what each trained tensor becomes, before it is rounded to the slots' ``dtype`` or after."""


def _same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is right or left is None or right is None:
        return left is right
    return left.dtype == right.dtype and torch.equal(left, right)
