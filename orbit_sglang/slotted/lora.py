"""LoRA in the slots: a low-rank product is added to the output, ``y = x W^T + s (x A^T) B^T``.

Rounding is that of ``orbit_kernels.lora``, which the trainer uses too.

Dimension suffixes: T tokens of a batch, I input width, O output width of all parts, R rank, P tensors A of a linear (one,
or one per part of a fused projection in split mode).
"""

import torch

from orbit_kernels import lora
from orbit_kernels.methods import LoRAMethod
from orbit_kernels.wire import Adapter
from orbit_sglang.slotted.base import Slots, SlottedLinear
from orbit_sglang.versions import SLOTS


class LoRALinear(SlottedLinear):
    """A linear with one pair of factors per slot: A tied or one per part, B always per part, stacked by rows."""

    _method: LoRAMethod

    def prepare(self, adapter: Adapter) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A [P, R, I] and ``s B`` [O, R]; zero for a part without an adapter."""
        parts = {part: self._tensors(adapter, part) for part in self.parts}
        adapted = [tensors for tensors in parts.values() if tensors]
        if not adapted:
            return None
        zeros = {part: {leaf: torch.zeros(shape) for leaf, shape in self._shapes[part].items()} for part in self.parts}
        tensors = [parts[part] or zeros[part] for part in self.parts]
        a_PRI = torch.stack([part["lora_A"].float() for part in (tensors if self._split else adapted[:1])])
        scaling = adapter.config.method.scaling
        return a_PRI, torch.cat([lora.scaled(part["lora_B"], scaling) for part in tensors])

    def _identity_tensors(self, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        zero = torch.zeros((), dtype=dtype, device=device)
        a_shape = next(iter(self._shapes.values()))["lora_A"]
        num_a = len(self.parts) if self._split else 1
        return zero.expand(num_a, *a_shape), zero.expand(sum(self.parts.values()), self._method.rank)

    def inputs(self, x_TI: torch.Tensor, slots: Slots) -> list[torch.Tensor]:
        """The linear's own input."""
        return [x_TI]

    def output(self, x_TI: torch.Tensor, y_TO: torch.Tensor, slots: Slots) -> torch.Tensor:
        """``y + s (x A^T) B^T``."""
        if isinstance(slots, int):
            return y_TO + self._update(x_TI, slots)
        for slot in SLOTS:
            y_TO = torch.where(slots == slot, y_TO + self._update(x_TI, slot), y_TO)
        return y_TO

    def _update(self, x_TI: torch.Tensor, slot: int) -> torch.Tensor:
        a_PRI, scaled_b_OR = self.slots[slot]
        sizes = list(self.parts.values()) if self._split else [sum(self.parts.values())]
        return lora.fused_update(x_TI, a_PRI.unbind(), scaled_b_OR.split(sizes))
