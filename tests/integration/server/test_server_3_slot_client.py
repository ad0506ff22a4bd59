"""The client of the slots against a real server, and the trainer's publisher behind a link that fails (field-cases #22)."""

import asyncio
import contextlib
import dataclasses
import socket
import threading
from collections.abc import Iterator

import pytest
from harness import Server
from tiny_models import random_adapter

from orbit_kernels.checkpoint.manifest import BaseManifest
from orbit_kernels.contract.answers import StagedAdapter
from orbit_kernels.contract.client import CallError, SlotClient
from orbit_kernels.contract.errors import ErrorCode
from orbit_kernels.contract.payload import Adapter
from orbit_verl.publishing.publisher import Publisher, SlotError


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


def publisher(link: Link, timeout_s: float = 60.0, attempts: int = 3) -> Publisher:
    return Publisher(link.address, timeout_s, attempts)


def stage(slots: Publisher, version: int, adapter: Adapter) -> StagedAdapter:
    return asyncio.run(slots.stage(version, adapter.encode(), adapter.digest()))


def test_the_client_calls_every_route(qwen3):
    qwen3.wait_until_idle()
    server, adapter = SlotClient(qwen3.url), random_adapter(70, tied=True)
    version, payload = server.status().highest_seen + 1, adapter.encode()
    staged = server.stage(version, payload)
    assert (staged.version, staged.digest, staged.num_bytes) == (version, adapter.digest(), adapter.num_bytes)
    assert server.activate(version).active_version == version == server.status().holder_of(version).version
    assert server.adapter(version) == payload
    assert server.rollback().active_version < version
    assert version in server.discard().discarded
    with pytest.raises(CallError) as refused:
        server.adapter(version)
    assert (refused.value.code, refused.value.status) == (ErrorCode.VERSION_NOT_HELD, 400)
    base = server.base()
    assert BaseManifest(formats=base.formats, tensors=base.tensors) == BaseManifest.from_json(
        qwen3.get("/orbit/base").text
    )


def test_stage_and_activate(qwen3, link):
    qwen3.wait_until_idle()
    version, adapter = qwen3.new_version(), random_adapter(71, tied=True)
    assert stage(publisher(link), version, adapter).version == version
    answer = asyncio.run(publisher(link).activate(version, "finish"))
    assert answer.active_version == version == qwen3.status()["active_version"]


def test_an_error_is_retried_within_the_deadline(qwen3, link):
    qwen3.wait_until_idle()
    version, adapter = qwen3.new_version(), random_adapter(72, tied=True)
    link.faults = ["error"]
    assert stage(publisher(link), version, adapter).digest == adapter.digest()


def test_errors_that_last_are_raised_with_their_text(qwen3, link):
    before = qwen3.status()
    link.faults = ["error"] * 20
    with pytest.raises(SlotError, match="500.*gateway broke"):
        stage(publisher(link), qwen3.new_version(), random_adapter(73, tied=True))
    assert qwen3.status()["slots"] == before["slots"]
    link.faults = []
    stage(publisher(link), qwen3.new_version(), random_adapter(73, tied=True))


def test_silence_ends_at_the_deadline(qwen3, link):
    link.faults = ["hang"] * 20
    with pytest.raises(SlotError, match="no answer"):
        stage(publisher(link, timeout_s=1.5, attempts=20), qwen3.new_version(), random_adapter(74, tied=True))
    assert link.connections <= 4
    link.faults = []
    stage(publisher(link), qwen3.new_version(), random_adapter(74, tied=True))


def test_a_lost_answer_is_not_a_lost_version(qwen3, link):
    """The stage took effect, its answer did not arrive: asking again finds the version in its slot."""
    version, adapter = qwen3.new_version(), random_adapter(75, tied=True)
    link.faults = ["swallow"]
    assert stage(publisher(link), version, adapter).version == version
    link.faults = ["swallow"]
    assert asyncio.run(publisher(link).activate(version, "finish")).active_version == version


def test_a_refusal_is_not_retried(qwen3, link):
    broken = random_adapter(76, tied=True)
    name = next(iter(broken.tensors))
    broken = dataclasses.replace(broken, tensors={**broken.tensors, name: broken.tensors[name][:-1]})
    with pytest.raises(SlotError, match="422.*shape"):
        stage(publisher(link), qwen3.new_version(), broken)
    assert link.connections == 1
