"""The formats of a checkpoint folder."""

import functools
import json
import pathlib

from orbit_kernels.formats import BaseScheme, read_base_scheme


def read_scheme(model_path: str) -> BaseScheme:
    """Formats of a checkpoint folder; a configuration that was read before is not analysed again.

    Raises:
        ValueError: there is no such folder, or its quantisation is not one of those implemented.
    """
    path = pathlib.Path(model_path) / "config.json"
    if not path.is_file():
        raise ValueError(f"model path {model_path}: no {path.name} there; download the model and name its folder")
    return _read(path.read_text())


@functools.cache
def _read(text: str) -> BaseScheme:
    return read_base_scheme(json.loads(text))
