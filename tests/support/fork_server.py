"""Python processes that begin with everything imported: forks of one process that has imported it.

Importing torch, verl and SGLang takes ten seconds of a processor, and a run of verl does it in a dozen processes. The
executable of a fork server takes Python's command line and does what Python would, but its process is a fork, and so are
all that this one starts through ``sys.executable``: Ray's, its workers, and those of ``multiprocessing``. What they
compute and say is theirs; only how they come to life differs.

The executable is ``fork_client.py``. It stands for the forked process where that was asked for: it forwards signals, ends
as that one ends, and takes it along when it is killed.
"""

import contextlib
import dataclasses
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

CLIENT = Path(__file__).with_name("fork_client.py")
# Ray's C++ side reads these only when it is loaded: the job, which is the first of each cluster, and a process without
# which no worker goes on. Arrow would start a thread, and a fork has none but its own.
READ_AT_IMPORT = {
    "RAY_JOB_ID": "01000000",
    "RAY_RAYLET_PID": str(os.getpid()),
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
_MOST_FILES = 250
# Numbers of files: forked processes find their own below the first, imported modules keep theirs from there on.
_OF_MODULES, _OF_REQUESTS = 512, 768
_FLAGS_WITH_VALUE = ("-X", "-W")


@contextlib.contextmanager
def fork_server(modules: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[str]:
    """Import ``modules`` in a process with ``environment``; yields an executable to use for ``sys.executable``."""
    with tempfile.TemporaryDirectory(prefix="fork_server_") as folder, log.open("wb") as output:
        executable = Path(folder) / "python"
        executable.write_text(f"#!{sys.executable} -IS\n{CLIENT.read_text()}")
        executable.chmod(0o755)
        server = subprocess.Popen(
            [sys.executable, __file__, folder, *modules],
            env={**os.environ, **environment, **READ_AT_IMPORT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
        )
        try:
            if not server.stdout.readline():
                raise RuntimeError(f"the fork server ended with status {server.wait()}: {log.read_text()[-2000:]}")
            yield str(executable)
        finally:
            server.communicate()  # it ends with its input


@dataclasses.dataclass
class Request:
    """A Python process that a client asks for."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    files: list[int]
    """The numbers of its open files."""
    received: list[int]
    """The same files as they arrived here."""

    @classmethod
    def receive(cls, connection: socket.socket) -> "Request":
        head, received, _, _ = socket.recv_fds(connection, 8, _MOST_FILES)
        body = connection.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL)
        return cls(received=received, **json.loads(body))

    def close(self) -> None:
        for file in self.received:
            os.close(file)

    def run(self, executable: str) -> None:
        """Become that process, and run its program to its end."""
        self._take_files()
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environment)
        sys.executable = executable
        multiprocessing.set_executable(executable)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed()  # Python does it itself for ``random``
        if ray := sys.modules.get("ray"):
            ray._raylet.Config.initialize("")  # which reads the environment again, but for READ_AT_IMPORT
        self._run_program()

    def _take_files(self) -> None:
        assert max(self.files) < _OF_MODULES, f"file {max(self.files)} could be a module's"
        moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _OF_REQUESTS) for file in self.received]
        self.close()
        for file, number in zip(moved, self.files, strict=True):
            os.dup2(file, number)
            os.close(file)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True, write_through=True)

    def _run_program(self) -> None:
        """What Python does with its command line."""
        position = 0
        while self.arguments[position].startswith("-") and self.arguments[position] not in ("-c", "-m"):
            position += 2 if self.arguments[position] in _FLAGS_WITH_VALUE else 1
        what, *arguments = self.arguments[position:]
        sys.path[:0] = filter(None, self.environment.get("PYTHONPATH", "").split(os.pathsep))
        if what == "-m":
            sys.path.insert(0, self.folder)
            sys.argv = arguments
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        elif what == "-c":
            sys.path.insert(0, "")
            sys.argv = ["-c", *arguments[1:]]
            exec(arguments[0], {"__name__": "__main__"})
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(what)))
            sys.argv = [what, *arguments]
            runpy.run_path(what, run_name="__main__")


class Server:
    """Forks a process for every request; each has a client, which is told when it has ended."""

    def __init__(self, listener: socket.socket):
        self._listener = listener
        self._clients: dict[int, socket.socket] = {}
        self._ended, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._selector = selectors.DefaultSelector()
        for source, call in ((sys.stdin, self._stop), (listener, self._fork), (self._ended, self._report)):
            self._selector.register(source, selectors.EVENT_READ, call)

    def serve(self) -> Request:
        """Serve until standard input ends; returns in forked processes alone."""
        signal.set_wakeup_fd(self._wake.fileno())
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj.fileno() != -1 and (request := key.data()):
                    return request

    def _fork(self) -> Request | None:
        client, _ = self._listener.accept()
        request = Request.receive(client)
        pid = os.fork()
        if pid == 0:
            self._forget(client)
            return request
        request.close()
        self._clients[pid] = client
        _tell(client, pid)
        self._selector.register(client, selectors.EVENT_READ, lambda: self._kill(pid))

    def _forget(self, client: socket.socket) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for file in (self._selector, self._ended, self._wake, self._listener, client, *self._clients.values()):
            file.close()
        os.setsid()

    def _kill(self, pid: int) -> None:
        """The client is gone: it was killed, and so is its process."""
        os.kill(pid, signal.SIGKILL)
        self._drop(pid)

    def _report(self) -> None:
        self._ended.recv(1 << 12)
        with contextlib.suppress(ChildProcessError):  # there is none left
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if client := self._clients.get(ended[0]):
                    _tell(client, os.waitstatus_to_exitcode(ended[1]))
                    self._drop(ended[0])

    def _drop(self, pid: int) -> None:
        client = self._clients.pop(pid)
        self._selector.unregister(client)
        client.close()

    def _stop(self) -> None:
        for pid in self._clients:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)


def _tell(client: socket.socket, number: int) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it was killed, which its socket says too
        client.sendall(number.to_bytes(8, "big", signed=True))


def import_all(modules: Sequence[str]) -> None:
    """Import, with what modules open out of the way of the files of forked processes; nothing else may be left running."""
    fillers = []
    while not fillers or fillers[-1] < _OF_MODULES:
        fillers.append(os.open(os.devnull, os.O_RDONLY))
    for module in modules:
        importlib.import_module(module)
    for file in fillers:
        os.close(file)
    if title := sys.modules.get("setproctitle"):
        title.getproctitle()  # finds its place now: it cannot once the environment has been replaced
    threads = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    assert len(threads) == 1, f"a thread's locks would stay locked in a fork: {threads}"
    gc.collect()
    gc.freeze()


def main() -> None:
    """Import, say that it is done, and serve; in a fork, be the process that was asked for."""
    folder, *modules = sys.argv[1:]
    del sys.path[0]
    import_all(modules)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.path.join(folder, "socket"))
    listener.listen(128)
    print("ready", flush=True)
    Server(listener).serve().run(os.path.join(folder, "python"))


if __name__ == "__main__":
    main()
