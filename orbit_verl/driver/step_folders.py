"""A run's checkpoints lie in ``trainer.default_local_dir``: one folder for each step, and verl's tracker of the last.

A step is saved once its folder is whole and on the disk and the tracker names it, in this order; a kill between any two
operations leaves the step before, or this one. Old steps are removed after that, as whole folders, and chosen from what
lies on the disk.
"""

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from verl.utils.checkpoint.checkpoint_manager import get_checkpoint_tracker_filename

from orbit_kernels import folders

ACTOR = "actor"
ADAPTER = "adapter"
_MARK = Path(ACTOR, "state.json")
_NAME = re.compile(r"global_step_(\d+)")


class StepFolders:
    """A `StepFolders` holds the steps in one folder.

    Args:
        root: ``trainer.default_local_dir``.
    """

    def __init__(self, root: Path):
        self.root = root
        self.tracker = Path(get_checkpoint_tracker_filename(str(root)))

    def settle(self) -> None:
        """Ends what a kill left half done; nobody else may be writing."""
        for folder in folders.unsettled(self.root):
            if _NAME.fullmatch(folder.name) or folder.name == ADAPTER:
                folders.settle(folder)

    def whole(self) -> list[int]:
        """Returns the steps whose folders lie there and hold a state, in order; other folders are not Orbit's."""
        names = [match for path in self.root.glob("*") if (match := _NAME.fullmatch(path.name))]
        return sorted(int(match[1]) for match in names if is_whole(self.root / match[0]))

    def committed(self) -> int | None:
        """Returns the step that a run resumes from, ``None`` if there is none.

        Raises:
            ValueError: the tracker is not a number, or its step is not there or not whole.
        """
        if not self.tracker.exists():
            return None
        text = self.tracker.read_text()
        try:
            step = int(text)
        except ValueError:
            raise ValueError(f"{self.tracker} holds {text!r}: must be the number of a step; {self._cure()}") from None
        if step not in self.whole():
            raise ValueError(
                f"{self.tracker} names step {step}, and {self.folder(step)} is not there or not whole; {self._cure()}"
            )
        return step

    def _cure(self) -> str:
        fresh = "start anew with trainer.resume_mode=disable"
        steps = self.whole()
        if not steps:
            return f"no whole step lies there: {fresh}"
        latest = self.folder(steps[-1])
        return (
            f"whole steps there: {steps}; resume with trainer.resume_mode=resume_path trainer.resume_from_path={latest}, "
            f"or {fresh}"
        )

    def folder(self, step: int) -> Path:
        """Returns where a step is saved."""
        return self.root / f"global_step_{step}"

    @contextlib.contextmanager
    def saved(self, step: int) -> Iterator[Path]:
        """Yields a folder to write a step to; it is committed when all of it is written.

        Raises:
            ValueError: the actor's state is not in it.
        """
        with folders.written(self.folder(step)) as partial:
            yield partial
            if not is_whole(partial):
                raise ValueError(
                    f"{partial / _MARK} is missing: trainer.default_local_dir must be a folder that all nodes share"
                )
        folders.write_text(self.tracker, str(step))

    def remove_old(self, keep: int) -> None:
        """Removes committed steps before the tracker's, so that ``keep`` with that one are left."""
        committed = self.committed()
        old = [step for step in self.whole() if committed is not None and step < committed]
        for step in old[: max(0, len(old) - (keep - 1))]:
            if not self.folder(step).is_symlink():
                folders.remove(self.folder(step))


def write_data(folder: Path, state: dict[str, Any]) -> None:
    """Writes where the run stands in its data, as verl reads it."""
    # torch.save hides the reason when it cannot write a file itself.
    written = io.BytesIO()
    torch.save(state, written)
    (folder / "data.pt").write_bytes(written.getvalue())


def is_whole(folder: Path) -> bool:
    """Says whether a step's folder holds the state that a run resumes from."""
    return (folder / _MARK).is_file()
