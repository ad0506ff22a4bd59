"""OFT in the slots: the input is rotated first, ``y = (x R) W^T``.

Dimension suffixes: T tokens of a batch, I input width, O output width, N blocks, B block size, P rotations of a linear
(one, or one per part of a fused projection in split mode).
"""

import torch

from orbit_kernels import oft
from orbit_kernels.methods import OFTMethod
from orbit_kernels.wire import Adapter
from orbit_sglang.slotted.base import Slots, SlottedLinear
from orbit_sglang.versions import SLOTS


class OFTLinear(SlottedLinear):
    """A linear with one rotation of its input per slot, or one per slot and part."""

    _method: OFTMethod

    def prepare(self, adapter: Adapter) -> tuple[torch.Tensor] | None:
        """Blocks [P, N, B, B]."""
        parts = [self._tensors(adapter, part) for part in self.parts][: self._num_rotations]
        if not any(parts):
            return None
        (identity_PNBB,) = self._identity_tensors(torch.float32, torch.device("cpu"))
        rotations = [adapter.config.method.rotation(part) if part else identity_PNBB[0] for part in parts]
        return (torch.stack(rotations),)

    @property
    def _num_rotations(self) -> int:
        return len(self.parts) if self._split else 1

    def _identity_tensors(self, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor]:
        num_blocks, _ = next(iter(self._shapes.values()))["oft_R"]
        identity_BB = torch.eye(self._method.block_size, dtype=dtype, device=device)
        return (identity_BB.expand(self._num_rotations, num_blocks, -1, -1),)

    def inputs(self, x_TI: torch.Tensor, slots: Slots) -> list[torch.Tensor]:
        """Rotated activations; shape and dtype of ``x``."""
        return [self._rotate(x_TI, index, slots) for index in range(self._num_rotations)]

    def output(self, x_TI: torch.Tensor, y_TO: torch.Tensor, slots: Slots) -> torch.Tensor:
        """The frozen weight's output as it is."""
        return y_TO

    def _rotate(self, x_TI: torch.Tensor, index: int, slots: Slots) -> torch.Tensor:
        if isinstance(slots, int):
            return oft.rotate(x_TI, self.slots[slots][0][index])
        rotated_TI = x_TI
        for slot in SLOTS:
            rotated_TI = torch.where(slots == slot, oft.rotate(x_TI, self.slots[slot][0][index]), rotated_TI)
        return rotated_TI
