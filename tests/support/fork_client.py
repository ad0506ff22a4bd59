"""Stand for a Python process that a fork server makes; runs without site-packages, beside the server's socket."""

import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Hand over command line, environment, folder and open files; end as the process ends."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.path.join(os.path.dirname(sys.argv[0]), "socket"))
    files = [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
    files.remove(connection.fileno())
    request = {"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd(), "files": files}
    body = json.dumps(request).encode()
    socket.send_fds(connection, [len(body).to_bytes(8, "big")], files)
    connection.sendall(body)
    pid = read_number(connection)
    for number in FORWARDED:
        signal.signal(number, lambda number, frame: send(pid, number))
    os.closerange(0, connection.fileno())
    os.closerange(connection.fileno() + 1, max(files) + 1)
    status = read_number(connection)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def read_number(connection: socket.socket) -> int:
    received = connection.recv(8, socket.MSG_WAITALL)
    if len(received) < 8:
        os._exit(1)  # the server has ended
    return int.from_bytes(received, "big", signed=True)


def send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it has just ended, and its status is on the way


if __name__ == "__main__":
    main()
