"""Python processes that begin with everything imported: forks of one process that has imported it.

Importing torch, verl and SGLang takes ten seconds of a processor, and a run of verl does it in a dozen processes. The
executable of a ``ForkServer`` takes Python's command line and behaves as Python does, but its process is forked, and so
are all Python processes that this one starts through ``sys.executable``: Ray's, its workers, and those of
``multiprocessing``. What they compute and say is theirs; only how they come to life differs.
"""

import contextlib
import dataclasses
import fcntl
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from pathlib import Path

# Ray's C++ side reads two variables once, when it is loaded: the job, and a process after which a worker must not live on.
FIRST_JOB = "01000000"
CLIENT = Path(__file__).with_name("fork_client.py")
_MOST_FILES = 250
_HIGH = 1000  # file descriptors from here on are not a process's own
_FLAGS_WITH_VALUE = ("-X", "-W")


@contextlib.contextmanager
def fork_server(modules: Sequence[str], log: Path) -> Iterator[Path]:
    """Start a server that has imported ``modules``; yields the executable that stands in for ``sys.executable``."""
    with tempfile.TemporaryDirectory(prefix="fork_server_") as name, log.open("wb") as output:
        folder = Path(name)
        executable = folder / "python"
        executable.write_text(f"#!{sys.executable} -IS\n{CLIENT.read_text()}")
        executable.chmod(0o755)
        command = [sys.executable, __file__, str(folder), *modules]
        environment = {**os.environ, "RAY_JOB_ID": FIRST_JOB, "RAY_RAYLET_PID": str(os.getpid())}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": output}
        server = subprocess.Popen(command, env=environment, **pipes)
        try:
            if not server.stdout.readline():
                raise RuntimeError(f"the fork server ended with {server.wait()}: {log.read_text()[-2000:]}")
            yield executable
        finally:
            server.stdin.close()  # which ends it
            server.wait()


@dataclasses.dataclass
class Request:
    """A Python process that a client asks for."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    files: list[int]
    """The numbers under which it must find its files."""
    received: list[int]
    """The same files as they arrived here."""

    @classmethod
    def receive(cls, connection: socket.socket) -> "Request":
        head, received, _, _ = socket.recv_fds(connection, 8, _MOST_FILES)
        body = b""
        while len(body) < int.from_bytes(head, "big"):
            body += connection.recv(1 << 16)
        return cls(received=received, **json.loads(body))

    def run(self, executable: str) -> None:
        """Become that process and run its program to its end."""
        self._take_files()
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environment)
        sys.executable = executable
        _forget_the_server()
        flags = _leading_flags(self.arguments)
        kind, arguments = self.arguments[flags : flags + 1], self.arguments[flags + 1 :]
        sys.path[0:0] = self.environment.get("PYTHONPATH", "").split(os.pathsep)
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        main.__dict__["__builtins__"] = __builtins__
        if kind == ["-m"]:
            import runpy

            sys.path.insert(0, os.getcwd())
            sys.argv = ["-m", *arguments[1:]]
            runpy._run_module_as_main(arguments[0])  # what ``python -m`` calls
        elif kind == ["-c"]:
            sys.path.insert(0, "")
            sys.argv = ["-c", *arguments[1:]]
            exec(compile(arguments[0], "<string>", "exec"), main.__dict__)
        else:
            (script,) = kind
            sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
            sys.argv = [script, *arguments]
            main.__file__ = script
            exec(compile(Path(script).read_bytes(), script, "exec"), main.__dict__)

    def _take_files(self) -> None:
        high = [fcntl.fcntl(file, fcntl.F_DUPFD, _HIGH) for file in self.received]
        self.close()
        for file, number in zip(high, self.files, strict=True):
            os.dup2(file, number)
            os.close(file)

    def close(self) -> None:
        for file in self.received:
            os.close(file)


def _leading_flags(arguments: list[str]) -> int:
    """How many arguments are Python's own and come before ``-c``, ``-m`` or a script."""
    count = 0
    while arguments[count].startswith("-") and arguments[count] not in ("-c", "-m"):
        count += 2 if arguments[count] in _FLAGS_WITH_VALUE else 1
    return count


def _forget_the_server() -> None:
    """Undo what a process of its own would not have inherited."""
    import multiprocessing

    import numpy as np

    multiprocessing.set_executable(sys.executable)
    if "ray" in sys.modules:
        from ray._raylet import Config

        Config.initialize("")  # reads the environment again
    np.random.seed()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=True)


def serve(listener: socket.socket) -> Request:
    """Fork a process for every request, until standard input ends; returns in the forked process alone."""
    clients: dict[int, socket.socket] = {}
    ended, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    selector = selectors.DefaultSelector()
    for file in (sys.stdin, listener, ended):
        selector.register(file, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                connection, _ = listener.accept()
                request = Request.receive(connection)
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for file in (selector, ended, wake, listener, connection, *clients.values()):
                        file.close()
                    os.setsid()
                    return request
                request.close()
                _tell(connection, pid)
                clients[pid] = connection
                selector.register(connection, selectors.EVENT_READ, pid)
            elif key.fileobj is ended:
                ended.recv(1 << 10)
                for pid, status in _ended_children():
                    connection = clients.pop(pid, None)
                    if connection is not None:
                        selector.unregister(connection)
                        _tell(connection, status)
                        connection.close()
            elif key.fileobj is sys.stdin:
                for pid in clients:
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            elif key.data in clients:  # the client was killed
                os.kill(key.data, signal.SIGKILL)
                selector.unregister(key.fileobj)
                clients.pop(key.data).close()


def _ended_children() -> Iterator[tuple[int, int]]:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)


def _tell(connection: socket.socket, number: int) -> None:
    try:
        connection.sendall(number.to_bytes(8, "big", signed=True))
    except BrokenPipeError:
        pass  # the client was killed, which is noticed at its connection


def main() -> None:
    """Import, say that it is done, and serve."""
    folder, *modules = sys.argv[1:]
    del sys.path[0]
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.path.join(folder, "socket"))
    listener.listen(128)
    print("ready", flush=True)
    request = serve(listener)
    request.run(os.path.join(folder, "python"))


if __name__ == "__main__":
    main()
