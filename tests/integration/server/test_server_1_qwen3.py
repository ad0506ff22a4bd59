"""What a request sees: the adapter, its version, and nothing of any other version (Qwen3, tied rotations)."""

import json

import pytest
import reference
import requests
import tiny_models
import torch
from harness import PROMPT, Running, output_logprobs, prompt_logprobs, spans, wait_for

from orbit_kernels.contract.payload import Adapter

TEXT = "1+2=?"


def all_logprobs(answer: dict) -> torch.Tensor:
    return torch.tensor(prompt_logprobs(answer) + output_logprobs(answer))


def stream(server, route: str, body: dict) -> list[dict]:
    with requests.post(server.url + route, json={**body, "stream": True}, stream=True, timeout=60) as response:
        lines = [line[len(b"data: ") :] for line in response.iter_lines() if line.startswith(b"data: ")]
    assert lines.pop() == b"[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("targets", [tiny_models.LINEAR_TARGETS, ("o_proj", "down_proj")])
def test_equals_peft_per_token(qwen3, servers, tmp_path, targets):
    base = qwen3.generate(tokens=24)
    adapter = tiny_models.random_adapter(1, targets=targets)
    qwen3.install(adapter)
    answer = qwen3.generate(tokens=24)
    served = all_logprobs(answer)
    expected = reference.logprobs(
        servers.checkpoint("qwen3"), adapter, PROMPT + answer["output_ids"], tmp_path / "peft"
    )
    assert (served[:23] - all_logprobs(base)[:23]).abs().max() > 0.1
    assert (served - expected).abs().max() <= 1e-4  # measured 8e-6


def test_the_active_version_answers_on_every_route_that_names_none(qwen3):
    """field-cases #1."""
    base = qwen3.generate()
    version = qwen3.install(tiny_models.random_adapter(1))
    adapted = qwen3.generate()
    assert adapted["output_ids"][0] != base["output_ids"][0]
    assert spans(adapted) == [[version, 0, 16]]

    again = qwen3.generate(orbit_version=0)
    assert again["output_ids"] == base["output_ids"] and output_logprobs(again) == output_logprobs(base)
    assert spans(again) == [[0, 0, 16]]

    batch = qwen3.generate(prompt=[PROMPT, PROMPT])
    assert [answer["output_ids"][0] for answer in batch] == [adapted["output_ids"][0]] * 2
    assert [spans(answer) for answer in batch] == [[[version, 0, 16]]] * 2

    *_, last = stream(
        qwen3, "/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
    )
    assert spans(last) == [[version, 0, 8]]


@pytest.mark.parametrize("route, field", [("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")])
def test_openai_routes_report_versions_and_honour_the_choice(qwen3, route, field):
    """field-cases #1."""
    version = qwen3.install(tiny_models.random_adapter(1))
    prompt = TEXT if field == "prompt" else [{"role": "user", "content": TEXT}]
    body = {"model": "m", field: prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "n": 2}
    texts = {}
    for requested, expected in ((None, version), (0, 0)):
        choice = {} if requested is None else {"orbit_version": requested}
        answer = qwen3.post(route, {**body, **choice}).json()
        assert answer["metadata"]["orbit_versions"] == [[[expected, 0, 6]]] * 2
        texts[expected] = json.dumps([choice.get("text") or choice["message"] for choice in answer["choices"]])
        events = stream(qwen3, route, {**body, **choice})
        assert events[-1]["metadata"]["orbit_versions"] == [[[expected, 0, 6]]] * 2
    assert texts[version] != texts[0]


BODIES = {
    "/generate": {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4}},
    "/v1/completions": {"model": "m", "prompt": TEXT, "max_tokens": 4},
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 4},
}


