"""A quantised linear on a CPU: packed parts, dequantised on use.

Dimension suffixes: T tokens, I input width, O output width.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.plugins.hook_registry import HookType

from orbit_kernels.frozen.product import StoredWeight, frozen_matmul
from orbit_sglang.startup.enabled import slots_enabled
from orbit_sglang.startup.options import FrozenBaseConfig
from orbit_sglang.upstream.hooks import Hook


class ReferenceLinear:
    """``y = x W^T`` by ``frozen_matmul``, as the trainer computes it.

    Args:
        parts: the logical parts in the order of their rows; views of SGLang's parameters.
        config: chunk size and modelled activations.
    """

    def __init__(self, parts: Sequence[StoredWeight], config: FrozenBaseConfig):
        self.parts = tuple(parts)
        self._config = config

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """X [..., I] to [..., O], same dtype."""
        y_TO = frozen_matmul(
            x.reshape(-1, x.shape[-1]),
            self.parts,
            chunk_bytes=self._config.chunk_bytes,
            activations=self._config.activations,
        )
        y = y_TO.unflatten(0, x.shape[:-1])
        return y if bias is None else y + bias


def method_hooks(method: str) -> list[Hook]:
    """The hooks that put the reference behind a linear method of SGLang, given as a dotted name that ends in a dot."""
    around = HookType.AROUND
    return [
        Hook(
            method + "process_weights_after_loading", around, around_process_weights, ("self", "layer"), cpu_only=True
        ),
        Hook(method + "apply", around, around_apply, ("self", "layer", "x", "bias"), cpu_only=True),
    ]


def attach(layer: LinearBase, parts: Sequence[StoredWeight], config: FrozenBaseConfig) -> None:
    """Let a layer compute with the reference from now on."""
    layer.orbit_reference = ReferenceLinear(parts, config)


def around_process_weights(original: Callable, method: Any, layer: torch.nn.Module) -> None:
    """Around ``process_weights_after_loading``: the reference needs no repacking."""
    if not hasattr(layer, "orbit_reference"):
        original(method, layer)


def around_apply(
    original: Callable, method: Any, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Around ``apply``."""
    reference = getattr(layer, "orbit_reference", None)
    return original(method, layer, x, bias) if reference is None else reference(x, bias)


def after_supported_act_dtypes(result: list[torch.dtype], *config: Any) -> list[torch.dtype]:
    """After ``get_supported_act_dtypes``: the reference also takes fp32 activations, in which rounding is visible."""
    return [*result, torch.float32] if slots_enabled() else result
