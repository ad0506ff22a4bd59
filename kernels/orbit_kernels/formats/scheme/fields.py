"""This module checks a configuration's fields, and has the rules that are read from it."""

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

from orbit_kernels.formats.common.weight_format import WeightFormat


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """``Rules`` give formats by regular expressions that match whole module names.

    Attributes:
        formats: the first expression that matches decides.
        ignored: modules that stay unquantised, whatever ``formats`` says.
    """

    formats: tuple[tuple[str, WeightFormat], ...] = ()
    ignored: tuple[str, ...] = ()


def refuse_unknown(where: str, fields: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuses fields whose meaning is not known; those that are None or empty mean nothing.

    Raises:
        ValueError: naming the fields.
    """
    unknown = sorted(name for name, value in fields.items() if name not in known and value not in (None, [], {}, False))
    if unknown:
        raise ValueError(
            f"{where}: unknown fields {unknown}; the file may be of a later format version, and is not guessed at"
        )


def require(where: str, fields: Mapping[str, Any], name: str, *allowed: Any) -> Any:
    """Returns the field's value, None when it is absent.

    Raises:
        ValueError: the value is not one of those allowed.
    """
    value = fields.get(name)
    if value not in allowed:
        raise ValueError(f"{where}: {name} is {value!r}; implemented: {', '.join(map(repr, allowed))}")
    return value


def path_pattern(name: str) -> str:
    """Returns a pattern for a module path, or part of one, anywhere in a name but only of whole components.

    ``*`` stands for anything. ``mlp.gate`` matches ``model.layers.0.mlp.gate`` and not
    ``model.layers.0.mlp.gate_proj``.
    """
    escaped = re.escape(name.removeprefix("model.")).replace(r"\*", ".*")
    return rf"(?:.*\.)?{escaped}(?:\..*)?"
