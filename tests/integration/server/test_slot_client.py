"""The trainer's client against a real server behind a link that fails. docs/field-cases.md: server fails or hangs."""

import asyncio
from collections.abc import Iterator

import pytest

from orbit_kernels.contract.payload import Adapter
from orbit_verl.publishing.slot_client import SlotClient, SlotError
from tests.support.adapters import random_adapter
from tests.support.link import Link
from tests.support.server import Server

pytestmark = pytest.mark.server("qwen3")


@pytest.fixture
def link(server: Server) -> Iterator[Link]:
    host, port = server.url.removeprefix("http://").split(":")
    link = Link((host, int(port)))
    yield link
    link.close()


def client(link: Link, timeout_s: float = 60.0, attempts: int = 3) -> SlotClient:
    return SlotClient(link.address, timeout_s, attempts)


def stage(slots: SlotClient, version: int, adapter: Adapter) -> dict:
    return asyncio.run(slots.stage(version, adapter.encode(), adapter.digest()))


def test_stage_and_activate(server, link):
    server.wait_until_idle()
    version, adapter = server.new_version(), random_adapter(71, tied=True)
    assert stage(client(link), version, adapter)["version"] == version
    answer = asyncio.run(client(link).activate(version, "finish"))
    assert answer["active_version"] == version == server.status()["active_version"]


def test_an_error_is_retried_within_the_deadline(server, link):
    server.wait_until_idle()
    version, adapter = server.new_version(), random_adapter(72, tied=True)
    link.faults = ["error"]
    assert stage(client(link), version, adapter)["digest"] == adapter.digest()


def test_errors_that_last_are_raised_with_their_text(server, link):
    before = server.status()
    link.faults = ["error"] * 20
    with pytest.raises(SlotError, match="500.*gateway broke"):
        stage(client(link), server.new_version(), random_adapter(73, tied=True))
    assert server.status()["slots"] == before["slots"]
    link.faults = []
    stage(client(link), server.new_version(), random_adapter(73, tied=True))


def test_silence_ends_at_the_deadline(server, link):
    link.faults = ["hang"] * 20
    with pytest.raises(SlotError, match="no answer"):
        stage(client(link, timeout_s=1.5, attempts=20), server.new_version(), random_adapter(74, tied=True))
    assert link.connections <= 4
    link.faults = []
    stage(client(link), server.new_version(), random_adapter(74, tied=True))


def test_a_lost_answer_is_not_a_lost_version(server, link):
    """The stage took effect, its answer did not arrive: asking again finds the version in its slot."""
    version, adapter = server.new_version(), random_adapter(75, tied=True)
    link.faults = ["swallow"]
    assert stage(client(link), version, adapter)["version"] == version
    link.faults = ["swallow"]
    assert asyncio.run(client(link).activate(version, "finish"))["active_version"] == version


def test_a_refusal_is_not_retried(server, link):
    broken = random_adapter(76, tied=True)
    name = next(iter(broken.tensors))
    broken = Adapter({**broken.tensors, name: broken.tensors[name][:-1]}, broken.config)
    with pytest.raises(SlotError, match="422.*shape"):
        stage(client(link), server.new_version(), broken)
    assert link.connections == 1
