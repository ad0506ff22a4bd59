"""Stand in for a Python interpreter: ask the fork server for one, and live and die with it.

The fork server puts a copy of this file, which runs without site-packages, beside its socket (``fork_server.py``).
"""

import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Hand over arguments, environment, working directory and open files; end as the process that was made ends."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "socket"))
    files = [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
    files.remove(connection.fileno())
    request = {"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd(), "files": files}
    body = json.dumps(request).encode()
    socket.send_fds(connection, [len(body).to_bytes(8, "big")], files)
    connection.sendall(body)
    pid = _read_number(connection)
    for number in FORWARDED:
        signal.signal(number, lambda number, frame: _send(pid, number))
    for file in files:
        os.close(file)
    status = _read_number(connection)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _read_number(connection: socket.socket) -> int:
    received = connection.recv(8, socket.MSG_WAITALL)
    if len(received) < 8:
        os._exit(1)
    return int.from_bytes(received, "big", signed=True)


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it has just ended, and its status is on the way


if __name__ == "__main__":
    main()
