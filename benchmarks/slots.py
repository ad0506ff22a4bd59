"""This script measures what adapter slots cost a CPU server's decoding, and what a new version costs running requests.

    python -m benchmarks.slots --model DIR [--adapter oft|lora] [--rounds N]

Three real SGLang servers stay up side by side (about 3 GB each) and are measured in turn: a plain one, one with tied
and one with split slots. Throughputs are measured in pairs, one batch right after the other, because the machine's
speed drifts. The column "core waits left out" does not count the time in which the scheduler's loop could have run but
other processes had the cores. Versions are staged without a pause, which no trainer does, and one a second. The script
works on Linux only, and prints Markdown tables.
"""

import argparse
import contextlib
import dataclasses
import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.sglang_server import serve
from orbit_kernels.adapters import METHODS, AdapterMethod
from orbit_kernels.adapters.config import AdapterConfig, tensor_name
from orbit_kernels.contract.answers import Activated
from orbit_kernels.contract.client import SlotClient
from orbit_kernels.contract.keys import DEFAULT_INFLIGHT, INFLIGHT_MODES, InflightMode
from orbit_kernels.contract.payload import Adapter

NUM_REQUESTS = 32
NUM_PROMPT_TOKENS = 8
NUM_NEW_TOKENS = 48
NUM_ACTIVATIONS = 100
NUM_RELOADS = 5
STAGING_S = 3.0
STAGING_INTERVALS_S = {"without a pause": 0.0, "one a second": 1.0}
TIMEOUT_S = 600.0
ADAPTER_SCALE = 0.05


@dataclasses.dataclass(frozen=True)
class Setting:
    """A ``Setting`` is one row of the decoding table.

    It is the active version of one of the servers, and the ratio that it must reach.
    """

    name: str
    server: str
    version: int
    bound: float


SETTINGS = (
    Setting("adapter off", "tied", 0, 0.97),
    Setting("tied", "tied", 1, 0.85),
    Setting("split", "split", 1, 0.65),
)


@dataclasses.dataclass(frozen=True)
class Throughput:
    """A ``Throughput`` is that of batches in tokens/s.

    ``unqueued`` leaves out the time in which the scheduler's loop waited for a core. ``cpu_s`` is what the server's
    processes computed meanwhile.
    """

    wall: float
    unqueued: float
    num_tokens: int
    cpu_s: float


@dataclasses.dataclass(frozen=True)
class Pair:
    """A ``Pair`` is two throughputs measured one right after the other."""

    measured: Throughput
    reference: Throughput

    @classmethod
    def of(
        cls, measured: Callable[[], Throughput], reference: Callable[[], Throughput], *, reference_first: bool
    ) -> "Pair":
        """Measures both."""
        if reference_first:
            of_reference = reference()
            return cls(measured(), of_reference)
        return cls(measured(), reference())


class Server:
    """A ``Server`` is a running server and the batch of greedy requests that it is measured with."""

    def __init__(self, address: str, scheduler: psutil.Process, prompts: Sequence[list[int]]):
        self._scheduler = scheduler
        self._slots = SlotClient(f"http://{address}", timeout_s=TIMEOUT_S)
        self._http = httpx.Client(base_url=f"http://{address}", timeout=TIMEOUT_S, trust_env=False)
        self._batch = {
            "input_ids": list(prompts),
            "sampling_params": {"temperature": 0.0, "max_new_tokens": NUM_NEW_TOKENS, "ignore_eos": True},
        }
        self._active_version = 0
        self._new_versions = itertools.count(1)

    def generate(self) -> int:
        """Runs the batch; returns the tokens that it generated."""
        return sum(answer["meta_info"]["completion_tokens"] for answer in self._post("/generate", json=self._batch))

    def throughput(self, least_s: float = 0.0) -> Throughput:
        """Measures one batch, or as many as take ``least_s``."""
        start_s, start_queued_s, start_cpu_s = time.perf_counter(), self._queued_s(), self._cpu_s()
        num_tokens, wall_s = 0, 0.0
        while num_tokens == 0 or wall_s < least_s:
            num_tokens += self.generate()
            wall_s = time.perf_counter() - start_s
        queued_s = self._queued_s() - start_queued_s
        return Throughput(
            num_tokens / wall_s, num_tokens / (wall_s - queued_s), num_tokens, self._cpu_s() - start_cpu_s
        )

    def stage(self, payload: bytes) -> int:
        """Stages a payload as the next version; returns the version."""
        version = next(self._new_versions)
        self._slots.stage(version, payload)
        return version

    def activate(self, version: int, inflight: InflightMode = DEFAULT_INFLIGHT) -> Activated:
        """Makes a version that a slot holds, or the base, the active one."""
        change = self._slots.rollback if version < self._active_version else self._slots.activate
        self._active_version = version
        return change(version, inflight)

    def reload(self, model: Path) -> None:
        """Loads all weights again, by SGLang's own route; the server must be idle."""
        self._post("/update_weights_from_disk", json={"model_path": str(model)})

    def _queued_s(self) -> float:
        """Returns the time that the scheduler's main thread was ready to run and had no core; Linux counts it in ns."""
        return int(Path(f"/proc/{self._scheduler.pid}/schedstat").read_text().split()[1]) / 1e9

    def _cpu_s(self) -> float:
        """Returns the CPU time of the scheduler's process and the HTTP process."""
        times = [process.cpu_times() for process in (self._scheduler, self._scheduler.parent())]
        return sum(of_process.user + of_process.system for of_process in times)

    def _post(self, path: str, **request: Any) -> Any:
        response = self._http.post(path, **request)
        if not response.is_success:
            raise RuntimeError(f"{path}: HTTP {response.status_code} {response.text}")
        return response.json()


