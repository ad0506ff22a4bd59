"""LoRA on a frozen linear adds a low-rank product of its input to its output.

Rounding is that of ``orbit_kernels.adapters.lora.reference``, which the server uses too. A frozen base that rounds its
activations rounds them for its own product only.

Dimension suffixes: S sequence, B batch, T tokens (S * B), I input width, O output width, R rank.
"""

import torch

from orbit_kernels.adapters import LoRAMethod
from orbit_kernels.adapters.lora import reference as lora
from orbit_verl.model.adapters.linear_adapter import LinearAdapter


class LoRAAdapter(LinearAdapter):
    """A `LoRAAdapter` has one A (tied) or one per targeted part, and a B per targeted part; others get nothing."""

    method: LoRAMethod

    def inputs(self, x_SBI: torch.Tensor) -> list[torch.Tensor]:
        """Returns the linear's own input."""
        return [x_SBI]

    def output(self, x_SBI: torch.Tensor, y_SBO: torch.Tensor) -> torch.Tensor:
        """Returns ``y + s (x A^T) B^T``; activations are flattened to two dimensions, as the server has them."""
        x_TI, parts = x_SBI.flatten(0, 1), [self._factors(part, x_SBI) for part in self.parts]
        a_RI = [next(iter(self.trained.values()))["lora_A"]] if self.tied else [a for a, _ in parts]
        update_TO = lora.fused_update(x_TI, a_RI, [scaled_b for _, scaled_b in parts])
        return y_SBO + update_TO.unflatten(0, x_SBI.shape[:2])

    def _factors(self, part: str, x_SBI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns A and ``s B`` of a part; both are zero where it is not targeted."""
        if part in self.trained:
            tensors = self.trained[part]
            return tensors["lora_A"], lora.scaled(tensors["lora_B"], self.method.scaling)
        shapes = self.method.shapes(self.parts[part], x_SBI.shape[-1])
        return x_SBI.new_zeros(shapes["lora_A"]), x_SBI.new_zeros(shapes["lora_B"])
