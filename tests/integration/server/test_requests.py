"""What a request sees: the adapter, its version, and nothing of any other version (Qwen3, tied rotations)."""

import argparse
import asyncio
import json

import openai
import pytest
import requests
import torch
from sglang import bench_serving

from orbit_kernels.adapters.config import LINEAR_TARGETS
from orbit_kernels.contract.payload import Adapter
from tests.support.adapters import random_adapter
from tests.support.references import peft_logprobs
from tests.support.server import PROMPT, Running, all_logprobs, output_logprobs, prompt_logprobs, spans, wait_for

pytestmark = pytest.mark.server("qwen3")

TEXT = "1+2=?"


def stream(server, route: str, body: dict) -> list[dict]:
    with requests.post(server.url + route, json={**body, "stream": True}, stream=True, timeout=60) as response:
        lines = [line[len(b"data: ") :] for line in response.iter_lines() if line.startswith(b"data: ")]
    assert lines.pop() == b"[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.server("qwen3", "qwen3 on two ranks")
@pytest.mark.parametrize("targets", [LINEAR_TARGETS, ("o_proj", "down_proj")])
def test_equals_peft_per_token(server, checkpoints, tmp_path, targets):
    base = server.generate(tokens=24)
    adapter = random_adapter(1, targets=targets)
    server.install(adapter)
    answer = server.generate(tokens=24)
    served = all_logprobs(answer)
    expected = peft_logprobs(checkpoints.plain("qwen3"), adapter, PROMPT + answer["output_ids"])
    assert (served[:23] - all_logprobs(base)[:23]).abs().max() > 0.1
    assert (served - expected).abs().max() <= 1e-4  # measured 8e-6


def test_the_active_version_answers_on_every_route_that_names_none(server):
    """docs/field-cases.md: no path misses the adapter."""
    base = server.generate()
    version = server.install(random_adapter(1))
    adapted = server.generate()
    assert adapted["output_ids"][0] != base["output_ids"][0]
    assert spans(adapted) == [[version, 0, 16]]

    again = server.generate(orbit_version=0)
    assert again["output_ids"] == base["output_ids"] and output_logprobs(again) == output_logprobs(base)
    assert spans(again) == [[0, 0, 16]]

    batch = server.generate(prompt=[PROMPT, PROMPT])
    assert [answer["output_ids"][0] for answer in batch] == [adapted["output_ids"][0]] * 2
    assert [spans(answer) for answer in batch] == [[[version, 0, 16]]] * 2

    *_, last = stream(
        server, "/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
    )
    assert spans(last) == [[version, 0, 8]]


@pytest.mark.parametrize("route, field", [("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")])
def test_openai_routes_report_versions_and_honour_the_choice(server, route, field):
    """docs/field-cases.md: no path misses the adapter."""
    version = server.install(random_adapter(1))
    prompt = TEXT if field == "prompt" else [{"role": "user", "content": TEXT}]
    body = {"model": "m", field: prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "n": 2}
    texts = {}
    for requested, expected in ((None, version), (0, 0)):
        choice = {} if requested is None else {"orbit_version": requested}
        answer = server.post(route, {**body, **choice}).json()
        assert answer["metadata"]["orbit_versions"] == [[[expected, 0, 6]]] * 2
        texts[expected] = json.dumps([choice.get("text") or choice["message"] for choice in answer["choices"]])
        chunks = stream(server, route, {**body, **choice})
        ends = [chunk for chunk in chunks if chunk["choices"][0]["finish_reason"]]
        assert [chunk["metadata"]["orbit_versions"] for chunk in ends] == [[[[expected, 0, 6]]]] * 2
        assert all("metadata" not in chunk for chunk in chunks if chunk not in ends)
    assert texts[version] != texts[0]


