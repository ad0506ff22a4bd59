"""This module is LoRA in the slots: a low-rank product is added to the output, ``y = x W^T + s (x A^T) B^T``.

Its rounding is that of ``orbit_kernels.adapters.lora.reference``, which the trainer uses too.

Dimension suffixes: T tokens of a batch, I input width, O output width of all parts, R rank, P tensors A of a linear
(one, or one per part of a fused projection in split mode).
"""

from collections.abc import Iterator, Sequence

import torch

from orbit_kernels.adapters import LoRAMethod
from orbit_kernels.adapters.lora import reference as lora
from orbit_kernels.contract.payload import Adapter
from orbit_sglang.control.slots import SLOTS
from orbit_sglang.model.slotted.slotted_linear import Slots, SlottedLinear, Trained


class LoRALinear(SlottedLinear):
    """A ``LoRALinear`` has one pair of factors per slot.

    A is tied or one per part, and B is always per part, stacked by rows.
    """

    _method: LoRAMethod

    def _identity_tensors(self, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        zero = torch.zeros((), dtype=dtype, device=device)
        a_shape = next(iter(self._shapes.values()))["lora_A"]
        num_a = len(self.parts) if self._split else 1
        return zero.expand(num_a, *a_shape), zero.expand(sum(self.parts.values()), self._method.rank)

    def _pieces(self, a_PRI: torch.Tensor, scaled_b_OR: torch.Tensor) -> list[torch.Tensor]:
        return [*a_PRI.unbind(), *scaled_b_OR.split(list(self.parts.values()))]

    def _trained(self, adapter: Adapter) -> list[Trained | None]:
        parts = [self._tensors(adapter, part) for part in self.parts]
        of_a, of_b = ([(leaf, part[leaf]) if part else None for part in parts] for leaf in ("lora_A", "lora_B"))
        return [*(of_a if self._split else [next(filter(None, of_a), None)]), *of_b]

    @classmethod
    def _computed(cls, trained: Sequence[Trained], method: LoRAMethod, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        b_OR = [tensor.float() for leaf, tensor in trained if leaf == "lora_B"]
        scaled_b_OR = iter(torch._foreach_mul(b_OR, method.scaling))
        for leaf, tensor in trained:
            yield next(scaled_b_OR) if leaf == "lora_B" else tensor

    def inputs(self, x_TI: torch.Tensor, slots: Slots) -> list[torch.Tensor]:
        """Returns the linear's own input."""
        return [x_TI]

    def output(self, x_TI: torch.Tensor, y_TO: torch.Tensor, slots: Slots) -> torch.Tensor:
        """Returns ``y + s (x A^T) B^T``."""
        if isinstance(slots, int):
            return y_TO + self._update(x_TI, slots)
        for slot in SLOTS:
            y_TO = torch.where(slots == slot, y_TO + self._update(x_TI, slot), y_TO)
        return y_TO

    def _update(self, x_TI: torch.Tensor, slot: int) -> torch.Tensor:
        a_PRI, scaled_b_OR = self.slots[slot]
        sizes = list(self.parts.values()) if self._split else [sum(self.parts.values())]
        return lora.fused_update(x_TI, a_PRI.unbind(), scaled_b_OR.split(sizes))
