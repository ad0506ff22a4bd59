"""SGLang's record of routed experts on a CPU, against transformers: as each token was routed, whatever happened to its request.

Suffixes: T tokens, L layers, K experts of a token, E experts.
"""

import base64
import contextlib
import json
import threading
import uuid
from collections.abc import Iterator

import numpy as np
import pytest
import requests
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, DynamicCache

from orbit_kernels.contract.payload import Adapter
from tests.support import in_process, tiny_models
from tests.support.adapters import random_adapter
from tests.support.references import save_adapter
from tests.support.server import PROMPT, Server, spans, wait_for

pytestmark = pytest.mark.server("recording")

LAYERS, TOP_K = tiny_models.SIZES["num_hidden_layers"], 2
LONG_PROMPT = [(7 * index + 3) % 50 + 3 for index in range(150)]
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
# Closer scores may be ordered otherwise by other roundings.
MARGIN = 1e-4


class Reference:
    """The model in transformers, with the adapters of two versions."""

    def __init__(self, checkpoint, folder, adapters: dict[str, Adapter]):
        self._base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self._adapted = None
        for name, adapter in adapters.items():
            place = save_adapter(adapter, folder / name)
            if self._adapted is None:
                self._adapted = PeftModel.from_pretrained(self._base, place, adapter_name=name).eval()
            else:
                self._adapted.load_adapter(place, name)

    @torch.no_grad()
    def scores(self, *parts: tuple[str | None, list[int]]) -> torch.Tensor:
        """Router probabilities [T, L, E] of a sequence, each part of it under its own version (None for the base)."""
        cache, scores = DynamicCache(), []
        for version, ids in parts:
            if version is not None:
                self._adapted.set_adapter(version)
            with contextlib.nullcontext() if version else self._adapted.disable_adapter():
                output = self._adapted(torch.tensor([ids]), past_key_values=cache, output_router_logits=True)
            scores.append(torch.stack([logits.softmax(-1) for logits in output.router_logits], dim=1))
        return torch.cat(scores)


@pytest.fixture(scope="module")
def adapters() -> dict[str, Adapter]:
    return {f"v{seed}": random_adapter(seed, targets=ATTENTION) for seed in (1, 2)}


@pytest.fixture(scope="module")
def reference(checkpoints, tmp_path_factory, adapters) -> Reference:
    return Reference(checkpoints.plain("qwen3_moe"), tmp_path_factory.mktemp("adapters"), adapters)


def recorded(answer: dict) -> torch.Tensor:
    """The record of an answer [T, L, K]."""
    flat = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), dtype=np.int32)
    return torch.from_numpy(flat.copy()).reshape(-1, LAYERS, TOP_K).long()


def agrees(record_TLK: torch.Tensor, scores_TLE: torch.Tensor) -> torch.Tensor:
    """[T], whether a token's record names the experts of the best scores in every layer, where these are clear."""
    scores_TLE = scores_TLE[: len(record_TLK)]
    best = scores_TLE.topk(TOP_K + 1, dim=-1)
    is_clear_TL = best.values[..., TOP_K - 1] - best.values[..., TOP_K] > MARGIN
    assert is_clear_TL.float().mean() > 0.98
    same_TL = (record_TLK.sort(-1).values == best.indices[..., :TOP_K].sort(-1).values).all(-1)
    return (same_TL | ~is_clear_TL).all(-1)


def generate(server: Server, prompt=LONG_PROMPT, tokens: int = 16, **fields):
    return server.generate(prompt, tokens, return_routed_experts=True, logprob_start_len=-1, **fields)


def test_prompt_and_generated_tokens(server, reference):
    """Two answers to one prompt, of which all tokens have a record but the last; the prompt was prefilled in chunks."""
    answers = generate(server, sampling_params={"n": 2, "temperature": 1.0})
    assert answers[0]["output_ids"] != answers[1]["output_ids"]
    for answer in answers:
        ids = LONG_PROMPT + answer["output_ids"]
        assert len(recorded(answer)) == len(ids) - 1
        assert agrees(recorded(answer), reference.scores((None, ids))).all()


