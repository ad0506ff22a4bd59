"""The client of the slots against a real server, and the trainer's publisher behind a link that fails.

docs/field-cases.md: server fails or hangs.
"""

import asyncio
import dataclasses
from collections.abc import Iterator

import pytest

from orbit_kernels.checkpoint.manifest import BaseManifest
from orbit_kernels.contract.answers import StagedAdapter
from orbit_kernels.contract.client import CallError, SlotClient
from orbit_kernels.contract.errors import ErrorCode
from orbit_kernels.contract.payload import Adapter
from orbit_verl.publishing.publisher import Publisher, SlotError
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


def publisher(link: Link, timeout_s: float = 60.0, attempts: int = 3) -> Publisher:
    return Publisher(link.address, timeout_s, attempts)


def stage(slots: Publisher, version: int, adapter: Adapter) -> StagedAdapter:
    return asyncio.run(slots.stage(version, adapter.encode(), adapter.digest()))


def test_the_client_calls_every_route(server):
    server.wait_until_idle()
    client, adapter = SlotClient(server.url), random_adapter(70, tied=True)
    version, payload = client.status().highest_seen + 1, adapter.encode()
    staged = client.stage(version, payload)
    assert (staged.version, staged.digest, staged.num_bytes) == (version, adapter.digest(), adapter.num_bytes)
    assert client.activate(version).active_version == version == client.status().holder_of(version).version
    assert client.adapter(version) == payload
    assert client.rollback().active_version < version
    assert version in client.discard().discarded
    with pytest.raises(CallError) as refused:
        client.adapter(version)
    assert (refused.value.code, refused.value.status) == (ErrorCode.VERSION_NOT_HELD, 400)
    base = client.base()
    assert BaseManifest(formats=base.formats, tensors=base.tensors) == BaseManifest.from_json(
        server.get("/orbit/base").text
    )


def test_stage_and_activate(server, link):
    server.wait_until_idle()
    version, adapter = server.new_version(), random_adapter(71, tied=True)
    assert stage(publisher(link), version, adapter).version == version
    answer = asyncio.run(publisher(link).activate(version, "finish"))
    assert answer.active_version == version == server.status()["active_version"]


def test_an_error_is_retried_within_the_deadline(server, link):
    server.wait_until_idle()
    version, adapter = server.new_version(), random_adapter(72, tied=True)
    link.faults = ["error"]
    assert stage(publisher(link), version, adapter).digest == adapter.digest()


def test_errors_that_last_are_raised_with_their_text(server, link):
    before = server.status()
    link.faults = ["error"] * 20
    with pytest.raises(SlotError, match="500.*gateway broke"):
        stage(publisher(link), server.new_version(), random_adapter(73, tied=True))
    assert server.status()["slots"] == before["slots"]
    link.faults = []
    stage(publisher(link), server.new_version(), random_adapter(73, tied=True))


def test_silence_ends_at_the_deadline(server, link):
    link.faults = ["hang"] * 20
    with pytest.raises(SlotError, match="no answer"):
        stage(publisher(link, timeout_s=1.5, attempts=20), server.new_version(), random_adapter(74, tied=True))
    assert link.connections <= 4
    link.faults = []
    stage(publisher(link), server.new_version(), random_adapter(74, tied=True))


def test_a_lost_answer_is_not_a_lost_version(server, link):
    """The stage took effect, its answer did not arrive: asking again finds the version in its slot."""
    version, adapter = server.new_version(), random_adapter(75, tied=True)
    link.faults = ["swallow"]
    assert stage(publisher(link), version, adapter).version == version
    link.faults = ["swallow"]
    assert asyncio.run(publisher(link).activate(version, "finish")).active_version == version


def test_a_refusal_is_not_retried(server, link):
    broken = random_adapter(76, tied=True)
    name = next(iter(broken.tensors))
    broken = dataclasses.replace(broken, tensors={**broken.tensors, name: broken.tensors[name][:-1]})
    with pytest.raises(SlotError, match="422.*shape"):
        stage(publisher(link), server.new_version(), broken)
    assert link.connections == 1
