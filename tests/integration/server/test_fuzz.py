"""Fuzzed bodies over HTTP: a refusal has the form of the contract and changes nothing (Qwen3, tied rotations)."""

import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from orbit_kernels.contract.payload import Adapter
from tests.support.adapters import random_adapter
from tests.support.fuzz_bodies import JSON_TEXTS, fuzzed, json_bodies, payloads, with_text
from tests.support.server import PROMPT, output_logprobs, spans

pytestmark = pytest.mark.server("qwen3")

STAGED = random_adapter(3, targets=("o_proj", "down_proj"))
GENERATION = {"input_ids": PROMPT, "orbit_version": 0, "sampling_params": {"max_new_tokens": 1, "ignore_eos": True}}


@pytest.fixture
def occupied(server):
    """Two versions in the slots, the newer one active: it must answer afterwards as it does before."""
    server.install(random_adapter(1))
    active = server.install(random_adapter(2))
    before = server.generate(orbit_version=active)
    yield server
    after = server.generate(orbit_version=active)
    assert (after["output_ids"], output_logprobs(after)) == (before["output_ids"], output_logprobs(before))


def state(server) -> dict:
    status = server.status()
    return {key: status[key] for key in ("active_version", "versions", "highest_seen", "slots", "staging", "requests")}


def send(server, path: str, body: bytes) -> requests.Response:
    return requests.post(server.url + path, data=body, headers={"Content-Type": "application/json"}, timeout=60)


def assert_refused(answer: requests.Response, *codes: int) -> None:
    assert answer.status_code in codes, answer.text
    assert answer.json()["error"].keys() == {"code", "message", "detail"}
    assert "Traceback" not in answer.text


@fuzzed(700)
@given(body=payloads(STAGED.encode()))
def test_a_staged_body_is_the_adapter_it_holds_or_changes_nothing(occupied, body):
    before = state(occupied)
    answer = occupied.stage(before["highest_seen"] + 1, body)
    if answer.status_code == 200:
        assert answer.json()["digest"] == Adapter.decode(body).digest()
        assert state(occupied)["active_version"] == before["active_version"]
    else:
        assert_refused(answer, 422)
        assert state(occupied) == before


@fuzzed(700)
@given(route=st.sampled_from(["activate", "rollback"]), body=json_bodies({"version": 0, "inflight": "switch"}))
def test_a_control_body_leads_to_a_live_version_or_changes_nothing(occupied, route, body):
    before = state(occupied)
    answer = send(occupied, f"/orbit/{route}", body)
    if answer.status_code == 200:
        assert answer.json()["active_version"] in before["versions"]
    else:
        assert_refused(answer, 400, 409)
        assert state(occupied) == before


@fuzzed(700)
@given(text=JSON_TEXTS | st.integers(0, 9).map(str))
def test_a_generation_runs_on_a_live_version_or_is_refused(occupied, text):
    before = state(occupied)
    answer = send(occupied, "/generate", with_text(GENERATION, "orbit_version", text).encode())
    if answer.status_code == 200:
        ((version, _, count),) = spans(answer.json())
        assert version in before["versions"] and count == 1
    else:
        assert answer.status_code == 400 and answer.json() and "Traceback" not in answer.text
        if "live versions" in answer.text:  # and no other fault of the request, which SGLang or FastAPI would answer
            assert_refused(answer, 400)
    assert state(occupied) == before
