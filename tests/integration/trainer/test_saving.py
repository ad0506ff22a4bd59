"""Whatever ends a save, at whichever of its operations on files: the run resumes, and loses no more than that step."""

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from orbit_verl.driver.step_folders import StepFolders
from orbit_verl.worker import checkpoint
from tests.support import faulty_saves
from tests.support.engines import make_engine, sequences, train_step

SUPPORT = Path(__file__).parents[2] / "support"


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    """The library that stands before libc."""
    library = tmp_path_factory.mktemp("shim") / "file_faults.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", library, SUPPORT / "file_faults.c", "-ldl"]
    subprocess.run(command, check=True)
    return library


@pytest.fixture(scope="module")
def states(checkpoints, tmp_path_factory):
    """What an engine saves after each of three steps."""
    folder = tmp_path_factory.mktemp("states")
    engine = make_engine(checkpoints["qwen3", torch.bfloat16], dtype="bf16")
    for step in (1, 2, 3):
        train_step(engine, sequences(step))
        engine.save_checkpoint(str(folder / str(step)), global_step=step)
    return folder


def saved_at_every_operation(shim, states, folder: Path, fault: str) -> list[Path]:
    """What is left of a save by the operation that the fault came at; the last one met none."""
    shutil.copytree(states, folder / "states")
    environment = {**os.environ, "LD_PRELOAD": str(shim), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.faulty_saves", folder, fault]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return [folder / str(number) for number in range(1, len(list(folder.glob("*/before"))) + 1)]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    state = checkpoint.load(folder)
    return {**state.adapter.tensors, **state.optimizer, **state.rng}


def check_resumes(folder: Path, states: Path) -> int:
    """The step that a run would resume from, which is whole to the bit and has its own data loader's state."""
    steps = StepFolders(folder)
    steps.settle()
    step = steps.committed()
    found, saved = tensors(steps.folder(step) / "actor"), tensors(states / str(step))
    assert found.keys() == saved.keys()
    assert [name for name in saved if not torch.equal(found[name], saved[name])] == []
    assert torch.load(steps.folder(step) / "data.pt")["seen"] == step
    assert {path.name for path in folder.glob(".*")} <= {".latest_checkpointed_iteration.txt.partial"}
    return step


def test_a_kill_at_any_operation_of_a_save_leaves_a_step_to_resume_from(shim, states, tmp_path):
    """Also in the middle of each file. At most the step that was being saved is repeated.

    docs/field-cases.md: nothing to resume from.
    """
    folders = saved_at_every_operation(shim, states, tmp_path, "kill")
    found = [check_resumes(folder / "run", states) for folder in folders]
    assert len(found) > 40
    assert set(found) == {2, 3} and found == sorted(found), found


def test_a_disk_that_fills_at_any_operation_leaves_a_step_to_resume_from(shim, states, tmp_path):
    """The error says so, and nothing half written takes up room. docs/field-cases.md: nothing to resume from."""
    *full, last = saved_at_every_operation(shim, states, tmp_path, "full")
    assert check_resumes(last / "run", states) == 3
    noticed = [folder for folder in full if (folder / "error").exists()]
    assert len(noticed) > 20
    for folder in noticed:
        assert re.search("No space left on device|os error 28", (folder / "error").read_text())
        assert not list((folder / "run").glob(".global_step*.partial"))
    assert {check_resumes(folder / "run", states) for folder in full} == {2, 3}


def test_permissions_of_a_step_follow_the_umask(states, tmp_path):
    steps = StepFolders(tmp_path / "run")
    before = os.umask(0o027)
    try:
        faulty_saves.save(steps, states, 1)
    finally:
        os.umask(before)
    found = {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in steps.root.rglob("*")}
    assert found == {(True, 0o750), (False, 0o640)}
