"""The trainer's client against a real server behind a link that fails (field-cases #22)."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from harness import Server
from tiny_models import random_adapter

from orbit_kernels.contract.payload import Adapter
from orbit_verl.publishing.slot_client import SlotClient, SlotError


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


@pytest.fixture
def link(qwen3: Server) -> Iterator[Link]:
    host, port = qwen3.url.removeprefix("http://").split(":")
    link = Link((host, int(port)))
    yield link
    link.close()


def client(link: Link, timeout_s: float = 60.0, attempts: int = 3) -> SlotClient:
    return SlotClient(link.address, timeout_s, attempts)


def stage(slots: SlotClient, version: int, adapter: Adapter) -> dict:
    return asyncio.run(slots.stage(version, adapter.encode(), adapter.digest()))


def test_stage_and_activate(qwen3, link):
    qwen3.wait_until_idle()
    version, adapter = qwen3.new_version(), random_adapter(71, tied=True)
    assert stage(client(link), version, adapter)["version"] == version
    answer = asyncio.run(client(link).activate(version, "finish"))
    assert answer["active_version"] == version == qwen3.status()["active_version"]


def test_an_error_is_retried_within_the_deadline(qwen3, link):
    qwen3.wait_until_idle()
    version, adapter = qwen3.new_version(), random_adapter(72, tied=True)
    link.faults = ["error"]
    assert stage(client(link), version, adapter)["digest"] == adapter.digest()


def test_errors_that_last_are_raised_with_their_text(qwen3, link):
    before = qwen3.status()
    link.faults = ["error"] * 20
    with pytest.raises(SlotError, match="500.*gateway broke"):
        stage(client(link), qwen3.new_version(), random_adapter(73, tied=True))
    assert qwen3.status()["slots"] == before["slots"]
    link.faults = []
    stage(client(link), qwen3.new_version(), random_adapter(73, tied=True))


def test_silence_ends_at_the_deadline(qwen3, link):
    link.faults = ["hang"] * 20
    with pytest.raises(SlotError, match="no answer"):
        stage(client(link, timeout_s=1.5, attempts=20), qwen3.new_version(), random_adapter(74, tied=True))
    assert link.connections <= 4
    link.faults = []
    stage(client(link), qwen3.new_version(), random_adapter(74, tied=True))


def test_a_lost_answer_is_not_a_lost_version(qwen3, link):
    """The stage took effect, its answer did not arrive: asking again finds the version in its slot."""
    version, adapter = qwen3.new_version(), random_adapter(75, tied=True)
    link.faults = ["swallow"]
    assert stage(client(link), version, adapter)["version"] == version
    link.faults = ["swallow"]
    assert asyncio.run(client(link).activate(version, "finish"))["active_version"] == version


def test_a_refusal_is_not_retried(qwen3, link):
    broken = random_adapter(76, tied=True)
    name = next(iter(broken.tensors))
    broken = Adapter({**broken.tensors, name: broken.tensors[name][:-1]}, broken.config)
    with pytest.raises(SlotError, match="422.*shape"):
        stage(client(link), qwen3.new_version(), broken)
    assert link.connections == 1
