"""The folder that a run saves to and resumes from, looked at before Ray starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orbit_verl.driver.run_config import (
    resolve,
)
from orbit_verl.driver.run_folder import LOCK_FILE, take_run_folder


def test_a_validation_that_would_train_is_refused(run_config):
    resolve(run_config("trainer.val_only=true"))
    with pytest.raises(ValueError, match="verl would train; set val_before_train=true"):
        resolve(run_config("trainer.val_only=true", "trainer.val_before_train=false"))


def saved_step(folder: Path, step: int) -> Path:
    state = folder / f"global_step_{step}" / "actor" / "state.json"
    state.parent.mkdir(parents=True)
    state.write_text("{}")
    return state.parents[1]


def test_a_step_to_resume_from_must_be_there(run_config, tmp_path):
    folder = tmp_path / "run"
    here = f"trainer.default_local_dir={folder}"
    take_run_folder(run_config(here))
    (folder / "latest_checkpointed_iteration.txt").write_text("4")
    with pytest.raises(ValueError, match="names step 4, and .*global_step_4 is not there"):
        take_run_folder(run_config(here))
    take_run_folder(run_config(here, "trainer.resume_mode=disable"))
    saved_step(folder, 4)
    take_run_folder(run_config(here))

    def resume(path):
        take_run_folder(run_config(here, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}"))

    resume(folder / "global_step_4")
    for path in ("null", folder, f"{folder}/global_step_4/actor"):
        with pytest.raises(ValueError, match="must be the folder of a step"):
            resume(path)
    with pytest.raises(ValueError, match=r"no whole step there; whole steps in .*run: \[4\]"):
        resume(folder / "global_step_5")


def test_a_folder_that_another_run_has_is_refused(run_config, tmp_path):
    """The driver of that run is named; a run in another folder starts."""
    here = run_config(f"trainer.default_local_dir={tmp_path}/run")
    (tmp_path / "run").mkdir()
    held = "import fcntl, os, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); f.write(str(os.getpid()))"
    code = f"{held}; f.flush(); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "run" / LOCK_FILE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        other.stdout.readline()
        with pytest.raises(ValueError, match=f"another run writes there \\(process {other.pid} holds"):
            take_run_folder(here)
        take_run_folder(run_config(f"trainer.default_local_dir={tmp_path}/another"))
        other.kill()
    take_run_folder(here)


@pytest.fixture
def without_privileges():
    """Root may write anywhere."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    yield
    os.seteuid(user)


def test_a_folder_that_is_read_only_is_refused(run_config, without_privileges):
    with pytest.raises(ValueError, match=r"cannot be written \(Permission denied\); name another folder"):
        take_run_folder(run_config("trainer.default_local_dir=/run_of_nobody"))


def test_a_folder_that_cannot_be_written_is_refused(run_config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot be written \(Not a directory\); name another folder"):
        take_run_folder(run_config(f"trainer.default_local_dir={tmp_path}/file/run"))
