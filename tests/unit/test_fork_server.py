"""The stand-in for Python under whole runs: what its processes see, and how they end."""

import os
import signal
import subprocess
import time

import psutil
import pytest

from tests.support.fork_server import fork_server

SPAWN = """
import multiprocessing, sys
def child(queue):
    queue.put(("wave" in sys.modules, __name__))
    sys.exit(5)
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print(*queue.get())
    process.join()
    print(process.exitcode)
"""
SLEEP = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    with fork_server(["wave"], {}, tmp_path_factory.mktemp("server") / "log") as executable:
        yield executable


def output(*command: str, **options) -> str:
    return subprocess.run(command, check=True, timeout=30, text=True, stdout=subprocess.PIPE, **options).stdout


def test_command_line_environment_folder_and_files(python, tmp_path):
    program = "import os, sys; print(sys.argv, dict(os.environ), os.getcwd(), 'wave' in sys.modules); print(input())"
    environment = {"KEY": "value", "LC_ALL": "C.UTF-8"}
    found = output(python, "-u", "-c", program, "a b", env=environment, cwd=tmp_path, input="line\n")
    assert found == f"['-c', 'a b'] {environment} {tmp_path} True\nline\n"


def test_a_file_that_is_passed_on(python):
    read, write = os.pipe()
    with os.fdopen(read) as end:
        output(python, "-c", f"import os; os.write({write}, b'passed')", pass_fds=[write])
        os.close(write)
        assert end.read() == "passed"


def test_modules_and_scripts(python, tmp_path):
    (tmp_path / "neighbour.py").write_text("NAME = 'found'")
    (tmp_path / "script.py").write_text("import sys, neighbour; print(__name__, neighbour.NAME, sys.argv[1:])")
    assert output(python, str(tmp_path / "script.py"), "-x") == "__main__ found ['-x']\n"
    assert output(python, "-m", "script", "-x", cwd=tmp_path) == "__main__ found ['-x']\n"


def test_processes_that_multiprocessing_spawns_are_forked_too(python, tmp_path):
    (tmp_path / "spawn.py").write_text(SPAWN)
    assert output(python, str(tmp_path / "spawn.py")) == "True __mp_main__\n5\n"


def test_the_status_is_the_processs(python):
    assert subprocess.run([python, "-c", "raise SystemExit(7)"], timeout=30).returncode == 7
    assert subprocess.run([python, "-c", "import os; os.abort()"], timeout=30).returncode == -signal.SIGABRT


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_the_process_too(python, number):
    with subprocess.Popen([python, "-c", SLEEP], stdout=subprocess.PIPE) as client:
        process = psutil.Process(int(client.stdout.readline()))
        client.send_signal(number)
        assert client.wait(timeout=30) == -number
    deadline = time.monotonic() + 30
    while process.is_running():
        assert time.monotonic() < deadline
        time.sleep(0.01)
