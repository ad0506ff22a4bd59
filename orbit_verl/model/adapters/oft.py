"""OFT on a frozen linear rotates its input.

Dimension suffixes: S sequence, B batch, I input width, O output width; N blocks, K block size.
"""

import torch

from orbit_kernels.adapters import OFTMethod
from orbit_kernels.adapters.oft import reference as oft
from orbit_verl.model.adapters.linear_adapter import LinearAdapter


class OFTAdapter(LinearAdapter):
    """An `OFTAdapter` has one rotation for all parts, or one for each target while other parts read the plain input."""

    method: OFTMethod

    def inputs(self, x_SBI: torch.Tensor) -> list[torch.Tensor]:
        """Returns rotated activations, which have shape and dtype of ``x``."""
        if self.tied:
            return [oft.rotate(x_SBI, self.rotations()[0])]
        rotations = dict(zip(self.trained, self.rotations(), strict=True))
        return [oft.rotate(x_SBI, rotations[part]) if part in rotations else x_SBI for part in self.parts]

    def output(self, x_SBI: torch.Tensor, y_SBO: torch.Tensor) -> torch.Tensor:
        """Returns the frozen weight's output as it is."""
        return y_SBO

    def rotations(self) -> list[torch.Tensor]:
        """Returns the blocks [N, K, K] in fp32 of the one rotation, or of each target's."""
        trained = list(self.trained.values())
        return [self.method.rotation(tensors) for tensors in (trained[:1] if self.tied else trained)]
