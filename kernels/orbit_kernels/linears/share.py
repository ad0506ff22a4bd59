"""This module says what one rank of a trainer or of a server holds of a linear, under tensor parallelism."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from torch import Tensor


class Divisible(Protocol):
    """A ``Divisible`` knows where the tensors that belong to a weight may be cut.

    A ``WeightFormat`` and an ``AdapterMethod`` are such.
    """

    def shard_rows(self, tensors: Mapping[str, "Tensor"], start: int, stop: int) -> Mapping[str, "Tensor"]:
        """Returns the tensors of a range of the weight's rows."""
        ...

    def shard_columns(self, tensors: Mapping[str, "Tensor"], start: int, stop: int) -> Mapping[str, "Tensor"]:
        """Returns the tensors of a range of the weight's columns."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """A ``Share`` is the rows and columns of one linear that a rank holds: all, or one of equal ranges of either.

    Attributes:
        shape: rows and columns of the whole weight.
        rows: those held.
        columns: those held.
    """

    shape: tuple[int, int]
    rows: range
    columns: range

    @classmethod
    def whole(cls, rows: int, columns: int) -> Self:
        """Makes the share that is all of a linear."""
        return cls(shape=(rows, columns), rows=range(rows), columns=range(columns))

    @property
    def has_all_rows(self) -> bool:
        """Returns whether every rank holds all rows."""
        return len(self.rows) == self.shape[0]

    @property
    def has_all_columns(self) -> bool:
        """Returns whether every rank holds all columns."""
        return len(self.columns) == self.shape[1]

    def of(self, kind: Divisible, tensors: Mapping[str, "Tensor"]) -> Mapping[str, "Tensor"]:
        """Returns what belongs to the share, from what belongs to the whole weight; views where possible.

        Args:
            kind: of the tensors.
            tensors: the weight's, as stored, or an adapter's.

        Raises:
            ValueError: a boundary cuts what ``kind`` keeps whole.
        """
        if not self.has_all_rows:
            tensors = kind.shard_rows(tensors, self.rows.start, self.rows.stop)
        if not self.has_all_columns:
            tensors = kind.shard_columns(tensors, self.columns.start, self.columns.stop)
        return tensors


def divided_dim(held: Sequence[int], whole: Sequence[int]) -> int | None:
    """Returns the dimension in which a rank holds a part of a tensor, from the shapes of part and whole.

    It is None where the rank holds all.
    """
    divided = [dim for dim, (part, size) in enumerate(zip(held, whole, strict=True)) if part != size]
    if not divided:
        return None
    (dim,) = divided
    return dim
