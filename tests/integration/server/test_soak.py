"""Thousands of short requests while versions are staged, activated and rolled back (Qwen3, tied rotations).

``ORBIT_SOAK_REQUESTS`` sets how many. One in twenty loses its client in the middle of a stream, one in twenty is aborted.
"""

import asyncio
import dataclasses
import itertools
import os
import random
import statistics

import aiohttp
import pytest
import torch
from sglang.bench_one_batch import decode, extend
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from orbit_sglang.control.slots import BASE_SLOT
from orbit_sglang.scheduler.slot_scheduler import RequestVersion
from tests.support.adapters import random_adapter
from tests.support.in_process import ADAPTED_SLOT, Served, served
from tests.support.server import Server, spans

pytestmark = [pytest.mark.slow, pytest.mark.sized, pytest.mark.server("qwen3", "qwen3 on two ranks")]
# By the number of ranks, whose schedulers must keep the same books.
NUM_REQUESTS = {1: 2000, 2: 500}

CONCURRENCY = 32
LENGTHS = (8, 16, 24)
ENDLESS = 400  # tokens asked for by a request that is not meant to reach its end
OPERATION_INTERVAL_S = 1.0
REPLAYED = 30
UNSWITCHED = 10  # of these are also replayed as if no version had changed
NO_TIE = 1e-4  # nats; what the composition of a batch changes in fp32 was measured as 3e-6
OPERATIONS = (
    ("stage", None), ("activate", "finish"), ("rollback", "finish"), ("activate", "switch"),
    ("stage", None), ("activate", "switch"), ("rollback", "switch"), ("activate", "finish"),
)  # fmt: skip
ADAPTERS = [random_adapter(seed) for seed in (91, 92, 93)]
PAYLOADS = [adapter.encode() for adapter in ADAPTERS]
PROMPTS = [[random.Random(seed).randrange(3, 53) for _ in range(4 + 2 * seed)] for seed in range(16)]


@dataclasses.dataclass(frozen=True)
class Reply:
    """What a completed request asked for and got."""

    prompt: int
    asked_tokens: int
    tokens: list[int]
    spans: list[list[int]]

    @property
    def versions(self) -> list[int]:
        return [version for version, _, count in self.spans for _ in range(count)]


class Soak:
    """Clients, and a trainer beside them, on one event loop."""

    def __init__(self, server: Server, first_version: int, num_requests: int):
        self.num_requests = num_requests
        self.replies: list[Reply] = []
        self.aborted = self.disconnected = 0
        self.adapter_of: dict[int, int | None] = {0: None, first_version: 0}
        self.operations: list[tuple[str, str | None]] = []
        self.memory_bytes: list[list[int]] = []
        self._server = server
        self._newest = first_version
        self._numbers = iter(range(num_requests))
        self._measured = [server.processes()[0], *server.schedulers()]

    async def run(self) -> None:
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(self._server.url, connector=connector, timeout=timeout) as self._session:
            clients = asyncio.gather(*(self._client() for _ in range(CONCURRENCY)))
            await asyncio.gather(clients, self._trainer(clients))

    async def _client(self) -> None:
        for number in self._numbers:
            # Of one width: SGLang aborts every request whose id begins so (managers/scheduler.py::Scheduler.abort_request).
            body = {"input_ids": PROMPTS[number % len(PROMPTS)], "rid": f"soak-{number:06d}"}
            if number % 20 == 7:
                await self._disconnect(body)
            elif number % 20 == 13:
                await self._abort(body)
            else:
                await self._complete(number, body)

    async def _complete(self, number: int, body: dict) -> None:
        asked_tokens = LENGTHS[number % len(LENGTHS)]
        choice = {"orbit_version": 0} if number % 10 == 0 else {}
        answer = await self._generate({**body, **choice}, asked_tokens)
        self.replies.append(Reply(number % len(PROMPTS), asked_tokens, answer["output_ids"], spans(answer)))

    async def _abort(self, body: dict) -> None:
        answer = asyncio.ensure_future(self._generate(body, ENDLESS))
        while not (await asyncio.wait([answer], timeout=0.1))[0]:
            await self._post("/abort_request", json={"rid": body["rid"]})
        assert answer.result()["meta_info"]["finish_reason"]["type"] == "abort"
        self.aborted += 1

    async def _disconnect(self, body: dict) -> None:
        body = {**body, "stream": True, "sampling_params": greedy(ENDLESS)}
        async with self._session.post("/generate", json=body) as response:
            assert (await response.content.readline()).startswith(b"data: {")
            response.close()
        self.disconnected += 1

    async def _generate(self, body: dict, num_tokens: int) -> dict:
        async with self._session.post("/generate", json={**body, "sampling_params": greedy(num_tokens)}) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def _post(self, path: str, **request) -> int:
        async with self._session.post(path, **request) as response:
            await response.read()
            return response.status

    async def _trainer(self, clients: asyncio.Future) -> None:
        for operation, inflight in itertools.cycle(OPERATIONS):
            await asyncio.wait([clients], timeout=OPERATION_INTERVAL_S)
            if clients.done():
                return
            self.memory_bytes.append([process.memory_info().rss for process in self._measured])
            if operation == "stage":
                await self._stage()
            else:
                body = {"inflight": inflight} | ({"version": self._newest} if operation == "activate" else {})
                assert await self._post(f"/orbit/{operation}", json=body) == 200
            self.operations.append((operation, inflight))

    async def _stage(self) -> None:
        """Stage the next version, as soon as the last request of the one that it replaces has ended."""
        self._newest += 1
        index = self.adapter_of[self._newest] = self._newest % len(ADAPTERS)
        while (
            status := await self._post("/orbit/stage", params={"version": self._newest}, data=PAYLOADS[index])
        ) != 200:
            assert status == 409
            await asyncio.sleep(0.1)