def test_the_openai_package_reads_streams_as_its_users_do(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    options = {"model": "m", "max_tokens": 6, "temperature": 0}
    extra = {"ignore_eos": True, "orbit_version": 0}
    messages = [{"role": "user", "content": TEXT}]
    whole = client.chat.completions.create(messages=messages, extra_body=extra, **options)
    chunks = list(client.chat.completions.create(messages=messages, extra_body=extra, stream=True, **options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].metadata["orbit_versions"] == whole.metadata["orbit_versions"] == [[[0, 0, 6]]]
    whole = client.completions.create(prompt=TEXT, extra_body=extra, **options)
    chunks = list(client.completions.create(prompt=TEXT, extra_body=extra, stream=True, **options))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].metadata["orbit_versions"] == whole.metadata["orbit_versions"] == [[[0, 0, 6]]]


@pytest.mark.parametrize("streamed", [True, False])
def test_sglangs_own_benchmark_reads_answers(server, streamed):
    names = ("disable_ignore_eos", "return_logprob", "print_requests", "header")
    options = dict.fromkeys(names, False) | {"disable_stream": not streamed}
    bench_serving.set_global_args(argparse.Namespace(**options))
    for send, route, prompt in (
        (bench_serving.async_request_openai_completions, "completions", TEXT),
        (bench_serving.async_request_openai_chat_completions, "chat/completions", [{"role": "user", "content": TEXT}]),
    ):
        asked = bench_serving.RequestFuncInput(prompt, f"{server.url}/v1/{route}", 5, 6, "m", "", None, {})
        answer = asyncio.run(send(asked))
        assert answer.success and answer.generated_text, answer.error


BODIES = {
    "/generate": {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4}},
    "/v1/completions": {"model": "m", "prompt": TEXT, "max_tokens": 4},
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 4},
}


