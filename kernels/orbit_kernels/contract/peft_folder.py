"""This module reads and writes adapters as peft saves them: a folder with two files."""

import json
from pathlib import Path

import safetensors
import safetensors.torch

from orbit_kernels.adapters.config import AdapterConfig
from orbit_kernels.contract.payload import Adapter
from orbit_kernels.json_files import read_json

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


def read_peft_folder(folder: str | Path) -> Adapter:
    """Reads an adapter as peft saves it.

    Raises:
        ValueError: a file is missing, no JSON or no safetensors file, or the configuration is not one that the slots hold.
    """
    config, weights = Path(folder) / CONFIG_FILE, Path(folder) / WEIGHTS_FILE
    missing = [path.name for path in (config, weights) if not path.is_file()]
    if missing:
        raise ValueError(
            f"adapter folder {folder}: no {' and no '.join(missing)}; save one with peft's save_pretrained"
        )
    fields = read_json(config)
    try:
        tensors = safetensors.torch.load_file(weights)
    except safetensors.SafetensorError as error:
        raise ValueError(f"adapter file {weights} is not a safetensors file: {error}") from None
    try:
        return Adapter(tensors, AdapterConfig.from_peft(fields))
    except ValueError as error:
        raise ValueError(f"{config}: {error}") from None


def write_peft_folder(adapter: Adapter, folder: str | Path, base_model: str | None = None) -> None:
    """Writes ``adapter`` as peft saves it, and creates the folder.

    ``base_model`` is where peft's ``AutoPeftModelForCausalLM`` finds the base.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = adapter.config.to_peft() | {"base_model_name_or_path": base_model}
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True))
    (folder / WEIGHTS_FILE).write_bytes(adapter.to_peft_file())
