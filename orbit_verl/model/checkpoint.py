"""A Hugging Face checkpoint folder of safetensors files, read tensor by tensor."""

import json
from collections.abc import Mapping
from pathlib import Path

import safetensors
import torch

_INDEX = "model.safetensors.index.json"
# Rotary frequencies that old Llama checkpoints still carry; they follow from the configuration.
_DERIVED_SUFFIX = ".rotary_emb.inv_freq"


class HFCheckpoint:
    """Names, shapes and tensors of a checkpoint. Opening it reads the files' headers only.

    Raises:
        ValueError: the folder, its safetensors files or a file that its index lists does not exist.
    """

    def __init__(self, folder: str | Path):
        self._folder = Path(folder)
        self._files = {name: path for path in self._paths() for name in _tensor_names(path)}

    def check(self, expected: Mapping[str, torch.Size], *, optional: frozenset[str] = frozenset()) -> None:
        """Hold the files against the tensors that a model needs.

        Args:
            expected: shape by tensor name.
            optional: names that may be present although the model does not need them.

        Raises:
            ValueError: tensors are missing, superfluous or of another shape; all are listed.
        """
        found = {name for name in self._files if not name.endswith(_DERIVED_SUFFIX)}
        problems = [f"{name}: missing" for name in sorted(expected.keys() - found)]
        problems += [f"{name}: superfluous" for name in sorted(found - expected.keys() - optional)]
        for name in sorted(expected.keys() & found):
            shape = self._shape(name)
            if shape != tuple(expected[name]):
                problems.append(f"{name}: shape {shape}, expected {tuple(expected[name])} by config.json")
        if problems:
            raise ValueError(f"checkpoint {self._folder} does not fit its config.json: {'; '.join(problems)}")

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU, in its stored dtype."""
        with safetensors.safe_open(self._files[name], framework="pt") as file:
            return file.get_tensor(name)

    def _shape(self, name: str) -> tuple[int, ...]:
        with safetensors.safe_open(self._files[name], framework="pt") as file:
            return tuple(file.get_slice(name).get_shape())

    def _paths(self) -> list[Path]:
        if not self._folder.is_dir():
            raise ValueError(f"model path {self._folder}: no such folder; set it to a Hugging Face checkpoint folder")
        index = self._folder / _INDEX
        if index.exists():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            paths = [self._folder / name for name in names]
        else:
            paths = sorted(self._folder.glob("*.safetensors"))
        missing = [path.name for path in paths if not path.exists()]
        if missing or not paths:
            raise ValueError(
                f"model path {self._folder}: {', '.join(missing) or '*.safetensors'} not found; only safetensors "
                "checkpoints are read, save the model with save_pretrained"
            )
        return paths


def _tensor_names(path: Path) -> list[str]:
    with safetensors.safe_open(path, framework="pt") as file:
        return list(file.keys())