def assert_not_held(answer, server) -> None:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"code", "message", "detail"} and error["code"] == "version_not_held"
    assert "must be one of the live versions" in error["message"]
    assert error["detail"] == {"versions": server.status()["versions"]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", BODIES)
def test_a_version_that_is_not_live_is_refused(server, route, stream):
    for requested in (999, -1, "1", True, 1.0):
        answer = server.post(route, {**BODIES[route], "orbit_version": requested, "stream": stream})
        assert_not_held(answer, server)


def test_one_version_of_a_batch_that_is_not_live_refuses_the_batch(server):
    params = [{"max_new_tokens": 4, "custom_params": {"orbit_version": version}} for version in (0, 999)]
    assert_not_held(server.post("/generate", {"input_ids": [PROMPT] * 2, "sampling_params": params}), server)


@pytest.mark.parametrize("route, shape", [("/generate", {"error"}), ("/v1/completions", {"object", "message", "type"})])
def test_other_errors_of_a_request_that_names_a_version_stay_those_of_sglang(server, route, shape):
    too_long = {"input_ids": [3] * 20000} if route == "/generate" else {"prompt": [3] * 20000}
    errors = [server.post(route, {**BODIES[route], **too_long, **choice}) for choice in ({}, {"orbit_version": 0})]
    assert [answer.status_code for answer in errors] == [400, 400]
    assert errors[0].json() == errors[1].json() and errors[1].json().keys() >= shape
    assert "version_not_held" not in errors[1].text


def test_base_and_two_versions_in_one_batch(server):
    server.install(random_adapter(1))
    server.install(random_adapter(2))
    versions = server.status()["versions"]
    assert len(versions) == 3
    alone = [server.generate(tokens=24, orbit_version=version) for version in versions]
    assert len({answer["output_ids"][0] for answer in alone}) > 1
    together = server.generate_on(versions, tokens=24)
    for version, one, mixed in zip(versions, alone, together, strict=True):
        assert spans(mixed) == [[version, 0, 24]]
        assert mixed["output_ids"] == one["output_ids"]
        assert (all_logprobs(mixed) - all_logprobs(one)).abs().max() <= 1e-4  # measured 3e-6


def test_a_module_that_the_next_version_leaves_out_is_the_base_again(server):
    """The same slot holds q_proj and down_proj first, then o_proj alone.

    docs/field-cases.md: what the version before left.
    """
    both = random_adapter(1, targets=("o_proj", "down_proj"))
    only = random_adapter(2, targets=("o_proj",))
    server.install(both)
    server.install(only)
    clean = server.generate(tokens=24)
    server.install(both)
    server.install(both)
    first_slot = next(slot["slot"] for slot in server.status()["slots"] if slot["state"] == "staged")
    server.install(only)
    reused = next(slot for slot in server.status()["slots"] if slot["state"] == "active")
    assert reused["slot"] == first_slot and reused["modules"] == {"o_proj": 3}
    again = server.generate(tokens=24)
    assert again["output_ids"] == clean["output_ids"]
    assert prompt_logprobs(again) == prompt_logprobs(clean) and output_logprobs(again) == output_logprobs(clean)


def test_no_cached_prefix_crosses_versions(server):
    """Entries of an old version serve again after a rollback. docs/field-cases.md: cached prefix of another version."""
    prompt = [(7 * index) % 50 + 3 for index in range(200)]
    first, second = random_adapter(3), random_adapter(4)
    old = server.install(first)
    quick = {"prompt": prompt, "tokens": 4, "logprob_start_len": -1}
    assert server.generate(**quick)["meta_info"]["cached_tokens"] == 0
    assert server.generate(**quick)["meta_info"]["cached_tokens"] > 150
    server.install(second)
    warm = server.generate(prompt=prompt, tokens=16)
    assert warm["meta_info"]["cached_tokens"] == 0
    assert server.generate(**quick)["meta_info"]["cached_tokens"] > 150
    server.rollback(old)
    assert server.generate(**quick)["meta_info"]["cached_tokens"] > 150
    assert server.post("/flush_cache").status_code == 200
    server.rollback(0)
    server.install(second)
    cold = server.generate(prompt=prompt, tokens=16)
    assert cold["output_ids"] == warm["output_ids"]
    assert prompt_logprobs(cold) == prompt_logprobs(warm) and output_logprobs(cold) == output_logprobs(warm)


def test_logprobs_are_those_of_the_temperature_that_was_sampled_with(server):
    """docs/field-cases.md: temperature on both sides."""

    def at(logits: torch.Tensor, temperature: float) -> torch.Tensor:
        return (logits / temperature).log_softmax(-1)

    by_hand = torch.tensor([2.0, 1.0, 0.0])
    assert [round(at(by_hand, t)[0].item(), 3) for t in (1.0, 0.5)] == [-0.408, -0.143]
    server.install(random_adapter(1))
    whole = server.generate(tokens=1, top_logprobs_num=64)["meta_info"]["output_top_logprobs"][0]
    logits = torch.empty(64)
    for logprob, token, _ in whole:
        logits[token] = logprob
    for temperature in (1.0, 0.5):
        answer = server.generate(tokens=1, sampling_params={"temperature": temperature})
        (logprob, token, _) = answer["meta_info"]["output_token_logprobs"][0]
        assert abs(logprob - at(logits, temperature)[token]) <= 1e-5


def test_the_adapter_is_returned_as_it_was_staged(server):
    adapter = random_adapter(5, dtype=torch.bfloat16)
    payload = adapter.encode()
    version = server.install(payload)
    answer = server.get("/orbit/adapter", version=version)
    assert answer.content == payload
    active = next(slot for slot in server.status()["slots"] if slot["state"] == "active")
    assert Adapter.decode(answer.content).digest() == adapter.digest() == active["digest"]
    none = server.get("/orbit/adapter", version=0)
    assert none.status_code == 400 and none.json()["error"]["code"] == "version_not_held"


@pytest.mark.server("qwen3", "qwen3 on two ranks")
def test_abandoned_requests_free_their_slot(server):
    """docs/field-cases.md: slots are given back."""
    version = server.install(random_adapter(1))
    long = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 12000, "ignore_eos": True}}
    four = {"input_ids": [PROMPT, PROMPT[1:]], "sampling_params": {"max_new_tokens": 256, "ignore_eos": True, "n": 4}}
    finishing = Running(lambda: server.post("/generate", four).json())
    aborted = Running(lambda: server.post("/generate", {**long, "rid": "aborted"}).json())
    with requests.post(server.url + "/generate", json={**long, "stream": True}, stream=True, timeout=60):
        wait_for(lambda: server.status()["requests"].get(str(version), 0) == 10)
        assert server.post("/abort_request", {"rid": "aborted"}).status_code == 200
        assert len(finishing.join()) == 8
        assert aborted.join()["meta_info"]["finish_reason"]["type"] == "abort"
        assert server.status()["requests"] == {str(version): 1}
    # SGLang 0.5.12 aborts a stream 2 s after its client has left (``srt/managers/tokenizer_manager.py::TokenizerManager.create_abort_task``), long before its end.
    wait_for(lambda: not server.status()["requests"], timeout_s=8)
    server.install(random_adapter(2))
    server.install(random_adapter(2))
