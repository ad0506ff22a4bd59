"""Two servers behind one trainer: a version is activated on both or on none, and the next sync mends what failed."""

import asyncio
from collections.abc import Iterator

import pytest

from orbit_kernels.contract.payload import Adapter
from orbit_kernels.contract.versions import version_of
from orbit_verl.config.keys import SlotSettings
from orbit_verl.publishing.checkpoint_engine import OrbitCheckpointEngine
from orbit_verl.publishing.slot_client import SlotError
from tests.support.adapters import random_adapter
from tests.support.configurations import CONFIGURATIONS
from tests.support.link import Link
from tests.support.server import Server, serve, spans

pytestmark = pytest.mark.server("qwen3")

FAILED = ["error"] * 40
NO_FAULT = "none"


class Replicas:
    """The servers, the second behind a link that can fail, and the trainer's checkpoint engine."""

    def __init__(self, servers: list[Server], link: Link):
        self.servers, self.link = servers, link
        self._engine = OrbitCheckpointEngine(bucket_size=0, is_master=True)
        addresses = [servers[0].url.removeprefix("http://"), link.address]
        self._engine.connect(addresses, SlotSettings(timeout_s=20, attempts=2))

    def publish(self, version: int, adapter: Adapter) -> dict[str, float]:
        return asyncio.run(self._engine.send_weights(adapter, global_steps=version - version_of(0)))

    def active(self) -> list[int]:
        return [server.status()["active_version"] for server in self.servers]

    def answered(self) -> list[int]:
        """The version with which each server answers a request."""
        return [spans(server.generate(tokens=4))[0][0] for server in self.servers]


@pytest.fixture(scope="module")
def second(checkpoints, tmp_path_factory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("second") / "log"
    with serve(checkpoints.plain("qwen3"), log, *CONFIGURATIONS["qwen3"].flags) as server:
        yield server


@pytest.fixture
def replicas(server, second) -> Iterator[Replicas]:
    """Both on a version of their own making, the same."""
    host, port = second.url.removeprefix("http://").split(":")
    link = Link((host, int(port)))
    replicas = Replicas([server, second], link)
    second.wait_until_idle()
    replicas.publish(max(server.new_version() for server in replicas.servers), random_adapter(80))
    yield replicas
    link.close()


def test_a_version_reaches_both(replicas):
    version = replicas.active()[0] + 1
    metrics = replicas.publish(version, random_adapter(81))
    assert metrics["orbit/version/served"] == version
    assert replicas.active() == replicas.answered() == [version, version]
    first, second = (server.generate(orbit_version=version) for server in replicas.servers)
    assert first["output_ids"] == second["output_ids"]


@pytest.mark.parametrize("later", [0, 1])
def test_one_that_cannot_stage_keeps_all_on_the_version_before(replicas, later):
    before = replicas.active()
    version = before[0] + 1
    replicas.link.faults = list(FAILED)
    with pytest.raises(SlotError, match=rf"version {version} is active on no server: .*{replicas.link.address}.*500"):
        replicas.publish(version, random_adapter(82))
    assert replicas.active() == replicas.answered() == before
    assert [server.status()["staging"] for server in replicas.servers] == [None, None]
    assert [version in server.status()["versions"] for server in replicas.servers] == [True, False]
    replicas.link.faults = []
    assert replicas.publish(version + later, random_adapter(82 + later))["orbit/version/served"] == version + later
    assert replicas.active() == replicas.answered() == [version + later] * 2


@pytest.mark.parametrize("later", [0, 1])
def test_one_that_cannot_activate_is_a_version_behind_until_the_next_sync(replicas, later):
    before = replicas.active()[1]
    version, first = before + 1, replicas.servers[0].url.removeprefix("http://")
    replicas.link.faults = [NO_FAULT, *FAILED]
    with pytest.raises(
        SlotError, match=rf"version {version} is active only on {first}, .*{replicas.link.address}.*500"
    ):
        replicas.publish(version, random_adapter(84))
    assert replicas.active() == replicas.answered() == [version, before]
    replicas.link.faults = []
    assert replicas.publish(version + later, random_adapter(84 + later))["orbit/version/served"] == version + later
    assert replicas.active() == replicas.answered() == [version + later] * 2


def test_a_version_is_not_taken_for_another_of_the_same_number(replicas):
    with pytest.raises(SlotError, match="digest"):
        replicas.publish(replicas.active()[0], random_adapter(86))
