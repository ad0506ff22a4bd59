"""This module defines a parameter of a fused linear whose parts keep their own number of rows."""

from collections.abc import Callable, Sequence

import torch
from sglang.srt.layers.parameter import BasevLLMParameter

_QKV_ORDER = ("q", "k", "v")


class StackedParameter(BasevLLMParameter):
    """A ``StackedParameter`` holds tensors of the parts of a linear, stacked by rows.

    SGLang 0.5.12 derives the rows of a part's scales from its row offset in the fused weight
    (``srt/layers/linear.py::QKVParallelLinear.weight_loader_v2``), so that two parts share a block whenever a part ends
    inside one.

    Args:
        data: the stack [sum of ``part_rows``, ...].
        part_rows: rows of each part.
        weight_loader: the loader of SGLang's linear, which calls the methods below.
    """

    def __init__(self, *, data: torch.Tensor, part_rows: Sequence[int], weight_loader: Callable):
        super().__init__(data=data, weight_loader=weight_loader)
        self._part_rows = list(part_rows)

    def load_qkv_weight(self, loaded_weight: torch.Tensor, *, shard_id: str, **_shard):
        """Fills the rows of ``q``, ``k`` or ``v``."""
        self._load(loaded_weight, _QKV_ORDER.index(shard_id))

    def load_merged_column_weight(self, loaded_weight: torch.Tensor, *, shard_id: int, **_shard):
        """Fills the rows of a part by its index."""
        self._load(loaded_weight, shard_id)

    def _load(self, loaded_weight: torch.Tensor, index: int) -> None:
        part = self.data.split(self._part_rows)[index]
        assert part.shape == loaded_weight.shape, f"{part.shape=}, {loaded_weight.shape=}"
        part.copy_(loaded_weight)
