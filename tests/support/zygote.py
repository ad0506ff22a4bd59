"""Servers forked from one process that has imported SGLang, because importing costs far more than starting.

``python -m tests.support.zygote`` reads one JSON object a line, and answers with one: ``{"argv", "log"}`` starts a server in
a process group of its own and gives its ``pid``; ``{"pid"}`` gives its exit ``status``, null while it runs. It ends with its
input, and its servers with it.

A server runs ``sglang.launch_server`` as ``__main__``. The processes that it spawns are forked from it instead; they get what
``multiprocessing`` hands to a spawned process, pickled as ever. Only how processes come to be differs from production.
"""

import contextlib
import gc
import importlib
import json
import multiprocessing.util
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "SGLANG_USE_CPU_ENGINE": "1"}
# SGLang compiles small functions at the first request: a C++ compiler's work of ten seconds and more for each server.
NOT_COMPILED = {"TORCHDYNAMO_DISABLE": "1"}
MODULES = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",
    "sglang.srt.model_loader.loader",
)
_POLL_S = 0.02


class Zygote:
    """The process, for whoever starts servers; it is started by the first one."""

    def __init__(self):
        self._process: subprocess.Popen | None = None

    def start(self, argv: list[str], log: Path) -> "ForkedServer":
        """Start a server with these arguments, in a process group of its own."""
        return ForkedServer(self, self.ask(argv=argv, log=str(log))["pid"])

    def ask(self, **request) -> dict:
        """Its answer to a request."""
        if self._process is None:
            command = [sys.executable, "-W", "ignore", "-m", "tests.support.zygote"]
            environment = {
                **os.environ,
                **ENVIRONMENT,
                **NOT_COMPILED,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            }
            self._process = subprocess.Popen(
                command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End it and its servers."""
        if self._process is not None:
            self._process.communicate()
            self._process = None


class ForkedServer:
    """The HTTP process of a server, as ``subprocess.Popen`` shows one."""

    def __init__(self, zygote: Zygote, pid: int):
        self.pid = pid
        self._zygote = zygote
        self._status: int | None = None

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        if self._status is None:
            self._status = self._zygote.ask(pid=self.pid)["status"]
        return self._status

    def wait(self, timeout: float) -> int:
        """The exit status, when it has ended."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("sglang.launch_server", timeout)
            time.sleep(_POLL_S)
        return self._status


def main() -> None:
    """Fork servers until the input ends; in a server, be one."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    import_sglang()
    running: dict[int, int | None] = {}
    while line := sys.stdin.readline():
        request = json.loads(line)
        if "argv" in request:
            ready, has_group = os.pipe()
            pid = os.fork()
            if not pid:
                answers.close()
                os.setsid()
                os.close(has_group)
                return serve(request["argv"], request["log"])
            os.close(has_group)
            os.read(ready, 1)
            os.close(ready)
            running[pid] = None
            answer = {"pid": pid}
        else:
            pid = request["pid"]
            if running[pid] is None and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                running[pid] = os.waitstatus_to_exitcode(ended[1])
            answer = {"status": running[pid]}
        print(json.dumps(answer), file=answers, flush=True)
    for pid in (pid for pid, status in running.items() if status is None):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def import_sglang() -> None:
    """Import all that a server and the processes that it starts will import, plugins first as in each of them."""
    importlib.import_module("sglang.launch_server")
    importlib.import_module("sglang.srt.plugins").load_plugins()
    for module in MODULES:
        importlib.import_module(module)
    assert "prometheus_client" not in sys.modules, "it reads where it writes from the environment when it is imported"
    gc.collect()
    gc.freeze()


def serve(argv: list[str], log: str) -> None:
    """Run ``python -m sglang.launch_server`` in this forked process."""
    output, nothing = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    multiprocessing.util.spawnv_passfds = fork_instead
    sys.argv = ["sglang.launch_server", *argv]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def fork_instead(path: str, arguments: list, passed: list[int], spawn=multiprocessing.util.spawnv_passfds) -> int:
    """In place of ``multiprocessing.util.spawnv_passfds``: fork what would run Python with all imports before it."""
    if arguments[-1] not in ("--multiprocessing-fork", b"--multiprocessing-fork"):
        return spawn(path, arguments, passed)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread's locks would stay locked in the forked process"
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        for number in (signal.SIGQUIT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        sys.argv = ["-c", arguments[-1]]
        exec(arguments[arguments.index("-c") + 1], {})
    except SystemExit as end:
        status = end.code
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
