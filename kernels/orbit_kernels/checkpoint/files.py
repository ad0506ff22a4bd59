"""This module reads a Hugging Face checkpoint folder of safetensors files, tensor by tensor."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from orbit_kernels.formats.common.weight_format import TensorSpec, WeightFormat, as_dtype
from orbit_kernels.json_files import read_json

INDEX_FILE = "model.safetensors.index.json"
# Rotary frequencies that old Llama checkpoints still carry; they follow from the configuration.
_DERIVED_SUFFIX = ".rotary_emb.inv_freq"
# A safetensors file starts with the size of its JSON header, eight bytes, little-endian; no header is larger than this.
_SIZE_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000

_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file, with the permissions that the umask gives."""
    path.touch()
    mode = path.stat().st_mode
    safetensors.torch.save_file(dict(tensors), path, metadata=metadata)
    path.chmod(mode)  # safetensors 0.8 lets its owner alone read what it writes


class HFCheckpoint:
    """An ``HFCheckpoint`` has a checkpoint's names, shapes, dtypes and tensors; opening it reads the headers only.

    Raises:
        ValueError: the folder, its safetensors files or a file that its index lists does not exist, a file is truncated
            (the tensors whose bytes are missing are named), or its header cannot be read.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._files: dict[str, Path] = {}
        self._specs: dict[str, TensorSpec] = {}
        self._open: tuple[Path, safetensors.safe_open] | None = None
        for path in self._paths():
            specs = _read_header(path)
            self._specs |= specs
            self._files |= dict.fromkeys(specs, path)

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Returns the shape and dtype of every stored tensor."""
        return self._specs

    def files(self) -> dict[Path, list[str]]:
        """Returns the tensors of each file, in the order of its header."""
        names: dict[Path, list[str]] = {}
        for name, path in self._files.items():
            names.setdefault(path, []).append(name)
        return names

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def check(self, expected: Mapping[str, torch.Size | TensorSpec], *, optional: frozenset[str] = frozenset()) -> None:
        """Holds the files against the tensors that a model needs.

        Args:
            expected: by tensor name the spec, or the shape alone where any dtype will do.
            optional: names that may be present although the model does not need them.

        Raises:
            ValueError: tensors are missing, superfluous or of another shape or dtype; all are listed.
        """
        found = {name for name in self._files if not name.endswith(_DERIVED_SUFFIX)}
        problems = [f"{name}: missing" for name in sorted(expected.keys() - found)]
        problems += [f"{name}: superfluous" for name in sorted(found - expected.keys() - optional)]
        for name in sorted(expected.keys() & found):
            problems += _misfits(name, self._specs[name], expected[name])
        if problems:
            raise ValueError(f"checkpoint {self.folder} does not fit its config.json: {'; '.join(problems)}")

    def check_values(self, formats: Mapping[str, WeightFormat]) -> None:
        """Reads the scales, shapes and the like of each linear and refuses values that no weight has.

        One linear is read at a time, and no weight.

        Args:
            formats: by module name.

        Raises:
            ValueError: with every impossible value, by tensor name.
        """
        problems = []
        for module, weight_format in formats.items():
            names = {leaf: f"{module}.{leaf}" for leaf in weight_format.value_leaves}
            tensors = {leaf: self.tensor(name) for leaf, name in names.items() if name in self}
            problems += [f"{module}.{problem}" for problem in weight_format.problems(tensors)]
        if problems:
            raise ValueError(f"checkpoint {self.folder} holds impossible values: {'; '.join(problems)}")

    def tensor(self, name: str) -> torch.Tensor:
        """Returns one tensor, on the CPU, in its stored dtype.

        The file that was read last stays open: opening one parses its whole header, which takes milliseconds for
        thousands of experts.
        """
        path = self._files[name]
        if self._open is None or self._open[0] != path:
            self._open = (path, safetensors.safe_open(path, framework="pt"))
        return self._open[1].get_tensor(name)

    def stored_weight(
        self, module: str, weight_format: WeightFormat, rows: int, columns: int
    ) -> dict[str, torch.Tensor]:
        """Returns the stored tensors of one linear by leaf name, in the format's dtypes."""
        specs = weight_format.specs(rows, columns)
        return {leaf: as_dtype(self.tensor(f"{module}.{leaf}"), spec.dtype) for leaf, spec in specs.items()}

    def _paths(self) -> list[Path]:
        if not self.folder.is_dir():
            raise ValueError(f"model path {self.folder}: no such folder; set it to a Hugging Face checkpoint folder")
        index = self.folder / INDEX_FILE
        if index.exists():
            names = sorted(set(_weight_map(index).values()))
            paths = [self.folder / name for name in names]
        else:
            paths = sorted(self.folder.glob("*.safetensors"))
        missing = [path.name for path in paths if not path.exists()]
        if missing or not paths:
            raise ValueError(
                f"model path {self.folder}: {', '.join(missing) or '*.safetensors'} not found; only safetensors "
                "checkpoints are read, save the model with save_pretrained"
            )
        return paths


