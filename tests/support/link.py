"""A link to a server that fails as networks do."""

import contextlib
import socket
import threading


class Link:
    """Forwards TCP connections to a server; ``fault`` says what happens to the next requests instead.

    ``swallow``: the request arrives, the answer is lost. ``hang``: nothing ever comes back. ``error``: a gateway's 500.
    """

    ERROR = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 13\r\nConnection: close\r\n\r\ngateway broke"

    def __init__(self, target: tuple[str, int]):
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.faults: list[str] = []
        self.connections = 0
        self._held: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for held in (self._listener, *self._held):
            held.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        fault = self.faults.pop(0) if self.faults else None
        if fault == "hang":
            self._held.append(client)
            return
        if fault == "error":
            client.recv(65536)
            client.sendall(self.ERROR)
            client.close()
            return
        server = socket.create_connection(self._target)
        threading.Thread(target=_pump, args=(client, server), daemon=True).start()
        if fault == "swallow":
            server.recv(1)
            # Closing alone would wait for the pump that reads from it.
            client.shutdown(socket.SHUT_RDWR)
            client.close()
            server.close()
        else:
            _pump(server, client)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(65536):
            sink.sendall(chunk)
        sink.shutdown(socket.SHUT_WR)