def greedy(num_tokens: int) -> dict:
    return {"temperature": 0.0, "max_new_tokens": num_tokens, "ignore_eos": True}


def reference_tokens(server: Server) -> list[list[int]]:
    """The active version's answer to each prompt, which no rounding can change."""
    answers = server.generate(prompt=PROMPTS, tokens=max(LENGTHS), top_logprobs_num=2)
    for answer in answers:
        for (best, _, _), (second, _, _) in answer["meta_info"]["output_top_logprobs"]:
            assert best - second > NO_TIE
    return [answer["output_ids"] for answer in answers]


@pytest.fixture(scope="module")
def references(running):
    """By index of the adapter, ``None`` for the base."""
    running.idle_on_base()
    references = {None: reference_tokens(running)}
    for index in reversed(range(len(ADAPTERS))):
        running.install(ADAPTERS[index])
        references[index] = reference_tokens(running)
    assert len({str(tokens) for tokens in references.values()}) == len(references)
    return references


@pytest.fixture(scope="module")
def soak(running, references):
    num_requests = int(os.environ.get("ORBIT_SOAK_REQUESTS", NUM_REQUESTS[len(running.schedulers())]))
    soak = Soak(running, running.status()["active_version"], num_requests)
    asyncio.run(soak.run())
    running.wait_until_idle()
    return soak


def test_no_request_is_lost(soak):
    assert soak.disconnected == len(range(7, soak.num_requests, 20))
    assert soak.aborted == len(range(13, soak.num_requests, 20))
    assert len(soak.replies) == soak.num_requests - soak.disconnected - soak.aborted
    for reply in soak.replies:
        assert len(reply.tokens) == len(reply.versions) == reply.asked_tokens
        starts = itertools.accumulate((count for _, _, count in reply.spans), initial=0)
        assert [first for _, first, _ in reply.spans] == list(starts)[:-1]


def test_tokens_of_one_version_are_exactly_those_it_gives_alone(soak, references):
    whole = [reply for reply in soak.replies if len(reply.spans) == 1]
    assert {soak.adapter_of[reply.spans[0][0]] for reply in whole} == references.keys()
    for reply in whole:
        expected = references[soak.adapter_of[reply.spans[0][0]]][reply.prompt]
        assert reply.tokens == expected[: reply.asked_tokens], reply


def test_tokens_on_both_sides_of_a_switch_are_those_of_the_reported_versions(soak, checkpoints):
    switched = [reply for reply in soak.replies if len(reply.spans) > 1]
    assert switched
    with served(checkpoints.plain("qwen3"), dtype="float32") as model:
        replies = random.Random(0).sample(switched, min(REPLAYED, len(switched)))
        for reply in replies:
            assert max(deficits(model, reply, [soak.adapter_of[version] for version in reply.versions])) < NO_TIE, reply
        unswitched = [
            max(deficits(model, reply, [soak.adapter_of[reply.versions[0]]] * len(reply.versions)))
            for reply in replies[:UNSWITCHED]
        ]
    assert max(unswitched) > 100 * NO_TIE, "the replay cannot tell the versions apart"


def deficits(model: Served, reply: Reply, adapters: list[int | None]) -> list[float]:
    """By how many nats each token is less likely than the best, when every step is computed by the adapter given for it.

    A request that switches keeps the keys and values of the version before, so it cannot be replayed with one prefill.
    """
    req = Req("0", "", PROMPTS[reply.prompt], SamplingParams(temperature=0, max_new_tokens=reply.asked_tokens))
    req.fill_ids, req.logprob_start_len = req.origin_input_ids, -1
    req.set_extend_input_len(len(req.origin_input_ids))
    req.orbit = RequestVersion(version=0, slot=BASE_SLOT, chosen=True, base_key=None)
    batch, below_best = None, []
    for step, (adapter, token) in enumerate(zip(adapters, reply.tokens, strict=True)):
        if adapter is not None and (step == 0 or adapter != adapters[step - 1]):
            model.stage(ADAPTERS[adapter])
        req.orbit.slot = BASE_SLOT if adapter is None else ADAPTED_SLOT
        if batch is None:
            _, logits_1V, batch = extend([req], model.runner)
        else:
            _, logits_1V = decode(torch.tensor(reply.tokens[step - 1 : step]), batch, model.runner)
        logprobs_V = logits_1V[0].float().log_softmax(-1)
        below_best.append((logprobs_V.max() - logprobs_V[token]).item())
    model.runner.req_to_token_pool.clear()
    model.runner.token_to_kv_pool_allocator.clear()
    return below_best


def test_nothing_is_in_use_when_all_have_gone(soak, running):
    server = running
    assert set(soak.operations) == set(OPERATIONS)
    assert server.status()["requests"] == {}
    assert server.post("/flush_cache").status_code == 200
    server.rollback(0)
    assert len(server.post("/orbit/discard").json()["discarded"]) == 2


@pytest.mark.long
@pytest.mark.server("qwen3")
def test_memory_is_flat(soak):
    quarter = len(soak.memory_bytes) // 4
    for bytes_of_process in zip(*soak.memory_bytes, strict=True):
        second = statistics.mean(bytes_of_process[quarter : 2 * quarter])
        last = statistics.mean(bytes_of_process[-quarter:])
        assert abs(last / second - 1) <= 0.03
