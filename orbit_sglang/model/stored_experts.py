"""This module keeps routed experts as the checkpoint stores them, whatever computes with them."""

import abc
from collections.abc import Iterator

import torch
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase

from orbit_kernels.experts import ExpertAdapter
from orbit_kernels.frozen.product import StoredWeight
from orbit_kernels.linears.share import Share


class StoredExperts(FusedMoEMethodBase):
    """A ``StoredExperts`` is a method of SGLang's for the experts of one layer.

    It keeps their tensors and takes an adapter.

    Attributes:
        adapter: what happens around the products.
    """

    adapter: ExpertAdapter

    @property
    @abc.abstractmethod
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Returns the projections that are multiplied as one."""

    @abc.abstractmethod
    def linear(self, group: tuple[str, ...], expert: int | None) -> dict[str, Share]:
        """Returns fused projections by name, of one expert, or with None of what all share."""

    @abc.abstractmethod
    def stored_by_name(self, layer: torch.nn.Module) -> Iterator[tuple[str, StoredWeight]]:
        """Yields every expert's projections by their names in the checkpoint."""
