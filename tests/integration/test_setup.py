"""`make setup` as a stranger meets it: what goes wrong is one clear line, and the second time takes seconds."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools import setup_env

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def clone(tmp_path):
    """The files that the set-up reads, without an environment."""
    for name in ("tools", "requirements", "patches"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def _run_setup(root, **environment):
    command = [sys.executable, "tools/setup_env.py"]
    return subprocess.run(command, cwd=root, env={**os.environ, **environment}, capture_output=True, text=True)


def test_another_python_is_refused_with_the_version_and_the_fix():
    with pytest.raises(
        setup_env.SetupError, match=r"needs Python 3\.12, got 3\.11 \(/usr/bin/python3\).*pyenv install"
    ):
        setup_env.check_python((3, 11), "/usr/bin/python3")


def test_an_interpreter_that_does_not_start_has_no_version(tmp_path):
    shim = tmp_path / "python3.12"
    shim.write_text("#!/bin/sh\necho 'version 3.12 is not installed' >&2\nexit 1\n")
    shim.chmod(0o755)
    assert setup_env.python_version(str(shim)) == (0, 0)
    assert setup_env.python_version(sys.executable) == setup_env.PYTHON


def test_an_environment_of_another_python_is_refused(clone):
    python = clone / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho 3 10\n")
    python.chmod(0o755)
    ran = _run_setup(clone)
    assert ran.returncode == 1
    assert "got 3.10" in ran.stderr and "remove .venv" in ran.stderr


def test_too_little_disk_is_refused_before_anything_is_made(clone, monkeypatch):
    monkeypatch.setattr(setup_env, "REQUIRED_FREE_BYTES", 10**18)
    with pytest.raises(setup_env.SetupError, match=r"needs 1000000000 GB free in .*, got \d"):
        setup_env.setup(clone)
    assert not (clone / ".venv").exists()


def test_a_failed_download_is_one_line_and_no_stamp(clone):
    nowhere = "http://127.0.0.1:9/simple"
    ran = _run_setup(clone, PIP_INDEX_URL=nowhere, PIP_NO_CACHE_DIR="1", PIP_RETRIES="0", PIP_CONFIG_FILE=os.devnull)
    assert ran.returncode == 1
    (line,) = [line for line in ran.stderr.splitlines() if line.startswith("setup:")]
    assert "installing uv failed" in line and "check the network" in line
    assert not (clone / ".venv" / setup_env.STAMP).exists()


def test_every_input_changes_the_digest(clone):
    digests = {setup_env.inputs_digest(clone)}
    for name in ("requirements/stack.txt", "pyproject.toml", "tools/setup_env.py", "patches/apply.py"):
        with (clone / name).open("a") as file:
            file.write("\n")
        digests.add(setup_env.inputs_digest(clone))
    assert len(digests) == 5


@pytest.mark.alone
def test_the_second_time_takes_seconds():
    assert _run_setup(ROOT).returncode == 0
    start = time.monotonic()
    ran = _run_setup(ROOT)
    assert ran.stdout == "setup: environment is up to date\n"
    assert time.monotonic() - start < 10


def test_pins_are_exact_and_name_no_host():
    lines = (ROOT / "requirements" / "stack.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert len(pins) > 200
    assert all(pin.count("==") == 1 and "://" not in pin and " @ " not in pin for pin in pins)


def _dry_run(recipe, python=sys.executable, **environment):
    return subprocess.run(
        ["bash", str(ROOT / "recipes" / recipe), "trainer.total_training_steps=7"],
        env={**os.environ, "DRY_RUN": "1", "ORBIT_PYTHON": str(python), **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("recipe", sorted(path.name for path in (ROOT / "recipes").glob("*_*.sh")))
def test_a_dry_run_prints_the_configuration_with_the_users_overrides(forked_python, recipe, tmp_path):
    ran = _dry_run(recipe, forked_python, OUTPUT_DIR=str(tmp_path / "out"))
    assert ran.returncode == 0, ran.stderr
    assert "strategy: orbit" in ran.stdout
    assert "total_training_steps: 7" in ran.stdout
    assert f"default_local_dir: {tmp_path}/out/checkpoints" in ran.stdout
    assert not (tmp_path / "out").exists()


def test_a_missing_input_is_refused_by_name():
    ran = _dry_run("tiny_arithmetic.sh", MODEL_PATH="/not/there")
    assert ran.returncode == 1
    assert (
        ran.stderr
        == "error: MODEL_PATH=/not/there does not exist; set MODEL_PATH to an existing path, or leave it unset\n"
    )
