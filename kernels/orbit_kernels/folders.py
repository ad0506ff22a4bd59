"""Results appear whole or not at all, also when a process is killed or a disk is full; one process writes in a folder."""

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path


class FolderInUseError(ValueError):
    """A `FolderInUseError` says that another process, which lives, holds a folder's lock."""


class FolderLock:
    """A `FolderLock` is the kernel's lock on a file; it ends with the process that holds it, however that ends."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def acquire(self) -> None:
        """Takes the lock at once.

        Raises:
            FolderInUseError: another process holds it; names its id.
        """
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno != errno.EWOULDBLOCK:
                raise
            raise FolderInUseError(f"process {self._holder()} holds {self.path}") from None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, str(os.getpid()).encode(), 0)

    def _holder(self) -> str:
        # Who has just taken it may not have written its id yet.
        deadline = time.monotonic() + 1
        while not (holder := os.pread(self._file, 32, 0).decode()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return holder or "of unknown id"

    def wait(self) -> None:
        """Takes the lock as soon as nobody else holds it."""
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def release(self) -> None:
        """Gives the lock up; the file stays, since who waits for it has it open."""
        os.close(self._file)


@contextlib.contextmanager
def written(folder: Path) -> Iterator[Path]:
    """Yields an empty sibling of ``folder`` to write to, which takes its place when all is written.

    An error leaves ``folder`` as it was, and gives back what the sibling took of the disk. After a kill, ``settle``
    does; one process may write a folder at a time.
    """
    try:
        yield begin(folder)
        commit(folder)
    finally:
        shutil.rmtree(staging(folder), ignore_errors=True)


def begin(folder: Path) -> Path:
    """Makes the sibling of ``folder`` to write to, empty, and returns it."""
    partial = staging(folder)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def staging(folder: Path) -> Path:
    """Returns the sibling of ``folder`` to write to."""
    return _sibling(folder, "partial")


def commit(folder: Path) -> None:
    """Puts what ``begin`` made in the place of ``folder``, once it is on the disk."""
    partial, old = staging(folder), _sibling(folder, "old")
    _sync_all(partial)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def settle(folder: Path) -> None:
    """Ends what a kill left half done in ``written`` or ``remove``: the folder is the old or the new one, and alone."""
    old = _sibling(folder, "old")
    if old.exists() and not folder.exists():
        old.rename(folder)
    for kind in ("partial", "old", "removed"):
        shutil.rmtree(_sibling(folder, kind), ignore_errors=True)


def remove(folder: Path) -> None:
    """Removes a folder; a kill leaves nothing by its name that is half a folder."""
    removed = _sibling(folder, "removed")
    shutil.rmtree(removed, ignore_errors=True)
    folder.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Writes a small file durably: it has the old text or the new one at every moment."""
    partial = _sibling(path, "partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Brings a file, or the names in a folder, to the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def unsettled(root: Path) -> list[Path]:
    """Returns the folders in ``root`` that ``settle`` has something to do for."""
    kinds = ("partial", "old", "removed")
    found = {path.name[1:].rpartition(".")[0] for kind in kinds for path in root.glob(f".*.{kind}") if path.is_dir()}
    return [root / name for name in sorted(found)]


def _sync_all(folder: Path) -> None:
    for parent, _, files in os.walk(folder):
        for name in files:
            sync(Path(parent, name))
        sync(Path(parent))


def _sibling(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}")
