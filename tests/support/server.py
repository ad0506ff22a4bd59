"""A real SGLang server, and the requests that the tests make of it."""

import atexit
import contextlib
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import requests
import torch

from orbit_kernels.contract.client import SlotClient
from orbit_kernels.contract.payload import Adapter
from tests.support.zygote import ENVIRONMENT, ForkedServer, Zygote

Process = subprocess.Popen | ForkedServer
START_TIMEOUT_S = 400
PROMPT = [(17 * index + 5) % 50 + 3 for index in range(24)]
CPU_FLAGS = (
    "--device", "cpu", "--attention-backend", "torch_native", "--mem-fraction-static", "0.05",
    "--max-total-tokens", "20000", "--max-running-requests", "32", "--random-seed", "0",
    "--sleep-on-idle",
)  # fmt: skip
ZYGOTE = Zygote()
atexit.register(ZYGOTE.close)


class Server:
    """Requests to a running server; ``log`` is the file with everything it printed.

    ``slots`` is the client that everyone has; ``status``, ``stage`` and ``activate`` show what is on the wire.
    """

    def __init__(self, url: str, log: pathlib.Path, process: Process, key: str | None = None):
        self.url = url
        self.log = log
        self.process = process
        self.slots = SlotClient(url, key)
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    def get(self, path: str, **params) -> requests.Response:
        return requests.get(self.url + path, params=params, headers=self._headers, timeout=60)

    def post(self, path: str, json=None, **kwargs) -> requests.Response:
        return requests.post(self.url + path, json=json, headers=self._headers, timeout=60, **kwargs)

    def status(self) -> dict:
        return self.get("/orbit/status").json()

    def stage(self, version: int, adapter: Adapter | bytes) -> requests.Response:
        payload = adapter.encode() if isinstance(adapter, Adapter) else adapter
        return self.post("/orbit/stage", params={"version": version}, data=payload)

    def activate(self, version: int, inflight: str = "finish") -> requests.Response:
        return self.post("/orbit/activate", {"version": version, "inflight": inflight})

    def new_version(self) -> int:
        """A version greater than all that this server has seen."""
        return self.slots.status().highest_seen + 1

    def install(self, adapter: Adapter | bytes) -> int:
        """Stage and activate an adapter under a new version."""
        self.wait_until_idle()
        version = self.new_version()
        self.slots.stage(version, adapter.encode() if isinstance(adapter, Adapter) else adapter)
        return self.slots.activate(version).active_version

    def rollback(self, version: int) -> None:
        assert self.slots.rollback(version).active_version == version

    def generate(self, prompt=PROMPT, tokens: int = 16, **fields) -> dict:
        """Greedy generation with log-probs of prompt and output, never ending early."""
        params = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        params.update(fields.pop("sampling_params", {}))
        body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True, **fields}
        body.setdefault("logprob_start_len", 0)
        response = self.post("/generate", body)
        assert response.status_code == 200, response.text
        return response.json()

    def generate_on(self, versions: list[int], tokens: int = 16, **fields) -> list[dict]:
        """One batch, of the same prompt under each of these versions."""
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        sampling = [params | {"custom_params": {"orbit_version": version}} for version in versions]
        body = {"input_ids": [PROMPT] * len(versions), "sampling_params": sampling, "return_logprob": True}
        return self.post("/generate", body | {"logprob_start_len": 0} | fields).json()

    @contextlib.contextmanager
    def in_flight(self, **kwargs) -> Iterator["Running"]:
        """A generation on a thread, which has started when the body runs."""
        before = sum(self.slots.status().requests.values())
        running = Running(lambda: self.generate(**kwargs))
        wait_for(lambda: sum(self.slots.status().requests.values()) > before)
        yield running
        running.join()

    def wait_until_idle(self) -> None:
        wait_for(lambda: not self.slots.status().requests)

    def idle_on_base(self) -> "Server":
        """The server itself, when nothing runs and version 0 is active."""
        self.wait_until_idle()
        self.rollback(0)
        return self

    def processes(self) -> list[psutil.Process]:
        """The HTTP process, and those that it started."""
        http = psutil.Process(self.process.pid)
        return [http, *http.children(recursive=True)]

    def schedulers(self) -> list[psutil.Process]:
        """The scheduler processes by rank."""
        titles = {process: " ".join(process.cmdline()) for process in self.processes()}
        return sorted((process for process in titles if "sglang::scheduler" in titles[process]), key=titles.get)


class Running:
    """A call on a thread."""

    def __init__(self, call):
        self._thread = threading.Thread(target=self._run, args=(call,))
        self._outcome = None
        self._thread.start()

    @property
    def finished(self) -> bool:
        return not self._thread.is_alive()

    def join(self):
        self._thread.join(timeout=120)
        assert self._outcome is not None, "the call failed"
        return self._outcome

    def _run(self, call):
        self._outcome = call()


def wait_for(condition, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition not reached in time"
        time.sleep(0.01)


def all_logprobs(answer: dict) -> torch.Tensor:
    """Log-probs of the prompt's tokens but the first, and of the output's."""
    return torch.tensor(prompt_logprobs(answer) + output_logprobs(answer))


def output_logprobs(answer: dict) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def prompt_logprobs(answer: dict) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]


def spans(answer: dict) -> list[list[int]]:
    return answer["meta_info"]["orbit_versions"]


def free_port() -> int:
    """A free loopback port; SGLang 0.5.12 also uses port + 10000. Linux gives both to no connection (from 32768 on)."""
    for port in random.SystemRandom().sample(range(11000, 22000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port")


def launch(model: pathlib.Path, log: pathlib.Path, port: int, *flags: str, cold: bool = False) -> Process:
    """Start a server in a process group of its own.

    ``cold``: by its command line, as a user does. It takes a minute on two cores, a forked server (``zygote``) a second.
    """
    arguments = ["--model-path", str(model), "--host", "127.0.0.1", "--port", str(port), *CPU_FLAGS, *flags]
    if not cold:
        return ZYGOTE.start(arguments, log)
    command = [sys.executable, "-W", "ignore", "-m", "sglang.launch_server", *arguments]
    environment = {**os.environ, **ENVIRONMENT}
    with log.open("wb") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)


def stop(process: Process) -> None:
    """End a server and every process that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=30)


@contextlib.contextmanager
def serve(
    model: pathlib.Path, log: pathlib.Path, *flags: str, key: str | None = None, cold: bool = False
) -> Iterator[Server]:
    """A server that is ready, for the length of the body."""
    port = free_port()
    process = launch(model, log, port, *flags, cold=cold)
    server = Server(f"http://127.0.0.1:{port}", log, process, key)
    try:
        _wait_until_ready(server)
        yield server
    finally:
        stop(process)


def _wait_until_ready(server: Server) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert server.process.poll() is None, server.log.read_text()[-4000:]
        with contextlib.suppress(requests.ConnectionError, requests.Timeout):
            if requests.get(server.url + "/health", timeout=5).status_code == 200:
                return
        time.sleep(0.05)
    raise AssertionError(server.log.read_text()[-4000:])
