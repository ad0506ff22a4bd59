"""kill -9 of a client in the middle of a stage, and of the scheduler (Qwen3, tied rotations)."""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import psutil
import pytest
import requests

from orbit_kernels.contract.answers import Activated
from orbit_kernels.contract.payload import Adapter
from orbit_verl.publishing.publisher import Publisher, SlotError
from tests.support.adapters import random_adapter
from tests.support.configurations import CONFIGURATIONS
from tests.support.server import Running, Server, output_logprobs, serve, wait_for

pytestmark = pytest.mark.server("qwen3")

CLEAR_ERROR_S = 10
# Sends the first bytes of a payload to a stage route, says so, and never reads the answer.
CLIENT = """
import http.client, sys, time
address, path, num_bytes = sys.argv[1:]
payload = sys.stdin.buffer.read()
connection = http.client.HTTPConnection(address)
connection.putrequest("POST", path)
connection.putheader("Content-Length", str(len(payload)))
connection.endheaders(payload[: int(num_bytes)])
print("sent", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def staging_client(server: Server, version: int, payload: bytes, num_bytes: int) -> Iterator[subprocess.Popen]:
    """A process that has sent the first bytes of a payload when the body runs."""
    address, path = urlsplit(server.url).netloc, f"/orbit/stage?version={version}"
    command = [sys.executable, "-c", CLIENT, address, path, str(num_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            process.stdin.write(payload)
            process.stdin.close()
            assert process.stdout.readline() == b"sent\n"
            yield process
        finally:
            process.kill()


def sync(server: Server, version: int, adapter: Adapter) -> Activated:
    """What the trainer does after an update."""
    slots = Publisher(urlsplit(server.url).netloc, timeout_s=60, attempts=3)
    asyncio.run(slots.stage(version, adapter.encode(), adapter.digest()))
    return asyncio.run(slots.activate(version, "finish"))


def connections(http: psutil.Process) -> list:
    """What a client still holds open."""
    return [one for one in http.net_connections("tcp") if one.status == psutil.CONN_ESTABLISHED]


def error_of(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except requests.RequestException as error:
        return error


def test_a_client_that_dies_halfway_leaves_nothing_behind(server):
    active = server.install(random_adapter(1))
    version, payload, before = server.new_version(), random_adapter(2).encode(), server.status()
    http = server.processes()[0]
    wait_for(lambda: not connections(http))
    num_files = http.num_fds()
    with staging_client(server, version, payload, len(payload) // 2) as client:
        wait_for(lambda: http.num_fds() >= num_files + 2)  # its connection, and the spooled body
        client.kill()
        wait_for(lambda: http.num_fds() <= num_files)
    after = server.status()
    assert (after["slots"], after["staging"], after["active_version"]) == (before["slots"], None, active)
    assert sync(server, version, random_adapter(3)).active_version == version


def test_a_client_that_dies_before_its_answer_does_not_block_the_next(server):
    """Its version may be staged or not; the next one is in any case."""
    active = server.install(random_adapter(1))
    version, adapter = server.new_version(), random_adapter(2)
    with staging_client(server, version, adapter.encode(), len(adapter.encode())) as client:
        client.kill()
    wait_for(lambda: server.status()["staging"] is None)
    assert server.status()["active_version"] == active
    assert sync(server, version + 1, random_adapter(3)).active_version == version + 1


def test_a_killed_scheduler_ends_the_server_and_the_next_sync_brings_the_version_back(checkpoints, tmp_path):
    adapter = random_adapter(4)
    model, flags = checkpoints.plain("qwen3"), CONFIGURATIONS["qwen3"].flags
    with serve(model, tmp_path / "killed", *flags) as server:
        version = server.install(adapter)
        answer, started = server.generate(), server.processes()
        running = Running(lambda: error_of(lambda: server.generate(tokens=12000)))
        wait_for(lambda: server.status()["requests"])

        (scheduler,) = server.schedulers()
        scheduler.kill()
        killed_at = time.monotonic()
        with pytest.raises(SlotError, match=f"{urlsplit(server.url).netloc} did not do /orbit/stage: no answer"):
            sync(server, version + 1, random_adapter(5))
        assert time.monotonic() - killed_at < CLEAR_ERROR_S
        assert isinstance(running.join(), requests.ConnectionError)
        assert server.process.wait(timeout=60) != 0
        assert psutil.wait_procs(started, timeout=60)[1] == []
        assert "Subprocess scheduler_0" in server.log.read_text() and "exit code -9" in server.log.read_text()

    with serve(model, tmp_path / "restarted", *flags) as restarted:
        assert restarted.status()["active_version"] == 0
        assert sync(restarted, version, adapter).active_version == version
        again = restarted.generate()
        assert (again["output_ids"], output_logprobs(again)) == (answer["output_ids"], output_logprobs(answer))
