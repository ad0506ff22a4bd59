"""Saves of a step that a kill or a full disk ends at each of their operations on files, one after the other.

``python -m tests.support.faulty_saves FOLDER FAULT`` runs with ``file_faults.c`` loaded. FOLDER holds ``states/<step>``, as an
engine saved them; the save of step 3, of a run that keeps one step, meets the fault at its n-th operation in
``<n>/run``, for every n until a save meets none. Each save has a process of its own, forked from this one.
"""

import ctypes
import os
import shutil
import signal
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from orbit_verl.driver.step_folders import StepFolders, write_data
from orbit_verl.worker import checkpoint

FAULTS = {"kill": 0, "full": 1}
_LIBRARY = ctypes.CDLL(None)


def save(steps: StepFolders, states: Path, step: int) -> None:
    """What the run's driver and its trainer do in turns."""
    state = checkpoint.load(states / str(step))
    with steps.saved(step) as folder:
        checkpoint.save(folder / "actor", state, "base")
        write_data(folder, {"seen": step, "generator": torch.zeros(4096, dtype=torch.uint8)})
    steps.remove_old(1)


def main() -> None:
    """Make the folders."""
    root, fault = Path(sys.argv[1]), FAULTS[sys.argv[2]]
    number, status = 0, 1
    while status:
        number += 1
        pid = os.fork()
        if pid == 0:
            os._exit(child(root, fault, number))
        _, ended = os.waitpid(pid, 0)
        status = os.waitstatus_to_exitcode(ended)
        assert status in (0, -signal.SIGKILL if fault == 0 else 2), f"operation {number}: status {status}"


def child(root: Path, fault: int, number: int) -> int:
    """Save two steps, and a third one with the fault; 2 when it was noticed, 0 when it was not met."""
    try:
        dist.init_process_group("gloo", init_method=f"file://{root}/store_{number}", rank=0, world_size=1)
        folder = root / str(number) / "run"
        folder.mkdir(parents=True)
        steps = StepFolders(folder)
        # A step 3 of an earlier run lies there too, as after a start at an older step.
        for step in (1, 3, 2):
            save(steps, root / "states", step)
        shutil.copyfile(steps.tracker, root / str(number) / "before")
        _LIBRARY.arm(os.fsencode(folder), fault, ctypes.c_long(number))
        try:
            save(steps, root / "states", 3)
        except Exception as error:
            (root / str(number) / "error").write_text(f"{type(error).__name__}: {error}")
            return 2
        return 0 if _LIBRARY.counted() < number else 2
    except BaseException:
        traceback.print_exc()
        return 3


if __name__ == "__main__":
    main()