def test_only_requests_that_ask_get_a_record(server):
    answer = server.generate(PROMPT, 4)
    assert "routed_experts" not in answer["meta_info"]
    whole, rest = (recorded(generate(server, PROMPT, 4, routed_experts_start_len=start)) for start in (0, 10))
    assert torch.equal(whole[10:], rest)


def test_one_that_asks_beside_one_that_does_not(server):
    """In the steps of both the first has no record; the second's is its own."""
    alone = generate(server, PROMPT, 4)
    body = {"input_ids": LONG_PROMPT, "stream": True, "sampling_params": {"max_new_tokens": 60, "ignore_eos": True}}
    with requests.post(server.url + "/generate", json=body, stream=True, timeout=60) as response:
        events = _events(response)
        assert "routed_experts" not in next(events)["meta_info"]
        beside = generate(server, PROMPT, 4)
        *_, last = events
    assert torch.equal(recorded(beside), recorded(alone))
    assert last["meta_info"]["completion_tokens"] == 60 and not last["meta_info"].get("routed_experts")


def test_cached_tokens_have_the_record_of_their_own_version(server, reference, adapters):
    version = server.install(adapters["v1"])
    for name, number in (("v1", version), (None, 0)):
        first = generate(server, orbit_version=number)
        ids = LONG_PROMPT + first["output_ids"]
        again = generate(server, ids, orbit_version=number)
        assert again["meta_info"]["cached_tokens"] >= len(ids) - 1
        ids += again["output_ids"]
        record = recorded(again)
        assert torch.equal(record[: len(recorded(first))], recorded(first))
        assert agrees(record, reference.scores((name, ids))).all()
        assert not agrees(record, reference.scores(("v2" if name else "v1", ids))).all()


class Streams:
    """Generations whose tokens are counted as they come; ``answers`` are their last events.

    Each has a name of its own in ``rids``: SGLang aborts the name of a stream two seconds after the stream has ended.
    """

    def __init__(self, server: Server, prompts: list[list[int]], tokens: int):
        self.counts, self.answers = [0] * len(prompts), [{} for _ in prompts]
        self.rids = [uuid.uuid4().hex for _ in prompts]
        self._server, self._tokens = server, tokens
        self._threads = [
            threading.Thread(target=self._read, args=(index, prompt)) for index, prompt in enumerate(prompts)
        ]
        for thread in self._threads:
            thread.start()

    def wait_for_tokens(self, count: int) -> None:
        wait_for(lambda: min(self.counts) >= count, timeout_s=60)

    def join(self) -> list[dict]:
        for thread in self._threads:
            thread.join(timeout=120)
        return self.answers

    def _read(self, index: int, prompt: list[int]) -> None:
        params = {"temperature": 0.0, "max_new_tokens": self._tokens, "ignore_eos": True}
        body = {"input_ids": prompt, "rid": self.rids[index], "sampling_params": params, "stream": True}
        url = self._server.url + "/generate"
        with requests.post(url, json={**body, "return_routed_experts": True}, stream=True, timeout=120) as response:
            for event in _events(response):
                assert event["meta_info"].get("routed_experts") is None or event["meta_info"]["finish_reason"]
                self.counts[index] = event["meta_info"]["completion_tokens"]
                self.answers[index] = event


def _events(response: requests.Response) -> Iterator[dict]:
    for line in response.iter_lines():
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))


def switched(server: Server, adapters, prompts: list[list[int]], tokens: int) -> list[dict]:
    """Answers that began under ``v1`` and went on under ``v2`` after ten tokens or more."""
    server.install(adapters["v1"])
    version = server.new_version()
    assert server.stage(version, adapters["v2"]).status_code == 200
    streams = Streams(server, prompts, tokens)
    streams.wait_for_tokens(10)
    assert server.activate(version, "switch").status_code == 200
    return streams.join()


