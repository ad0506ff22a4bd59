"""A training state is saved as safetensors and JSON only, so that reading a checkpoint executes nothing.

<folder>/adapter/                    peft's own format; loads anywhere
<folder>/optimizer.safetensors       fp32 masters, moments, step counts
<folder>/rng_rank_<r>.safetensors    random-number states of rank r
<folder>/state.json                  scheduler, version, global step, number of ranks, digests of base and reference

Adapter and optimiser state are whole, under peft's names, however the ranks divided them: another number of ranks, or
another way to divide the model, resumes with the same bits. Random-number states belong to ranks and are then left as
they are.
"""

import dataclasses
import json
import logging
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
import torch.distributed as dist
from verl.trainer.config import CheckpointConfig

from orbit_kernels import folders
from orbit_kernels.checkpoint.files import save_tensors
from orbit_kernels.contract.payload import Adapter
from orbit_kernels.contract.peft_folder import read_peft_folder, write_peft_folder

logger = logging.getLogger(__name__)

_FORMAT = 3
_ADAPTER, _OPTIMIZER, _STATE = "adapter", "optimizer.safetensors", "state.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingState:
    """A `TrainingState` is what a checkpoint holds.

    Args:
        adapter: the policy, whole; only the first rank's is written.
        optimizer: ``AdapterOptimizer.whole_state``, ``None`` when it is left out; only the first rank's is written.
        scheduler: the schedule's state as plain numbers, ``None`` when it is left out.
        rng: this rank's random-number states as tensors, empty when they are left out or of another number of ranks.
        num_ranks: that saved it.
        base_digest: of the frozen model that the adapter was trained on.
        reference_digest: of the adapter that the KL terms refer to, ``None`` for the base model.
        version: the adapter's version, as the servers know it.
        global_step: of the trainer.
    """

    adapter: Adapter
    optimizer: Mapping[str, torch.Tensor] | None
    scheduler: Mapping[str, Any] | None
    rng: Mapping[str, torch.Tensor]
    num_ranks: int
    base_digest: str
    reference_digest: str | None
    version: int
    global_step: int


def check_contents(config: CheckpointConfig) -> None:
    """Holds verl's names of what is saved and loaded against what there is.

    Raises:
        ValueError: another name, or no adapter (``model``).
    """
    for key in ("save_contents", "load_contents"):
        contents = set(getattr(config, key))
        if "model" not in contents or not contents <= {"model", "optimizer", "extra"}:
            raise ValueError(
                f"checkpoint.{key}={sorted(contents)}: must hold 'model' and may hold 'optimizer' and 'extra'"
            )


def save(folder: str | Path, state: TrainingState, base_model: str | None = None) -> None:
    """Writes a checkpoint, whose adapter names its ``base_model``; every rank calls it.

    The folder appears complete or not at all; it replaces an older one.
    """
    folder = Path(folder)
    partial = folders.staging(folder)
    if dist.get_rank() == 0:
        folders.begin(folder)
        write_peft_folder(state.adapter, partial / _ADAPTER, base_model)
        if state.optimizer is not None:
            _write_tensors(partial / _OPTIMIZER, state.optimizer)
        (partial / _STATE).write_text(json.dumps(_header(state), indent=2, sort_keys=True))
    dist.barrier()
    if state.rng:
        _write_tensors(partial / _rng_file(dist.get_rank()), state.rng)
    dist.barrier()
    if dist.get_rank() == 0:
        folders.commit(folder)
        logger.info("saved version %d at step %d to %s", state.version, state.global_step, folder)
    dist.barrier()


def load(folder: str | Path) -> TrainingState:
    """Reads a checkpoint.

    Raises:
        ValueError: the folder is missing or incomplete, or a file is not what ``save`` writes (a pickle, for instance).
    """
    folder = Path(folder)
    header = _read_header(folder / _STATE)
    optimizer = folder / _OPTIMIZER
    return TrainingState(
        adapter=read_peft_folder(folder / _ADAPTER),
        optimizer=_read_tensors(optimizer) if optimizer.exists() else None,
        rng=_read_rng(folder, header["num_ranks"]),
        **header,
    )


def rng_state() -> dict[str, torch.Tensor]:
    """Returns the states of Python's, NumPy's, torch's and, where present, CUDA's generators, as tensors."""
    _, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    states = {
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy_keys": torch.from_numpy(keys.astype(np.int64)),
        "numpy_position": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy_cached": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_rng_state(states: Mapping[str, torch.Tensor]) -> None:
    """Restores what ``rng_state`` returned."""
    gauss = states["python_gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), gauss[0] if gauss else None))
    position, has_gauss = states["numpy_position"].tolist()
    keys = states["numpy_keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, states["numpy_cached"].item()))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _header(state: TrainingState) -> dict[str, Any]:
    names = ("scheduler", "num_ranks", "base_digest", "reference_digest", "version", "global_step")
    return {"format": _FORMAT} | {name: getattr(state, name) for name in names}


def _read_header(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"checkpoint {path.parent}: no {path.name}; set the path to a folder that a run saved")
    try:
        header = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"checkpoint file {path} is not JSON: {error}") from None
    found = header.pop("format", None)
    if found != _FORMAT:
        raise ValueError(
            f"checkpoint file {path} has format {found!r}: this release reads {_FORMAT}; resume with the "
            "release that saved it, or start anew from its adapter with orbit.adapter.init_path"
        )
    return header


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except safetensors.SafetensorError as error:
        raise ValueError(f"checkpoint file {path} is not a safetensors file: {error}") from None


def _write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    save_tensors({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path)


def _read_rng(folder: Path, num_ranks: int) -> dict[str, torch.Tensor]:
    """Returns this rank's states, and nothing when those of one rank are missing, so that all ranks refuse alike."""
    files = [folder / _rng_file(rank) for rank in range(num_ranks)]
    if num_ranks != dist.get_world_size() or not all(file.exists() for file in files):
        return {}
    return _read_tensors(files[dist.get_rank()])


def _rng_file(rank: int) -> str:
    return f"rng_rank_{rank}.safetensors"
