"""This module reads the formats of a checkpoint folder."""

import functools
import pathlib
from collections.abc import Mapping
from typing import Any

from orbit_kernels.families import family_of
from orbit_kernels.formats import BaseScheme, read_base_scheme
from orbit_kernels.json_files import read_json


def read_scheme(model_path: str) -> BaseScheme:
    """Returns the formats of a checkpoint folder; a configuration that was read before is not analysed again.

    Raises:
        ValueError: there is no such folder, or its quantisation is not one of those implemented.
    """
    path = _config_file(model_path)
    return _read(path, path.stat().st_mtime_ns)


def read_config(model_path: str) -> dict[str, Any]:
    """Returns the content of a checkpoint folder's ``config.json``.

    Raises:
        ValueError: there is no such folder, or the file is cut short.
    """
    return read_json(_config_file(model_path))


def language_config(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of a ``config.json``'s content that describes the language model."""
    return fields.get("text_config") or fields


def language_prefix(model_path: str) -> str:
    """Returns what stands in front of the language model's names in this checkpoint.

    SGLang leaves it out while it builds.
    """
    family = family_of(read_config(model_path).get("model_type"))
    return "" if family is None else family.prefix


def _config_file(model_path: str) -> pathlib.Path:
    path = pathlib.Path(model_path) / "config.json"
    if not path.is_file():
        raise ValueError(f"model path {model_path}: no {path.name} there; download the model and name its folder")
    return path


@functools.cache
def _read(path: pathlib.Path, changed: int) -> BaseScheme:
    return read_base_scheme(read_json(path))
