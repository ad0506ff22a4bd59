"""This module runs a command whose descendants, daemons included, end with it. It works on Linux only."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_POLL_S = 0.5
_STOP_GRACE_S = 20.0


def run_to_end(
    command: Sequence[str],
    *,
    log: Path,
    on_poll: Callable[[], None],
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> int:
    """Runs ``command`` with its output in ``log``, and leaves none of its descendants behind.

    Ray and SGLang start processes that outlive the one that asked for them. This process becomes their reaper, so that
    orphans are its children and can be found. SIGTERM is treated as Ctrl-C; either, and any error of ``on_poll``, stops
    the command before the exception goes on.

    Args:
        command: program and arguments.
        log: file for standard output and error, overwritten.
        on_poll: called about twice a second, and once more after the command has ended.
        environment: of the command; this process's own by default.
        cwd: the command's working directory.

    Returns:
        The command's exit status; 128 + N when signal N ended it.
    """
    _become_subreaper()
    known = set(psutil.Process().children(recursive=True))
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with log.open("wb") as output:
            child = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                cwd=cwd,
                start_new_session=True,
            )
            status = _wait(child, on_poll)
        on_poll()
        return status if status >= 0 else 128 - status
    finally:
        _stop(known)
        signal.signal(signal.SIGTERM, previous)


def _wait(child: subprocess.Popen, on_poll: Callable[[], None]) -> int:
    while True:
        try:
            return child.wait(timeout=_POLL_S)
        except subprocess.TimeoutExpired:
            on_poll()


def _stop(known: set[psutil.Process]) -> None:
    """Asks every descendant that is not ``known`` to end, and kills what has not after a while."""
    asked = _descendants(known)
    _signal_all(asked, signal.SIGTERM)
    psutil.wait_procs(asked, timeout=_STOP_GRACE_S)
    while left := _descendants(known):
        _signal_all(left, signal.SIGKILL)
        psutil.wait_procs(left, timeout=_POLL_S)


def _descendants(known: set[psutil.Process]) -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=True) if process not in known]


def _signal_all(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def _interrupt(number, frame):
    raise KeyboardInterrupt


def _become_subreaper() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
