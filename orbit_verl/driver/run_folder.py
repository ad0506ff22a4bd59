"""Before Ray starts, a run takes its folder for itself, and what it is to resume from is looked at."""

import os
from pathlib import Path

from omegaconf import DictConfig

from orbit_kernels.folders import FolderInUseError, FolderLock
from orbit_verl.driver.step_folders import StepFolders, is_whole

LOCK_FILE = ".run.lock"
RESUME_MODES = ("auto", "disable", "resume_path")
_held: dict[Path, FolderLock] = {}


def check_saving(config: DictConfig) -> None:
    """Refuses ways of saving and resuming that would lose a checkpoint, or that are not there.

    Raises:
        ValueError: names the key, and the cure.
    """
    trainer = config.trainer
    if config.actor_rollout_ref.actor.checkpoint.get("async_save"):
        raise ValueError(
            "actor_rollout_ref.actor.checkpoint.async_save=true: verl would commit no step; an adapter is saved in "
            "moments, so set it to false"
        )
    for key in ("default_local_dir", "default_hdfs_dir", "resume_from_path"):
        value = trainer.get(key)
        if value is not None and (key == "default_hdfs_dir" or "://" in str(value)):
            raise ValueError(
                f"trainer.{key}={value}: checkpoints go to a local or mounted folder; "
                + ("leave it null" if key == "default_hdfs_dir" else "give the path of one")
            )
    if trainer.del_local_ckpt_after_load:
        raise ValueError(
            "trainer.del_local_ckpt_after_load=true: the run could not be resumed again until its next save; set it to "
            "false, and bound what is kept with trainer.max_actor_ckpt_to_keep"
        )
    if trainer.val_only and not trainer.val_before_train:
        raise ValueError(
            "trainer.val_only=true with trainer.val_before_train=false: verl would train; set val_before_train=true"
        )
    steps = trainer.total_training_steps
    if steps is not None and steps < 1:
        raise ValueError(
            f"trainer.total_training_steps={steps}: must be at least 1, or null for trainer.total_epochs; to train "
            "nothing, set trainer.val_only=true"
        )
    if trainer.resume_mode not in RESUME_MODES:
        raise ValueError(f"trainer.resume_mode={trainer.resume_mode!r}: must be one of {', '.join(RESUME_MODES)}")


def take_run_folder(config: DictConfig) -> None:
    """Takes ``trainer.default_local_dir`` until this process ends, and checks the step to resume from.

    Raises:
        ValueError: another run has the folder, it cannot be written, or the step is not there; with the cure.
    """
    root = Path(os.path.abspath(config.trainer.default_local_dir))
    try:
        _lock(root)
    except FolderInUseError as error:
        raise ValueError(
            f"trainer.default_local_dir={root}: another run writes there ({error}); wait for it, end it, or name "
            "another folder"
        ) from None
    except OSError as error:
        raise ValueError(
            f"trainer.default_local_dir={root}: cannot be written ({error.strerror}); name another folder"
        ) from None
    steps = StepFolders(root)
    steps.settle()
    if config.trainer.resume_mode == "auto":
        steps.committed()
    elif config.trainer.resume_mode == "resume_path":
        _check_path(config.trainer.resume_from_path)


def _lock(root: Path) -> None:
    if root not in _held:
        lock = FolderLock(root / LOCK_FILE)
        try:
            lock.acquire()
        except BaseException:
            lock.release()
            raise
        _held[root] = lock


def _check_path(value: str | None) -> None:
    path = Path(os.path.abspath(value or ""))
    _, separator, step = path.name.rpartition("global_step_")
    if not value or not separator or not step.isdecimal() or str(value).endswith("/"):
        raise ValueError(
            f"trainer.resume_from_path={value!r}: must be the folder of a step, <folder>/global_step_<number>"
        )
    if not is_whole(path):
        raise ValueError(
            f"trainer.resume_from_path={value}: no whole step there; whole steps in {path.parent}: "
            f"{StepFolders(path.parent).whole()}"
        )
