"""The slots of an engine in Python (Qwen3, tied rotations)."""

import json
import subprocess

import pytest

from orbit_kernels.contract.peft_folder import write_peft_folder
from tests.support.adapters import random_adapter

pytestmark = pytest.mark.slow


def test_an_engine_in_python_stages_activates_and_rolls_back(forked_python, checkpoints, tmp_path):
    adapter = random_adapter(1, tied=True)
    write_peft_folder(adapter, tmp_path)
    command = [forked_python, "-m", "tests.support.engine_slots", str(checkpoints.plain("qwen3")), str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    (line,) = (line for line in ran.stdout.splitlines() if line.startswith("FOUND "))
    found = json.loads(line.removeprefix("FOUND "))
    assert found["staged"]["version"] == 3 and found["staged"]["digest"] == adapter.untied().digest()
    assert found["kept"] and "model.norm.weight" in found["tensors"]
    assert found["base"] == found["before"] == found["chosen"]
    assert found["base"]["spans"] == [[0, 0, 8]] and found["adapted"]["spans"] == [[3, 0, 8]]
    assert found["adapted"]["ids"] != found["base"]["ids"]
    assert found["refused"].startswith("HTTP 409 version_not_staged: ")
    assert found["rolled_back"] == 0 and found["discarded"] == [3]
    assert len(found["attacks"]) == 4
    assert all("is refused with --enable-orbit-slots" in attack for attack in found["attacks"]), found["attacks"]
    assert found["after"] == found["base"]
