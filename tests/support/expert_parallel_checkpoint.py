"""Checkpoints of ranks that divide the experts: saved, resumed, refused, and cut short by a death."""

import json
import os
import shutil
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from orbit_verl.worker import checkpoint
from tests.support.engines import sequences
from tests.support.expert_parallel_engine import engine_of, state, train_step

CRASHED = 3
"""Exit code of the rank that dies on purpose."""


def checkpoints(folders, rank: int, save, out: Path) -> None:
    """Resume what one process saved; save for one process; experts of one rank have no optimiser state."""
    for base in ("fp32", "lopsided"):
        resumed = engine_of(folders, base, "oft", 2)
        resumed.load_checkpoint(folders[f"{base}_checkpoint"])
        save(f"resumed {base}", state(resumed))
        train_step(resumed, sequences(2)[rank::2])
        save(f"resumed {base} and trained", state(resumed))
        engine = engine_of(folders, base, "oft", 2)
        train_step(engine, sequences(1)[rank::2])
        engine.save_checkpoint(str(out / f"{base}_of_two"), global_step=1)
        save(f"saved {base}", state(engine))
        train_step(engine, sequences(2)[rank::2])
        save(f"saved {base} and trained", state(engine))
        again = engine_of(folders, base, "oft", 2)
        again.load_checkpoint(str(out / f"{base}_of_two"))
        train_step(again, sequences(2)[rank::2])
        assert all(torch.equal(tensor, state(engine)[name]) for name, tensor in state(again).items())


def refusals(folders, rank: int, save, out: Path) -> None:
    """Broken checkpoints and layouts; every rank refuses."""
    messages = []
    engine = engine_of(folders, "fp32", "oft", 2)
    before = engine.export_adapter().digest()
    if rank == 0:
        shutil.copytree(out / "fp32_of_two", out / "no_rng")
        (out / "no_rng" / "rng_rank_1.safetensors").unlink()
    dist.barrier()
    for broken in (folders["no_tensor"], folders["no_state"], folders["foreign"], str(out / "no_rng")):
        messages.append(refusal(partial(engine.load_checkpoint, broken)))
    assert engine.export_adapter().digest() == before
    for base, size in (("fp32", 3), ("fp32", 4), ("dense", 2), ("odd", 2), ("fp32", 1)):
        messages.append(refusal(partial(engine_of, folders, base, "oft", size)))
    save("refusals", {"text": torch.frombuffer(bytearray(json.dumps(messages).encode()), dtype=torch.uint8)})


def refusal(call) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def crash(folders, rank: int, save, out: Path) -> None:
    """The second rank dies while a second checkpoint is written to the same folder."""
    engine = engine_of(folders, "fp32", "oft", 2)
    engine.save_checkpoint(str(out / "crashed"), global_step=1)
    save("before the crash", state(engine))
    train_step(engine, sequences(1)[rank::2])
    if rank == 1:
        checkpoint._write_tensors = lambda path, tensors: os._exit(CRASHED)
    try:
        engine.save_checkpoint(str(out / "crashed"), global_step=2)
    except RuntimeError as error:
        save("crash", {"noticed": torch.tensor([len(str(error))])})
