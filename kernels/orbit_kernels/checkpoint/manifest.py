"""This module says what the base is, to the bit, for trainer and server alike.

A manifest has the format of every linear and a digest of every stored tensor.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from orbit_kernels.formats.common.weight_format import WeightFormat


def tensor_digest(tensor: torch.Tensor) -> str:
    """Returns the SHA-256 over dtype, shape and bits, as hexadecimal digits; a contiguous CPU tensor is not copied."""
    data = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{_dtype_name(data)}|{tuple(data.shape)}|".encode())
    digest.update(data.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True, order=True)
class Cut:
    """A ``Cut`` is a range of one dimension of a stored tensor, as a rank of a server holds it.

    It is written behind the tensor's name.
    """

    dim: int
    start: int
    stop: int

    def __str__(self) -> str:
        return f"[{self.dim}, {self.start}:{self.stop}]"

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns that part of a tensor, as a view."""
        return tensor.narrow(self.dim, self.start, self.stop - self.start)


_CUT_NAME = re.compile(r"(?P<name>.+)\[(?P<dim>\d+), (?P<start>\d+):(?P<stop>\d+)\]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseManifest:
    """A ``BaseManifest`` lists a base model's formats and tensors.

    Attributes:
        formats: ``WeightFormat.describe()`` of every linear, by module name.
        tensors: ``dtype``, ``shape`` and ``sha256`` of every stored tensor, by its name in the checkpoint; of every
            part of one that the ranks of a server divide, by that name with the ``Cut`` behind it.
    """

    formats: Mapping[str, dict[str, Any]]
    tensors: Mapping[str, dict[str, Any]]

    @classmethod
    def of(
        cls,
        formats: Mapping[str, WeightFormat],
        tensors: Iterable[tuple[str, torch.Tensor]],
        cuts: Mapping[str, Sequence[Cut]] | None = None,
    ) -> "BaseManifest":
        """Digests tensors one by one, so that they may be made as they are asked for.

        Args:
            formats: of every linear, by module name.
            tensors: by name.
            cuts: names of the tensors that are to be digested in parts, and the parts.

        Raises:
            ValueError: the parts of a tensor are not the whole of it, or do not fit it.
        """
        entries = {}
        for name, tensor in tensors:
            parts = (cuts or {}).get(name)
            if parts is None:
                entries[name] = _entry(tensor)
                continue
            _require_whole(name, tensor, parts)
            entries |= {f"{name}{cut}": _entry(cut.of(tensor)) for cut in parts}
        described = {module: weight_format.describe() for module, weight_format in formats.items()}
        return cls(formats=described, tensors=entries)

    @classmethod
    def union(cls, ranks: Sequence["BaseManifest"]) -> "BaseManifest":
        """Returns what the ranks of a server, or of a trainer, hold together; what several hold is the same.

        Raises:
            ValueError: ranks hold different things under one name; both are given.
        """
        first, *others = ranks
        formats, tensors = dict(first.formats), dict(first.tensors)
        for rank, other in enumerate(others, start=1):
            for ours, theirs in ((formats, other.formats), (tensors, other.tensors)):
                common = ours.keys() & theirs.keys()
                holders = ("the ranks before", f"rank {rank}")
                difference = _first_difference(_only(ours, common), _only(theirs, common), holders)
                if difference is not None:
                    raise ValueError(f"ranks that hold one base together differ: {difference}")
                ours |= theirs
        return cls(formats=formats, tensors=tensors)

    @property
    def cuts(self) -> dict[str, tuple[Cut, ...]]:
        """Returns the parts, in order, of every tensor that is listed in parts."""
        found: dict[str, list[Cut]] = {}
        for match in filter(None, map(_CUT_NAME.fullmatch, self.tensors)):
            found.setdefault(match["name"], []).append(Cut(*(int(match[key]) for key in ("dim", "start", "stop"))))
        return {name: tuple(sorted(cuts)) for name, cuts in found.items()}

    @property
    def digest(self) -> str:
        """Returns the SHA-256 over formats and tensors, whatever their order."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Returns the manifest as JSON text; equal manifests give equal text."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "BaseManifest":
        """Reads ``to_json``'s text.

        Raises:
            ValueError: it is something else.
        """
        value = json.loads(text)
        fields = {field.name for field in dataclasses.fields(cls)}
        if (
            not isinstance(value, dict)
            or value.keys() != fields
            or not all(isinstance(v, dict) for v in value.values())
        ):
            raise ValueError(f"not a base manifest: expected a JSON object of objects with the keys {sorted(fields)}")
        return cls(**value)


def first_difference(ours: BaseManifest, theirs: BaseManifest, holders: tuple[str, str]) -> str | None:
    """Returns the first thing in which two bases differ, with its name and both values.

    It is None when they are the same to the bit. Formats come first, because a wrong format explains differing tensors;
    then come tensors by name.

    Args:
        ours: one base.
        theirs: the other.
        holders: who holds each, for the text.
    """
    return _first_difference(ours.formats, theirs.formats, holders) or _first_difference(
        ours.tensors, theirs.tensors, holders
    )


def _first_difference(
    ours: Mapping[str, dict[str, Any]], theirs: Mapping[str, dict[str, Any]], holders: tuple[str, str]
) -> str | None:
    for name in sorted(ours.keys() | theirs.keys()):
        left, right = ours.get(name), theirs.get(name)
        if left is None or right is None:
            return f"{name}: {holders[0]} has {left or 'none'}, {holders[1]} has {right or 'none'}"
        # The format itself before its parameters.
        for key in sorted(left.keys() | right.keys(), key=lambda key: (key != "format", key)):
            if left.get(key) != right.get(key):
                return f"{name}: {key} is {left.get(key)} in {holders[0]} and {right.get(key)} in {holders[1]}"
    return None


def _only(entries: Mapping[str, dict[str, Any]], names: Iterable[str]) -> dict[str, dict[str, Any]]:
    return {name: entries[name] for name in names}


def _entry(tensor: torch.Tensor) -> dict[str, Any]:
    return {"dtype": _dtype_name(tensor), "shape": list(tensor.shape), "sha256": tensor_digest(tensor)}


def _require_whole(name: str, tensor: torch.Tensor, parts: Sequence[Cut]) -> None:
    """Checks that the parts, in order, follow one another from the start to the end of one dimension."""
    dims = {cut.dim for cut in parts}
    dim = dims.pop()
    size = tensor.shape[dim] if not dims and dim < tensor.dim() else None
    starts, stops = [cut.start for cut in parts], [cut.stop for cut in parts]
    if size is None or [*starts, size] != [0, *stops]:
        listed = ", ".join(map(str, parts))
        raise ValueError(f"{name} {tuple(tensor.shape)}: the parts {listed} are not the whole of it")


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
