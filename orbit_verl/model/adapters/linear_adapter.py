"""This module holds what the adapters of a linear have in common, whatever their method.

Dimension suffixes: S sequence, B batch, I input width, O output width.
"""

import abc
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from orbit_kernels.adapters import AdapterMethod


class LinearAdapter(nn.Module, abc.ABC):
    """A `LinearAdapter` holds the trained tensors on one frozen linear; it leaves it as it is at the start.

    Args:
        method: the method, with its numbers.
        parts: rows of each part of the linear, by leaf name.
        targets: the parts that carry the adapter, in the order of ``parts``; ``model.targets.check_targets`` has been
            passed.
        tied: whether the targets share the one tensor that acts on the input.
        initial: makes the initial tensors of a part, of what this rank holds of the linear.
        dtype: of the trained tensors.
        device: of the trained tensors.
    """

    def __init__(
        self,
        method: AdapterMethod,
        parts: Mapping[str, int],
        targets: Sequence[str],
        *,
        tied: bool,
        initial: Callable[[str], Mapping[str, torch.Tensor]],
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__()
        self.method, self.parts, self.tied = method, dict(parts), tied
        self.trained = nn.ModuleDict()
        for part in targets:
            tensors = nn.ParameterDict({leaf: tensor.to(device, dtype) for leaf, tensor in initial(part).items()})
            if tied and self.trained:
                tensors[method.input_leaf] = self.trained[targets[0]][method.input_leaf]
            self.trained[part] = tensors

    def tensors(self) -> dict[tuple[str, str], nn.Parameter]:
        """Returns the trained tensors by part and leaf; a tied one is the same object for each part."""
        return {(part, leaf): tensor for part, tensors in self.trained.items() for leaf, tensor in tensors.items()}

    @abc.abstractmethod
    def inputs(self, x_SBI: torch.Tensor) -> list[torch.Tensor]:
        """Returns what the frozen weight reads: one input for all parts, or one for each."""

    @abc.abstractmethod
    def output(self, x_SBI: torch.Tensor, y_SBO: torch.Tensor) -> torch.Tensor:
        """Returns the adapted output, from the linear's own input and from the frozen weight's output."""
