"""This module says what quantising cost: sizes and rounding errors by kind of linear."""

import dataclasses
from collections.abc import Iterable, Mapping

import torch
from rich.table import Table

from orbit_kernels.frozen.product import StoredWeight


@dataclasses.dataclass
class LinearError:
    """A ``LinearError`` has sizes and rounding errors of the quantised linears that share a leaf name."""

    num_linears: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    squared_error: float = 0.0
    squared_weight: float = 0.0
    max_relative: float = 0.0

    @property
    def rms_relative(self) -> float:
        """Returns the RMS of the error over the RMS of the weights."""
        return (self.squared_error / self.squared_weight) ** 0.5 if self.squared_weight else 0.0

    @classmethod
    def total(cls, errors: Iterable["LinearError"]) -> "LinearError":
        """Returns all linears together."""
        errors = list(errors)
        sums = ("num_linears", "bytes_before", "bytes_after", "squared_error", "squared_weight")
        return cls(
            **{name: sum(getattr(error, name) for error in errors) for name in sums},
            max_relative=max(error.max_relative for error in errors),
        )

    def count(self, weight_OI: torch.Tensor, stored: StoredWeight) -> None:
        """Counts one linear; ``max_relative`` is in units of the largest magnitude of its weight."""
        exact = weight_OI.float()
        error = stored.dequantize(torch.float32) - exact
        largest = exact.abs().max().item()
        self.num_linears += 1
        self.bytes_before += weight_OI.nbytes
        self.bytes_after += stored.nbytes
        self.squared_error += error.square().sum(dtype=torch.float64).item()
        self.squared_weight += exact.square().sum(dtype=torch.float64).item()
        if largest:
            self.max_relative = max(self.max_relative, error.abs().max().item() / largest)


def table(errors: Mapping[str, LinearError], title: str) -> Table:
    """Returns sizes and errors by kind of linear and of all together, for a terminal."""
    result = Table(title=title)
    for column in ("linear", "number", "bytes before", "bytes after", "max error / largest", "RMS error / RMS"):
        result.add_column(column, justify="left" if column == "linear" else "right")
    for leaf in sorted(errors):
        result.add_row(leaf, *_cells(errors[leaf]))
    result.add_section()
    result.add_row("all", *_cells(LinearError.total(errors.values())))
    return result


def _cells(error: LinearError) -> tuple[str, ...]:
    return (
        str(error.num_linears),
        f"{error.bytes_before:,}",
        f"{error.bytes_after:,}",
        f"{error.max_relative:.4f}",
        f"{error.rms_relative:.4f}",
    )