@contextlib.contextmanager
def repeated(call: Callable[[], Any], interval_s: float = 0.0) -> Iterator[list[Any]]:
    """Repeats a call on another thread while the body runs; yields the results so far.

    An error is raised at the end.
    """
    results, stopped = [], threading.Event()

    def run() -> None:
        while not stopped.is_set():
            next_s = time.perf_counter() + interval_s
            results.append(call())
            stopped.wait(max(0.0, next_s - time.perf_counter()))

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        try:
            yield results
        finally:
            stopped.set()
        running.result()


def decoding(servers: dict[str, Server], rounds: int) -> Iterator[str]:
    """Measures the throughput of each setting against the plain server."""
    pairs: dict[Setting, list[Pair]] = {setting: [] for setting in SETTINGS}
    plain = servers["plain"].throughput
    for number, setting in itertools.product(range(rounds), SETTINGS):
        server = servers[setting.server]
        server.activate(setting.version)
        pairs[setting].append(Pair.of(server.throughput, plain, reference_first=number % 2 == 0))
    yield "| slots | tokens/s | plain server | ratio: median (quartiles) | core waits left out | bound |"
    yield "|---|---|---|---|---|---|"
    for setting, of_setting in pairs.items():
        yield f"| {setting.name} | {_row(of_setting)} | >= {setting.bound} |"


def pauses(server: Server, versions: Sequence[int]) -> Iterator[str]:
    """Measures how long activations held the scheduler's loop while every request of the batch was in flight."""
    yield "| requests in flight | activations | pause in ms: median | p99 | max | bound |"
    yield "|---|---|---|---|---|---|"
    for inflight in INFLIGHT_MODES:
        held_ms = _pauses_ms(server, versions, inflight)
        median, p99 = np.quantile(held_ms, (0.5, 0.99))
        yield f"| {inflight} | {len(held_ms)} | {median:.3f} | {p99:.3f} | {max(held_ms):.3f} | p99 <= 1 |"


def _pauses_ms(server: Server, versions: Sequence[int], inflight: InflightMode) -> list[float]:
    turns = itertools.cycle(versions)
    held_ms: list[float] = []
    with repeated(lambda: server.activate(next(turns), inflight)) as replies:
        for _ in range(NUM_ACTIVATIONS):
            server.generate()
            held_ms = [reply.pause_ms for reply in replies if sum(reply.requests.values()) == NUM_REQUESTS]
            if len(held_ms) >= NUM_ACTIVATIONS:
                break
    return held_ms


def staging(server: Server, payload: bytes, rounds: int) -> Iterator[str]:
    """Measures the throughput while versions are staged, against none."""
    measured: dict[str, list[Pair]] = {name: [] for name in STAGING_INTERVALS_S}
    num_staged = dict.fromkeys(STAGING_INTERVALS_S, 0)

    def throughput_while_staging(name: str, interval_s: float) -> Throughput:
        with repeated(lambda: server.stage(payload), interval_s) as versions:
            throughput = server.throughput(STAGING_S)
        num_staged[name] += len(versions)
        return throughput

    for number, (name, interval_s) in itertools.product(range(rounds), STAGING_INTERVALS_S.items()):
        pair = Pair.of(
            lambda name=name, interval_s=interval_s: throughput_while_staging(name, interval_s),
            lambda: server.throughput(STAGING_S),
            reference_first=number % 2 == 0,
        )
        measured[name].append(pair)
    yield "| versions staged | number | tokens/s | none staged | ratio: median (quartiles) | core waits left out | bound | server's CPU ms a version |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, pairs in measured.items():
        cpu_ms = 1e3 * sum(map(_extra_cpu_s, pairs)) / num_staged[name]
        yield f"| {name} | {num_staged[name]} | {_row(pairs)} | >= 0.9 | {cpu_ms:.1f} |"


def _extra_cpu_s(pair: Pair) -> float:
    """Returns the CPU time beyond what the reference would have taken for the same tokens."""
    per_token_s = pair.reference.cpu_s / pair.reference.num_tokens
    return pair.measured.cpu_s - per_token_s * pair.measured.num_tokens