def _weight_map(index: Path) -> dict[str, str]:
    """Returns the file of each tensor."""
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise ValueError(f"{index}: has no weight_map from tensors to files; copy or download it again")
    return files


def _read_header(path: Path) -> dict[str, TensorSpec]:
    """Returns the shape and dtype of the tensors of one file.

    The header is read here and not by safetensors, which refuses a truncated file without a word on what is missing.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(_SIZE_BYTES)
        header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == _SIZE_BYTES else None
        if header_bytes is None or header_bytes > min(size, _MAX_HEADER_BYTES):
            raise ValueError(f"{path}: not a safetensors file, or truncated inside its header; copy it again")
        try:
            entries = json.loads(file.read(header_bytes))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: not a safetensors file, its header is no JSON: {error}") from None
    problem = _header_problem(entries)
    if problem is not None:
        raise ValueError(f"{path}: not a safetensors file, {problem}")
    entries.pop("__metadata__", None)
    available = size - _SIZE_BYTES - header_bytes
    missing = sorted(name for name, entry in entries.items() if entry["data_offsets"][1] > available)
    if missing:
        raise ValueError(f"{path}: truncated, the bytes of these tensors are missing: {', '.join(missing)}")
    return {name: _spec(path, name, entry) for name, entry in entries.items()}


def _header_problem(entries: Any) -> str | None:
    if not isinstance(entries, dict):
        return "its header is no JSON object"
    fields = {"dtype", "shape", "data_offsets"}
    odd = [
        name
        for name, entry in entries.items()
        if name != "__metadata__" and not (isinstance(entry, dict) and fields <= entry.keys())
    ]
    return f"its header gives {odd[0]} no dtype, shape or place" if odd else None


def _spec(path: Path, name: str, entry: Mapping) -> TensorSpec:
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"{path}: {name}: dtype {entry['dtype']} is not known; known are {', '.join(_DTYPES)}")
    spec = TensorSpec(tuple(entry["shape"]), _DTYPES[entry["dtype"]])
    begin, end = entry["data_offsets"]
    if end - begin != spec.nbytes:
        raise ValueError(
            f"{path}: {name}: {entry['dtype']} {spec.shape} needs {spec.nbytes} bytes, its header gives it {end - begin}; "
            "the file is damaged, copy it again"
        )
    return spec


def _misfits(name: str, found: TensorSpec, expected: torch.Size | TensorSpec) -> list[str]:
    spec = expected if isinstance(expected, TensorSpec) else TensorSpec(tuple(expected), found.dtype)
    problems = []
    if found.shape != spec.shape:
        problems.append(f"{name}: shape {found.shape}, expected {spec.shape} by config.json")
    if not spec.accepts(found.dtype):
        problems.append(f"{name}: dtype {found.dtype}, expected {spec.dtype} by config.json")
    return problems
