"""Linears of the frozen base: the weight never has a gradient, the adapter sits on the input.

Dimension suffixes: S sequence, B batch, T tokens (S * B), I input width, O output width.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class _FrozenMatmul(torch.autograd.Function):
    """``x W^T`` whose backward forms the gradient of ``x`` only; saves no activation."""

    @staticmethod
    def forward(ctx, x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight_OI)
        return nn.functional.linear(x_TI, weight_OI)

    @staticmethod
    def backward(ctx, grad_TO: torch.Tensor):
        (weight_OI,) = ctx.saved_tensors
        return grad_TO @ weight_OI, None


def frozen_matmul(x_SBI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """``x W^T`` [S, B, O] in the dtype of ``x``; only ``x`` receives a gradient.

    Activations are flattened to two dimensions, as the server has them: torch picks its GEMM by shape and strides, and
    two GEMMs may differ in the last bit.
    """
    return _FrozenMatmul.apply(x_SBI.flatten(0, 1), weight_OI).unflatten(0, x_SBI.shape[:2])


class FrozenHead(nn.Module):
    """The output layer in Megatron-Core's calling convention; ``weight`` is None when the embeddings are the head.

    Megatron-Core 0.18.0's own layer multiplies the strided, three-dimensional gradient of padded logits as it is
    (tensor_parallel/layers.py:376): on a CPU a training step of SmolLM2-135M then takes 17.5 s instead of 6.6 s.
    """

    def __init__(self, weight: nn.Parameter | None):
        super().__init__()
        self.weight = weight

    def forward(self, x_SBI: torch.Tensor, weight: torch.Tensor | None = None, **_megatron: Any):
        """Logits [S, B, vocabulary] of this or the given weight, and Megatron-Core's absent bias."""
        return frozen_matmul(x_SBI, self.weight if weight is None else weight), None


class FrozenLinear(nn.Module):
    """One or more frozen linears that read the same input, in Megatron-Core's calling convention.

    The parts' weights are stacked in one buffer [O, I] in their Hugging Face order, as SGLang stacks them, so the base
    and a shared rotation need one GEMM. The whole weight lives on every rank (no tensor parallelism).

    Args:
        input_size: I.
        output_size: O, the sum of the parts' rows.
        config: Megatron-Core's configuration; ``params_dtype`` is the weight's dtype.
        parts: rows of each part, by the Hugging Face leaf name.
        bias: always False; biased linears are refused with the checkpoint's configuration.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        /,
        *,
        config: Any,
        parts: Mapping[str, int],
        bias: bool,
        **_megatron: Any,
    ):
        super().__init__()
        assert not bias and sum(parts.values()) == output_size
        self.parts = dict(parts)
        self.register_buffer("weight", torch.empty(output_size, input_size, dtype=config.params_dtype))
        self.rotations = nn.ModuleList()
        self.adapter_enabled = True

    @property
    def input_size(self) -> int:
        """Width of the input, and of a rotation."""
        return self.weight.shape[1]

    def part_weights(self) -> dict[str, torch.Tensor]:
        """The parts' weights [rows, I] by leaf name, as views of the buffer."""
        return dict(zip(self.parts, self.weight.split(list(self.parts.values())), strict=True))

    def attach_shared(self, rotation: nn.Module) -> None:
        """Put one rotation on the input of all parts."""
        self.rotations = nn.ModuleList([rotation])

    def attach_per_part(self, rotations: Mapping[str, nn.Module]) -> None:
        """Put a rotation on each named part; the others read the plain input."""
        self.rotations = nn.ModuleList([rotations.get(part, nn.Identity()) for part in self.parts])

    def forward(self, x_SBI: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Outputs of all parts side by side [S, B, O] in the input's dtype, and Megatron-Core's absent bias."""
        return self._arrange(self._product(x_SBI)), None

    def _product(self, x_SBI: torch.Tensor) -> torch.Tensor:
        if not self.adapter_enabled or not self.rotations:
            return frozen_matmul(x_SBI, self.weight)
        if len(self.rotations) == 1:
            return frozen_matmul(self.rotations[0](x_SBI), self.weight)
        outputs = [
            frozen_matmul(rotation(x_SBI), weight)
            for rotation, weight in zip(self.rotations, self.part_weights().values(), strict=True)
        ]
        return torch.cat(outputs, dim=-1)

    def _arrange(self, y_SBO: torch.Tensor) -> torch.Tensor:
        return y_SBO


class FrozenQKVLinear(FrozenLinear):
    """Queries, keys and values; the output is regrouped as Megatron-Core reads it (one KV head and its queries a group)."""

    def __init__(self, *args: Any, config: Any, **kwargs: Any):
        super().__init__(*args, config=config, **kwargs)
        self._num_groups = config.num_query_groups

    def _arrange(self, y_SBO: torch.Tensor) -> torch.Tensor:
        parts = y_SBO.split(list(self.parts.values()), dim=-1)
        return torch.cat([part.unflatten(-1, (self._num_groups, -1)) for part in parts], dim=-1).flatten(-2)