def reloading(servers: dict[str, Server], payload: bytes, model: Path) -> Iterator[str]:
    """Measures a new adapter version on the server with slots, and all weights again on the plain one; both are idle.

    A reload holds the scheduler's loop for as long as it takes, an activation for its pause.
    """
    slots, held_ms = servers["tied"], []

    def new_version() -> None:
        held_ms.append(slots.activate(slots.stage(payload)).pause_ms)

    versions_s = [_seconds(new_version) for _ in range(NUM_RELOADS)]
    reloads_s = [_seconds(lambda: servers["plain"].reload(model)) for _ in range(NUM_RELOADS)]
    reload_s, version_s, pause_s = np.median(reloads_s), np.median(versions_s), np.median(held_ms) / 1e3
    yield "| full reload in s: median (quartiles) | stage and activate in s | reload / stage and activate | reload / pause |"
    yield "|---|---|---|---|"
    ratios = f"{reload_s / version_s:.1f} | {reload_s / pause_s:.0f}"
    yield f"| {_spread(reloads_s)} | {_spread(versions_s)} | {ratios} |"


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _row(pairs: Sequence[Pair]) -> str:
    measured, reference = (
        np.median([getattr(pair, side).wall for pair in pairs]) for side in ("measured", "reference")
    )
    wall, unqueued = (
        _spread([getattr(pair.measured, clock) / getattr(pair.reference, clock) for pair in pairs])
        for clock in ("wall", "unqueued")
    )
    return f"{measured:.0f} | {reference:.0f} | {wall} | {unqueued}"


def _spread(values: Sequence[float]) -> str:
    low, median, high = np.quantile(values, (0.25, 0.5, 0.75))
    return f"{median:.3f} ({low:.3f} to {high:.3f})"


def random_adapter(model: Path, method: AdapterMethod, *, tied: bool) -> Adapter:
    """Makes an adapter on every linear of a dense model."""
    with torch.device("meta"):
        modules = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).named_modules()
    generator, config = torch.Generator().manual_seed(0), AdapterConfig(method=method)
    tensors: dict[str, torch.Tensor] = {}
    for module, linear in modules:
        if not config.targets(module):
            continue
        for leaf, shape in method.shapes(*linear.weight.shape).items():
            name = tensor_name(module, leaf)
            drawn = ADAPTER_SCALE * torch.randn(shape, generator=generator)
            tensors.setdefault(config.tied_names(name)[0] if tied else name, drawn.bfloat16())
    return Adapter(tensors, config, tied)


def random_prompts(model: Path) -> list[list[int]]:
    """Returns the prompts of the batch."""
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_REQUESTS, NUM_PROMPT_TOKENS)
    return torch.randint(AutoConfig.from_pretrained(model).vocab_size, shape, generator=generator).tolist()


@contextlib.contextmanager
def start_servers(model: Path, adapter: str) -> Iterator[dict[str, Server]]:
    """Starts the plain server and those with slots, and yields them by the names in ``SETTINGS``."""
    prompts = random_prompts(model)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:

        def start(server: str, *flags: str, slots: bool) -> Server:
            before = set(_schedulers())
            address = stack.enter_context(serve(model, Path(name) / f"{server}.log", *flags, slots=slots))
            (scheduler,) = set(_schedulers()) - before
            return Server(address, scheduler, prompts)

        servers = {"plain": start("plain", slots=False)}
        for fused in ("tied", "split"):
            servers[fused] = start(fused, "--orbit-adapter", adapter, "--orbit-fused", fused, slots=True)
        yield servers


def _schedulers() -> list[psutil.Process]:
    """Returns SGLang's scheduler processes among this process's descendants."""
    return [child for child in psutil.Process().children(recursive=True) if child.name().startswith("sglang::sched")]


def measure(model: Path, adapter: str, rounds: int) -> Iterator[str]:
    """Yields the lines of all tables."""
    method = METHODS[adapter]()
    payloads = {fused: random_adapter(model, method, tied=fused == "tied").encode() for fused in ("tied", "split")}
    with start_servers(model, adapter) as servers:
        for server in servers.values():
            server.generate()
        for fused, payload in payloads.items():
            servers[fused].activate(servers[fused].stage(payload))
        yield from decoding(servers, rounds)
        slots, payload = servers["tied"], payloads["tied"]
        yield ""
        yield from pauses(slots, (1, slots.stage(payload)))
        yield ""
        yield from staging(slots, payload, rounds)
        yield ""
        yield from reloading(servers, payload, model)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="What adapter slots cost a server, and what a new version costs.")
    parser.add_argument("--model", type=Path, required=True, help="checkpoint of a dense model")
    parser.add_argument("--adapter", choices=tuple(METHODS), default="oft")
    parser.add_argument("--rounds", type=int, default=20, help="pairs of batches")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for line in measure(arguments.model, arguments.adapter, arguments.rounds):
        print(line, flush=True)


if __name__ == "__main__":
    main()
