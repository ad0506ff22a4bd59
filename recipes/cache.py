"""This module builds a folder once for the settings that it was built with."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from orbit_kernels import folders
from orbit_kernels.folders import FolderLock

logger = logging.getLogger(__name__)

SETTINGS_FILE = "settings.json"


def build_once(folder: Path, settings: dict[str, Any], build: Callable[[Path], None]) -> bool:
    """Fills ``folder`` unless it holds the result of the same settings.

    The folder appears whole or not at all: ``build`` writes to a sibling that is renamed at the end. Who starts beside
    another waits for it.

    Args:
        folder: result; anything that it holds from other settings is replaced.
        settings: JSON values that determine the result.
        build: writes the result into the empty folder that it is given.

    Returns:
        Whether it was built now.

    Raises:
        ValueError: the folder exists and was not made by this function.
    """
    text = json.dumps(settings, indent=2, sort_keys=True)
    lock = FolderLock(folder.with_name(f".{folder.name}.lock"))
    try:
        lock.wait()
        folders.settle(folder)
        return _build(folder, text, build)
    finally:
        lock.release()


def _build(folder: Path, text: str, build: Callable[[Path], None]) -> bool:
    marker = folder / SETTINGS_FILE
    if folder.exists() and not marker.is_file():
        raise ValueError(f"{folder}: exists and has no {SETTINGS_FILE}, so it is not replaced; name another folder")
    if marker.is_file() and marker.read_text() == text:
        logger.info("%s is up to date", folder)
        return False
    with folders.written(folder) as partial:
        build(partial)
        (partial / SETTINGS_FILE).write_text(text)
    return True


def source_digest(files: Iterable[Path]) -> str:
    """Returns the SHA-256 over source files, as one of the settings of what they make."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
