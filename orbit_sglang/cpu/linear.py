"""This module computes a quantised linear on a CPU: its parts stay packed and are dequantised on use.

Dimension suffixes: T tokens, I input width, O output width.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase

from orbit_kernels.frozen.product import StoredWeight, frozen_matmul
from orbit_sglang.startup.enabled import slots_enabled
from orbit_sglang.startup.options import FrozenBaseConfig


class ReferenceLinear:
    """A ``ReferenceLinear`` computes ``y = x W^T`` by ``frozen_matmul``, as the trainer does.

    Args:
        parts: the logical parts in the order of their rows; views of SGLang's parameters.
        config: chunk size and modelled activations.
    """

    def __init__(self, parts: Sequence[StoredWeight], config: FrozenBaseConfig):
        self.parts = tuple(parts)
        self._config = config

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Maps x [..., I] to [..., O], of the same dtype."""
        y_TO = frozen_matmul(
            x.reshape(-1, x.shape[-1]),
            self.parts,
            chunk_bytes=self._config.chunk_bytes,
            activations=self._config.activations,
        )
        y = y_TO.unflatten(0, x.shape[:-1])
        return y if bias is None else y + bias


def attach(layer: LinearBase, parts: Sequence[StoredWeight], config: FrozenBaseConfig) -> None:
    """Lets a layer compute with the reference from now on."""
    layer.orbit_reference = ReferenceLinear(parts, config)


def around_process_weights(original: Callable, method: Any, layer: torch.nn.Module) -> None:
    """Leaves out repacking, which the reference does not need; runs around ``process_weights_after_loading``."""
    if not hasattr(layer, "orbit_reference"):
        original(method, layer)


def around_apply(
    original: Callable, method: Any, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes with the reference where a layer has one; runs around ``apply``."""
    reference = getattr(layer, "orbit_reference", None)
    return original(method, layer, x, bias) if reference is None else reference(x, bias)


def after_supported_act_dtypes(result: list[torch.dtype], *config: Any) -> list[torch.dtype]:
    """Adds fp32 to the activations, in which rounding is visible; runs after ``get_supported_act_dtypes``.

    The reference takes these too.
    """
    return [*result, torch.float32] if slots_enabled() else result
