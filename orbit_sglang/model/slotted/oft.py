"""This module is OFT in the slots: the input is rotated first, ``y = (x R) W^T``.

Dimension suffixes: T tokens of a batch, I input width, O output width, N blocks, B block size, E free entries of a
block, P rotations of a linear (one, or one per part of a fused projection in split mode).
"""

from collections.abc import Iterator, Sequence

import torch

from orbit_kernels.adapters import OFTMethod
from orbit_kernels.adapters.oft import reference as oft
from orbit_kernels.contract.payload import Adapter
from orbit_sglang.control.slots import SLOTS
from orbit_sglang.model.slotted.slotted_linear import Slots, SlottedLinear, Trained

ENTRIES_TOGETHER = 1 << 21
"""Rotations of blocks with up to this many free entries are computed together.

That bounds what is held beside the result to some 100 MiB.
"""


class OFTLinear(SlottedLinear):
    """An ``OFTLinear`` has one rotation of its input per slot, or one per slot and part."""

    _method: OFTMethod

    @property
    def _num_rotations(self) -> int:
        return len(self.parts) if self._split else 1

    def _identity_tensors(self, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor]:
        num_blocks, _ = next(iter(self._shapes.values()))["oft_R"]
        identity_BB = torch.eye(self._method.block_size, dtype=dtype, device=device)
        return (identity_BB.expand(self._num_rotations, num_blocks, -1, -1),)

    def _pieces(self, r_PNBB: torch.Tensor) -> list[torch.Tensor]:
        return list(r_PNBB.unbind())

    def _trained(self, adapter: Adapter) -> list[Trained | None]:
        parts = [self._tensors(adapter, part) for part in list(self.parts)[: self._num_rotations]]
        return [("oft_R", tensors["oft_R"]) if tensors else None for tensors in parts]

    @classmethod
    def _computed(cls, trained: Sequence[Trained], method: OFTMethod, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        for group_NE in _groups([entries_NE for _, entries_NE in trained]):
            r_NBB = method.rotation({"oft_R": torch.cat(group_NE)}).to(dtype)
            yield from r_NBB.split([len(entries_NE) for entries_NE in group_NE])

    def inputs(self, x_TI: torch.Tensor, slots: Slots) -> list[torch.Tensor]:
        """Returns the rotated activations, in the shape and dtype of ``x``."""
        return [self._rotate(x_TI, index, slots) for index in range(self._num_rotations)]

    def output(self, x_TI: torch.Tensor, y_TO: torch.Tensor, slots: Slots) -> torch.Tensor:
        """Returns the frozen weight's output as it is."""
        return y_TO

    def _rotate(self, x_TI: torch.Tensor, index: int, slots: Slots) -> torch.Tensor:
        if isinstance(slots, int):
            return oft.rotate(x_TI, self.slots[slots][0][index])
        rotated_TI = x_TI
        for slot in SLOTS:
            rotated_TI = torch.where(slots == slot, oft.rotate(x_TI, self.slots[slot][0][index]), rotated_TI)
        return rotated_TI


def _groups(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yields the tensors in order, in groups of up to ``ENTRIES_TOGETHER`` elements, or of one."""
    group: list[torch.Tensor] = []
    for tensor in tensors:
        if group and sum(map(torch.numel, group)) + tensor.numel() > ENTRIES_TOGETHER:
            yield group
            group = []
        group.append(tensor)
    if group:
        yield group
