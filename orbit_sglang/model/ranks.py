"""This module lets the ranks of one server agree.

Their schedulers take the same requests in the same iterations.
"""

from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.distributed.parallel_state import GroupCoordinator


class ServerRanks:
    """``ServerRanks`` makes collective calls.

    Every rank makes the same ones in the same order, at the same iteration of its scheduler.

    Args:
        group: SGLang's tensor-parallel group.
    """

    def __init__(self, group: GroupCoordinator):
        self._group, self._size = group.cpu_group, group.world_size
        self.is_first = group.rank_in_group == 0

    def all(self, here: bool) -> bool:
        """Returns whether ``here`` is true on every rank."""
        if self._size == 1:
            return here
        flag = torch.tensor(here, dtype=torch.int32)
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=self._group)
        return bool(flag)

    def gather(self, value: Any) -> list[Any]:
        """Returns every rank's value, by rank; that of a single rank is not copied."""
        if self._size == 1:
            return [value]
        values = [None] * self._size
        dist.all_gather_object(values, value, group=self._group)
        return values
