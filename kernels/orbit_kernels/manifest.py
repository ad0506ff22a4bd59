"""What the base is, to the bit: format of every linear and a digest of every stored tensor, for trainer and server alike."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from orbit_kernels.formats.base import WeightFormat


def tensor_digest(tensor: torch.Tensor) -> str:
    """SHA-256 over dtype, shape and bits, as hexadecimal digits; a contiguous CPU tensor is not copied."""
    data = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{_dtype_name(data)}|{tuple(data.shape)}|".encode())
    digest.update(data.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseManifest:
    """A base model's formats and tensors.

    Attributes:
        formats: ``WeightFormat.describe()`` of every linear, by module name.
        tensors: ``dtype``, ``shape`` and ``sha256`` of every stored tensor, by its name in the checkpoint.
    """

    formats: Mapping[str, dict[str, Any]]
    tensors: Mapping[str, dict[str, Any]]

    @classmethod
    def of(cls, formats: Mapping[str, WeightFormat], tensors: Iterable[tuple[str, torch.Tensor]]) -> "BaseManifest":
        """Digest tensors one by one, so that they may be made as they are asked for."""
        return cls(
            formats={module: weight_format.describe() for module, weight_format in formats.items()},
            tensors={
                name: {"dtype": _dtype_name(tensor), "shape": list(tensor.shape), "sha256": tensor_digest(tensor)}
                for name, tensor in tensors
            },
        )

    @property
    def digest(self) -> str:
        """SHA-256 over formats and tensors, whatever their order."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """The manifest as JSON text; equal manifests give equal text."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "BaseManifest":
        """Read ``to_json``'s text.

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
    """The first thing in which two bases differ, with its name and both values; None when they are the same to the bit.

    Formats come first, because a wrong format explains differing tensors; then tensors by name.

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


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
