"""Locks that end with their process, and folders that are written whole."""

import os
import stat
import subprocess
import sys

import pytest

from orbit_kernels import folders
from orbit_kernels.folders import FolderInUseError, FolderLock

HOLD = """
import sys
from pathlib import Path
from orbit_kernels.folders import FolderLock
FolderLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_lock_names_its_holder_and_ends_with_it(holder, tmp_path):
    lock = FolderLock(tmp_path / "lock")
    with pytest.raises(FolderInUseError, match=f"process {holder.pid} holds .*lock"):
        lock.acquire()
    holder.kill()
    holder.wait()
    lock.acquire()
    assert (tmp_path / "lock").read_text() == str(os.getpid())
    lock.release()


def test_an_error_leaves_the_folder_as_it_was_and_nothing_beside_it(tmp_path):
    with folders.written(tmp_path / "made") as partial:
        (partial / "file").write_text("first")
    with pytest.raises(ZeroDivisionError), folders.written(tmp_path / "made") as partial:
        (partial / "file").write_text("second")
        _ = 1 / 0
    assert (tmp_path / "made" / "file").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


@pytest.mark.parametrize(
    ("there", "left"),
    [
        ({"made": "new", ".made.old": "old"}, "new"),
        ({".made.partial": "new", ".made.old": "old"}, "old"),
        ({"made": "old", ".made.partial": "half"}, "old"),
        ({".made.removed": "old"}, None),
    ],
)
def test_what_a_kill_left_is_settled(tmp_path, there, left):
    for name, text in there.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(text)
    assert folders.unsettled(tmp_path) == [tmp_path / "made"]
    folders.settle(tmp_path / "made")
    found = {path.name: (path / "file").read_text() for path in tmp_path.iterdir()}
    assert found == ({} if left is None else {"made": left})


def test_permissions_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        with folders.written(tmp_path / "made") as partial:
            (partial / "file").write_text("")
        folders.write_text(tmp_path / "tracker", "1")
        FolderLock(tmp_path / "lock").release()
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "made" / "file", *tmp_path.iterdir())}
    assert modes == {"file": 0o640, "made": 0o750, "tracker": 0o640, "lock": 0o640}
