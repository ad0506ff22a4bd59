import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from orbit_cli.processes import run_to_end

# Starts a process that leaves its parent and its session, as Ray's daemons do, and writes its id.
DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open({pid_file!r}, "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
os.wait()
while not (os.path.exists({pid_file!r}) and open({pid_file!r}).read()):
    time.sleep(0.02)
{then}
"""


def _daemon_command(pid_file, then):
    return [sys.executable, "-c", DAEMON.format(pid_file=str(pid_file), then=then)]


def _is_running(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("status", [0, 3])
def test_status_and_output_come_through_and_daemons_end(tmp_path, status):
    pid_file, log, polls = tmp_path / "pid", tmp_path / "log", []
    command = _daemon_command(pid_file, f"print('said', flush=True); time.sleep(0.7); sys.exit({status})")
    assert run_to_end(command, log=log, on_poll=lambda: polls.append(1)) == status
    assert log.read_text() == "said\n"
    assert len(polls) >= 2
    assert not _is_running(int(pid_file.read_text()))


def test_a_signalled_command_has_a_status_as_in_a_shell(tmp_path):
    command = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    assert run_to_end(command, log=tmp_path / "log", on_poll=lambda: None) == 128 + 9


def test_an_error_while_polling_stops_the_command(tmp_path):
    pid_file = tmp_path / "pid"

    def poll():
        if pid_file.exists():
            raise RuntimeError("broken metrics")

    with pytest.raises(RuntimeError, match="broken metrics"):
        run_to_end(_daemon_command(pid_file, "time.sleep(600)"), log=tmp_path / "log", on_poll=poll)
    assert not _is_running(int(pid_file.read_text()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_leaves_no_process_behind(tmp_path, number):
    pid_file = tmp_path / "pid"
    # A shell starts background jobs with SIGINT ignored, and the tests may be one: the script is a foreground job.
    script = (
        "import pathlib, signal; from orbit_cli.processes import run_to_end\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"run_to_end({_daemon_command(pid_file, 'time.sleep(600)')!r}, log=pathlib.Path({str(tmp_path / 'log')!r}),"
        " on_poll=lambda: None)"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    daemon = int(pid_file.read_text())
    os.kill(supervisor.pid, number)
    _, errors = supervisor.communicate(timeout=60)
    assert b"KeyboardInterrupt" in errors
    assert supervisor.returncode != 0
    assert not _is_running(daemon)