def test_a_request_that_goes_on_with_another_version(server, reference, adapters):
    """Each token has the experts of the version that computed it. docs/field-cases.md: a route for each position."""
    (answer,) = switched(server, adapters, [PROMPT], 120)
    (_, _, count), (_, _, rest) = spans(answer)
    ids, record = PROMPT + answer["output_ids"], recorded(answer)
    assert count + rest == 120 and len(record) == len(ids) - 1
    # The last token of the first version is sampled from it, and is the first that goes through the second.
    first = len(PROMPT) + count - 1
    assert agrees(record, reference.scores(("v1", ids[:first]), ("v2", ids[first:]))).all()
    for version in ("v1", "v2"):
        assert not agrees(record, reference.scores((version, ids))).all()


def test_a_retracted_request_keeps_what_was_recorded(server, reference, adapters):
    """Retracted after a switch, it is computed again with the second version; the log-probs are still the first one's."""
    before = server.log.read_text().count("Retract requests")
    prompts = [[first, *PROMPT] for first in (11, 22)]
    answers = switched(server, adapters, prompts, 400)
    assert server.log.read_text().count("Retract requests") > before
    recomputed = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        (_, _, count), (_, _, rest) = spans(answer)
        ids, record, first = prompt + answer["output_ids"], recorded(answer), len(prompt) + count - 1
        assert count + rest == 400 and len(record) == len(ids) - 1
        second = reference.scores(("v2", ids))
        mixed = reference.scores(("v1", ids[:first]), ("v2", ids[first:]))
        assert agrees(record[:first], mixed).all()
        assert not agrees(record[:first], second).all()
        as_before, as_recomputed = agrees(record, mixed), agrees(record, second)
        assert (as_before | as_recomputed)[first:].all()
        recomputed += not as_before[first:].all()
    assert recomputed, "no request was retracted after it had switched"


def test_an_aborted_request_and_one_that_takes_it_up(server, reference):
    """As many rows as positions, none twice. docs/field-cases.md: a route for each position."""
    streams = Streams(server, [PROMPT], 400)
    streams.wait_for_tokens(10)
    assert server.post("/abort_request", {"rid": streams.rids[0]}).status_code == 200
    (answer,) = streams.join()
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    ids = PROMPT + answer["output_ids"]
    assert 10 <= len(answer["output_ids"]) < 400 and len(recorded(answer)) == len(ids) - 1
    taken_up = generate(server, ids, 20)
    assert taken_up["meta_info"]["cached_tokens"] >= len(ids) - 1
    ids += taken_up["output_ids"]
    assert len(recorded(taken_up)) == len(ids) - 1
    assert torch.equal(recorded(taken_up)[: len(recorded(answer))], recorded(answer))
    assert agrees(recorded(taken_up), reference.scores((None, ids))).all()


def test_prompts_longer_than_sglangs_buffer(checkpoints, reference):
    """SGLang makes room for one token a request where prompts are not prefilled in chunks."""
    options = {"dtype": "float32", "enable_return_routed_experts": True, "disable_overlap_schedule": True}
    with in_process.served(checkpoints.plain("qwen3_moe"), chunked_prefill_size=-1, **options) as served:
        tokens, _ = served.greedy(LONG_PROMPT, 8)
        (record,) = served.experts
    assert len(record) == len(LONG_PROMPT) + 7
    assert agrees(record.long(), reference.scores((None, LONG_PROMPT + tokens))).all()


def test_what_cannot_be_recorded_is_refused(checkpoints):
    with pytest.raises(ValueError, match="--enable-return-routed-experts: .* is dense, it has no experts to record"):
        with in_process.served(checkpoints.plain("qwen3"), dtype="float32", enable_return_routed_experts=True):
            pass
    with pytest.raises(ValueError, match="a prefix that comes back from the host leaves its record behind"):
        options = {"enable_return_routed_experts": True, "enable_hierarchical_cache": True}
        with in_process.served(checkpoints.plain("qwen3_moe"), **options):
            pass
