"""This module makes OFT an adapter method, ``y = (x R) W^T``.

``orbit_kernels.adapters.oft.reference`` has the mathematics.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from packaging.version import InvalidVersion, Version

from orbit_kernels.adapters.common.method import AdapterMethod, is_int, refuse_options, required

if TYPE_CHECKING:
    from torch import Generator, Tensor

PEFT_VERSION = "0.18.0"
"""This is the first peft whose Cayley-Neumann series is the one in ``oft``, and the first that writes its version."""

MAX_CAYLEY_NEUMANN_TERMS = 64
"""These are more terms than any adapter needs; the limit bounds the work that a payload can ask for."""

_ACCEPTED_PEFT_VALUES: dict[str, Any] = {"block_share": False, "coft": False}


def num_blocks(width: int, block_size: int, name: str = "input") -> int:
    """Returns the number of blocks of a rotation over ``width`` features.

    Raises:
        ValueError: the block size does not divide the width. It is never rounded.
    """
    if width % block_size:
        divisors = [d for d in (8, 16, 32, 64, 128, 256) if width % d == 0]
        raise ValueError(
            f"{name}: width {width} is not a multiple of the OFT block size {block_size}; "
            f"choose a block size that divides it{f', e.g. one of {divisors}' if divisors else ''}, "
            "or leave the module out of target_modules"
        )
    return width // block_size


def num_entries(block_size: int) -> int:
    """Returns the number of free entries of one skew-symmetric block: the strict upper triangle."""
    return block_size * (block_size - 1) // 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class OFTMethod(AdapterMethod):
    """``OFTMethod`` rotates a linear's input (orthogonal fine-tuning).

    Args:
        block_size: width of one rotation block; divides the input width of every target.
        cayley_neumann_terms: terms of the Cayley-Neumann series in peft's counting, ``None`` for the exact
            Cayley transform. Trainer and server use the same value, because it is part of the adapter.

    Raises:
        ValueError: a field is out of range.
    """

    type: ClassVar[str] = "oft"
    size_field: ClassVar[str] = "block_size"
    peft_type: ClassVar[str] = "OFT"
    leaves: ClassVar[tuple[str, ...]] = ("oft_R",)
    input_leaf: ClassVar[str] = "oft_R"
    acts_on_input: ClassVar[bool] = True

    block_size: int = 32
    cayley_neumann_terms: int | None = 5

    def __post_init__(self):
        if not is_int(self.block_size) or self.block_size < 2:
            raise ValueError(f"block_size {self.block_size!r}: must be an integer of at least 2, e.g. 32")
        terms = self.cayley_neumann_terms
        if terms is not None and (not is_int(terms) or not 2 <= terms <= MAX_CAYLEY_NEUMANN_TERMS):
            raise ValueError(
                f"cayley_neumann_terms {terms!r}: must be an integer from 2 to {MAX_CAYLEY_NEUMANN_TERMS} "
                "(5 is peft's default), or None for the exact Cayley transform"
            )

    def shapes(self, rows: int, columns: int, name: str = "input") -> dict[str, tuple[int, ...]]:
        """Returns the shape of the entries of the skew-symmetric blocks, [I / B, B * (B - 1) / 2]."""
        return {"oft_R": (num_blocks(columns, self.block_size, name), num_entries(self.block_size))}

    def to_peft(self) -> dict[str, Any]:
        """Returns the keys of peft's ``OFTConfig``."""
        return {
            "peft_version": PEFT_VERSION,
            "r": 0,
            "oft_block_size": self.block_size,
            "use_cayley_neumann": self.cayley_neumann_terms is not None,
            "num_cayley_neumann_terms": self.cayley_neumann_terms or 5,
            "init_weights": True,
            "module_dropout": 0.0,
            **_ACCEPTED_PEFT_VALUES,
        }

    @classmethod
    def from_peft(cls, peft: Mapping[str, Any]) -> "OFTMethod":
        """Reads ``OFTConfig``."""
        refuse_options(peft, _ACCEPTED_PEFT_VALUES)
        if num_blocks := peft.get("r"):
            raise ValueError(
                f"oft_block_size {peft.get('oft_block_size')!r}, r {num_blocks!r}: as many blocks for every linear, so blocks of "
                "another width for every input width; the slots have one width: train it with oft_block_size in place of r"
            )
        block_size, approximate = required(peft, "oft_block_size"), required(peft, "use_cayley_neumann")
        if not isinstance(approximate, bool):
            raise ValueError(f"use_cayley_neumann {approximate!r}: must be true or false, as it was trained")
        if not approximate:
            return cls(block_size=block_size, cayley_neumann_terms=None)
        if _peft_version(peft) < Version(PEFT_VERSION):
            raise ValueError(
                f"peft_version {peft.get('peft_version')!r}: before {PEFT_VERSION} peft summed another Cayley-Neumann series, "
                "so the adapter would mean something else; train it with a newer peft"
            )
        terms = required(peft, "num_cayley_neumann_terms")
        if terms is None:
            raise ValueError("num_cayley_neumann_terms None: must be a number when use_cayley_neumann is true")
        return cls(block_size=block_size, cayley_neumann_terms=terms)

    def initial(self, rows: int, columns: int, generator: "Generator") -> dict[str, "Tensor"]:
        """Returns zero entries, which are the identity rotation; nothing is drawn."""
        import torch

        return {leaf: torch.zeros(shape, device=generator.device) for leaf, shape in self.shapes(rows, columns).items()}

    def linear(self, x_TI: "Tensor", weight_OI: "Tensor", tensors: Mapping[str, "Tensor"]) -> "Tensor":
        """Returns ``(x R) W^T``."""
        from orbit_kernels.adapters.oft import reference as oft

        return oft.rotate(x_TI, self.rotation(tensors)) @ weight_OI.T

    def merge(self, weight_OI: "Tensor", tensors: Mapping[str, "Tensor"]) -> "Tensor":
        """Returns ``W R^T``."""
        from orbit_kernels.adapters.oft import reference as oft

        return oft.merge(weight_OI, self.rotation(tensors))

    def rotation(self, tensors: Mapping[str, "Tensor"]) -> "Tensor":
        """Returns the rotation blocks [I / B, B, B], at least fp32."""
        from orbit_kernels.adapters.oft import reference as oft

        return oft.rotation(tensors["oft_R"], self.block_size, self.cayley_neumann_terms)

    def shard_rows(self, tensors: Mapping[str, "Tensor"], start: int, stop: int) -> dict[str, "Tensor"]:
        """Returns the whole rotation: every row reads the same input."""
        return dict(tensors)

    def shard_columns(self, tensors: Mapping[str, "Tensor"], start: int, stop: int) -> dict[str, "Tensor"]:
        """Returns the blocks of those columns."""
        if start % self.block_size or stop % self.block_size:
            raise ValueError(
                f"columns {start} to {stop}: a boundary cuts an OFT block of {self.block_size}; choose a block size that "
                "divides every rank's share of the width"
            )
        return {"oft_R": tensors["oft_R"][start // self.block_size : stop // self.block_size]}


def _peft_version(peft: Mapping[str, Any]) -> Version:
    try:
        return Version(str(peft.get("peft_version") or "0").partition("@")[0])
    except InvalidVersion:
        return Version("0")