def assert_not_held(answer, qwen3) -> None:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"code", "message", "detail"} and error["code"] == "version_not_held"
    assert "must be one of the live versions" in error["message"]
    assert error["detail"] == {"versions": qwen3.status()["versions"]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", BODIES)
def test_a_version_that_is_not_live_is_refused(qwen3, route, stream):
    for requested in (999, -1, "1", True, 1.0):
        answer = qwen3.post(route, {**BODIES[route], "orbit_version": requested, "stream": stream})
        assert_not_held(answer, qwen3)


def test_one_version_of_a_batch_that_is_not_live_refuses_the_batch(qwen3):
    params = [{"max_new_tokens": 4, "custom_params": {"orbit_version": version}} for version in (0, 999)]
    assert_not_held(qwen3.post("/generate", {"input_ids": [PROMPT] * 2, "sampling_params": params}), qwen3)


@pytest.mark.parametrize("route, shape", [("/generate", {"error"}), ("/v1/completions", {"object", "message", "type"})])
def test_other_errors_of_a_request_that_names_a_version_stay_those_of_sglang(qwen3, route, shape):
    too_long = {"input_ids": [3] * 20000} if route == "/generate" else {"prompt": [3] * 20000}
    errors = [qwen3.post(route, {**BODIES[route], **too_long, **choice}) for choice in ({}, {"orbit_version": 0})]
    assert [answer.status_code for answer in errors] == [400, 400]
    assert errors[0].json() == errors[1].json() and errors[1].json().keys() >= shape
    assert "version_not_held" not in errors[1].text


def test_base_and_two_versions_in_one_batch(qwen3):
    qwen3.install(tiny_models.random_adapter(1))
    qwen3.install(tiny_models.random_adapter(2))
    versions = qwen3.status()["versions"]
    assert len(versions) == 3
    alone = [qwen3.generate(tokens=24, orbit_version=version) for version in versions]
    assert len({answer["output_ids"][0] for answer in alone}) > 1
    params = [
        {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True, "custom_params": {"orbit_version": version}}
        for version in versions
    ]
    body = {"input_ids": [PROMPT] * 3, "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
    together = qwen3.post("/generate", body).json()
    for version, one, mixed in zip(versions, alone, together, strict=True):
        assert spans(mixed) == [[version, 0, 24]]
        assert mixed["output_ids"] == one["output_ids"]
        assert (all_logprobs(mixed) - all_logprobs(one)).abs().max() <= 1e-4  # measured 3e-6


def test_a_module_that_the_next_version_leaves_out_is_the_base_again(qwen3):
    """field-cases #10: the same slot holds q_proj and down_proj first, then o_proj alone."""
    both = tiny_models.random_adapter(1, targets=("o_proj", "down_proj"))
    only = tiny_models.random_adapter(2, targets=("o_proj",))
    qwen3.install(both)
    qwen3.install(only)
    clean = qwen3.generate(tokens=24)
    qwen3.install(both)
    qwen3.install(both)
    first_slot = next(slot["slot"] for slot in qwen3.status()["slots"] if slot["state"] == "staged")
    qwen3.install(only)
    reused = next(slot for slot in qwen3.status()["slots"] if slot["state"] == "active")
    assert reused["slot"] == first_slot and reused["modules"] == {"o_proj": 3}
    again = qwen3.generate(tokens=24)
    assert again["output_ids"] == clean["output_ids"]
    assert prompt_logprobs(again) == prompt_logprobs(clean) and output_logprobs(again) == output_logprobs(clean)


def test_no_cached_prefix_crosses_versions(qwen3):
    """field-cases #12; entries of an old version serve again after a rollback."""
    prompt = [(7 * index) % 50 + 3 for index in range(200)]
    first, second = tiny_models.random_adapter(3), tiny_models.random_adapter(4)
    old = qwen3.install(first)
    quick = {"prompt": prompt, "tokens": 4, "logprob_start_len": -1}
    assert qwen3.generate(**quick)["meta_info"]["cached_tokens"] == 0
    assert qwen3.generate(**quick)["meta_info"]["cached_tokens"] > 150
    qwen3.install(second)
    warm = qwen3.generate(prompt=prompt, tokens=16)
    assert warm["meta_info"]["cached_tokens"] == 0
    assert qwen3.generate(**quick)["meta_info"]["cached_tokens"] > 150
    qwen3.rollback(old)
    assert qwen3.generate(**quick)["meta_info"]["cached_tokens"] > 150
    assert qwen3.post("/flush_cache").status_code == 200
    qwen3.rollback(0)
    qwen3.install(second)
    cold = qwen3.generate(prompt=prompt, tokens=16)
    assert cold["output_ids"] == warm["output_ids"]
    assert prompt_logprobs(cold) == prompt_logprobs(warm) and output_logprobs(cold) == output_logprobs(warm)


def test_logprobs_are_those_of_the_temperature_that_was_sampled_with(qwen3):
    """field-cases #23."""

    def at(logits: torch.Tensor, temperature: float) -> torch.Tensor:
        return (logits / temperature).log_softmax(-1)

    by_hand = torch.tensor([2.0, 1.0, 0.0])
    assert [round(at(by_hand, t)[0].item(), 3) for t in (1.0, 0.5)] == [-0.408, -0.143]
    qwen3.install(tiny_models.random_adapter(1))
    whole = qwen3.generate(tokens=1, top_logprobs_num=64)["meta_info"]["output_top_logprobs"][0]
    logits = torch.empty(64)
    for logprob, token, _ in whole:
        logits[token] = logprob
    for temperature in (1.0, 0.5):
        answer = qwen3.generate(tokens=1, sampling_params={"temperature": temperature})
        (logprob, token, _) = answer["meta_info"]["output_token_logprobs"][0]
        assert abs(logprob - at(logits, temperature)[token]) <= 1e-5


def test_the_adapter_is_returned_as_it_was_staged(qwen3):
    adapter = tiny_models.random_adapter(5, dtype=torch.bfloat16)
    payload = adapter.encode()
    version = qwen3.install(payload)
    answer = qwen3.get("/orbit/adapter", version=version)
    assert answer.content == payload
    active = next(slot for slot in qwen3.status()["slots"] if slot["state"] == "active")
    assert Adapter.decode(answer.content).digest() == adapter.digest() == active["digest"]
    assert qwen3.get("/orbit/adapter", version=0).status_code == 404


def test_abandoned_requests_free_their_slot(qwen3):
    """field-cases #19."""
    version = qwen3.install(tiny_models.random_adapter(1))
    long = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 12000, "ignore_eos": True}}
    four = {"input_ids": [PROMPT, PROMPT[1:]], "sampling_params": {"max_new_tokens": 256, "ignore_eos": True, "n": 4}}
    finishing = Running(lambda: qwen3.post("/generate", four).json())
    aborted = Running(lambda: qwen3.post("/generate", {**long, "rid": "aborted"}).json())
    with requests.post(qwen3.url + "/generate", json={**long, "stream": True}, stream=True, timeout=60):
        wait_for(lambda: qwen3.status()["requests"].get(str(version), 0) == 10)
        assert qwen3.post("/abort_request", {"rid": "aborted"}).status_code == 200
        assert len(finishing.join()) == 8
        assert aborted.join()["meta_info"]["finish_reason"]["type"] == "abort"
        assert qwen3.status()["requests"] == {str(version): 1}
    # SGLang 0.5.12 aborts a stream 2 s after its client has left (tokenizer_manager.py:1609), long before its end.
    wait_for(lambda: not qwen3.status()["requests"], timeout_s=8)
    qwen3.install(tiny_models.random_adapter(2))
    qwen3.install(tiny_models.random_adapter(2))
