"""Staging and activation while requests run (Qwen3, tied rotations, overlap schedule)."""

import statistics

import pytest

from tests.support.adapters import random_adapter
from tests.support.server import PROMPT, Running, output_logprobs, spans, wait_for

pytestmark = pytest.mark.server("qwen3")

LONG = 200


def test_twenty_stagings_leave_a_running_request_bitwise_unchanged(server):
    alone = server.generate(tokens=LONG)
    version = server.new_version()
    adapters = [random_adapter(seed) for seed in range(20)]
    during = []
    running = Running(lambda: [server.generate(tokens=LONG) for _ in range(6)])
    wait_for(lambda: server.status()["requests"])
    for offset, adapter in enumerate(adapters):
        assert server.stage(version + offset, adapter).status_code == 200
        during.append(not running.finished)
    answers = running.join()
    assert all(during)
    for answer in answers:
        assert answer["output_ids"] == alone["output_ids"]
        assert output_logprobs(answer) == output_logprobs(alone)
        assert spans(answer) == [[0, 0, LONG]]


@pytest.mark.server("qwen3", "qwen3 on two ranks")
def test_finish_ends_a_request_on_the_version_it_started_with(server):
    """docs/field-cases.md: labels of the old version."""
    old = server.install(random_adapter(1))
    alone = server.generate(tokens=LONG)
    new = server.new_version()
    assert server.stage(new, random_adapter(2)).status_code == 200
    with server.in_flight(tokens=LONG) as running:
        assert server.activate(new).json()["requests"] == {str(old): 1}
        assert not running.finished
        assert spans(server.generate(tokens=2)) == [[new, 0, 2]]
        refused = server.stage(new + 1, random_adapter(3))
        assert refused.status_code == 409 and refused.json()["error"]["code"] == "slot_in_use"
        answer = running.join()
    assert spans(answer) == [[old, 0, LONG]]
    assert answer["output_ids"] == alone["output_ids"]
    assert server.stage(new + 1, random_adapter(3)).status_code == 200


@pytest.mark.server("qwen3", "qwen3 on two ranks")
def test_switch_continues_on_the_new_version_and_shares_no_cache(server):
    old = server.install(random_adapter(1))
    before = server.generate(tokens=LONG)
    new = server.new_version()
    assert server.stage(new, random_adapter(2)).status_code == 200
    clean = server.generate(tokens=32, orbit_version=new)
    prompt = [11, *PROMPT]
    with server.in_flight(prompt=prompt, tokens=LONG) as running:
        assert server.activate(new, "switch").json()["requests"] == {str(new): 1}
        answer = running.join()
    (first, _, count), (second, start, rest) = spans(answer)
    assert (first, second, count + rest, start) == (old, new, LONG, count)
    unswitched = server.generate(prompt=prompt, tokens=LONG, orbit_version=old)
    assert answer["output_ids"][:count] == unswitched["output_ids"][:count]
    assert answer["output_ids"][count:] != unswitched["output_ids"][count:]
    again = server.generate(prompt=prompt + answer["output_ids"][:64], tokens=4, logprob_start_len=-1)
    assert again["meta_info"]["cached_tokens"] == 0
    assert server.generate(tokens=32)["output_ids"] == clean["output_ids"]
    assert before["output_ids"][:32] != clean["output_ids"]


@pytest.mark.server("qwen3", "qwen3 on two ranks")
def test_a_request_that_chose_its_version_keeps_it(server):
    server.install(random_adapter(1))
    new = server.new_version()
    assert server.stage(new, random_adapter(2)).status_code == 200
    with server.in_flight(tokens=LONG, orbit_version=0) as running:
        assert server.activate(new, "switch").status_code == 200
        assert not running.finished
        assert spans(running.join()) == [[0, 0, LONG]]


@pytest.mark.alone
def test_sixteen_requests_survive_activations_that_hold_the_loop_under_a_millisecond(server):
    """The pause is measured in the scheduler, around the whole operation.

    docs/field-cases.md: activation aborts nothing.
    """
    server.install(random_adapter(1))
    server.install(random_adapter(2))
    older, newer = server.status()["versions"][1:]
    pauses = []
    running = Running(lambda: server.generate(prompt=[PROMPT] * 16, tokens=LONG))
    wait_for(lambda: sum(server.status()["requests"].values()) == 16)
    for _ in range(10):
        assert not running.finished
        pauses.append(server.post("/orbit/rollback", {"version": older, "inflight": "switch"}).json()["pause_ms"])
        pauses.append(server.activate(newer, "switch").json()["pause_ms"])
    answers = running.join()
    assert statistics.median(pauses) < 1, pauses  # measured 0.08
    for answer in answers:
        assert answer["meta_info"]["finish_reason"]["type"] == "length"
        assert sum(count for _, _, count in spans(answer)) == LONG
        assert len(spans(answer)) > 1


@pytest.mark.server("qwen3", "qwen3 on two ranks")
def test_requests_that_have_not_started_take_the_new_version(server):
    old = server.install(random_adapter(1))
    new = server.new_version()
    assert server.stage(new, random_adapter(2)).status_code == 200
    running = Running(lambda: server.generate(prompt=[PROMPT] * 48, tokens=100))
    wait_for(lambda: sum(server.status()["requests"].values()) == 48)
    requests_per_version = server.activate(new).json()["requests"]
    answers = running.join()
    assert requests_per_version == {str(old): 32, str(new): 16}
    assert all(len(spans(answer)) == 1 for answer in answers)
    assert sorted(spans(answer)[0][0] for answer in answers) == [old] * 32 + [new] * 16


@pytest.mark.server("qwen3", "qwen3 on two ranks")
def test_requests_that_lose_their_cache_in_a_pause_all_finish(server):
    """Four retracted, the rest queued, then an activation. docs/field-cases.md: paused and retracted requests."""
    old = server.install(random_adapter(1))
    alone = server.generate(tokens=LONG)
    new = server.new_version()
    assert server.stage(new, random_adapter(2)).status_code == 200
    clean = server.generate(tokens=LONG, orbit_version=new)
    running = Running(lambda: server.generate(prompt=[PROMPT] * 4, tokens=LONG))
    wait_for(lambda: server.status()["requests"] == {str(old): 4})
    assert server.post("/pause_generation", {"mode": "retract"}).status_code == 200
    assert not running.finished
    assert server.activate(new, "switch").json()["requests"] == {str(new): 4}
    assert server.post("/continue_generation", {}).status_code == 200
    for answer in running.join():
        (first, _, count), (second, _, rest) = spans(answer)
        assert (first, second, count + rest) == (old, new, LONG)
        assert answer["output_ids"][:count] == alone["output_ids"][:count]
        assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert server.generate(tokens=LONG)["output_ids"] == clean["output_ids"]


def test_rollback_and_discard(server):
    old = server.install(random_adapter(1))
    alone = server.generate()
    new = server.install(random_adapter(2))
    assert server.post("/orbit/rollback").json()["active_version"] == old
    assert server.generate()["output_ids"] == alone["output_ids"]
    refused = server.post("/orbit/rollback")
    assert refused.status_code == 409 and refused.json()["error"]["code"] == "nothing_to_roll_back"
    assert server.post("/orbit/discard").json() == {"discarded": [new]}
    refused = server.activate(new)
    assert refused.status_code == 409 and refused.json()["error"]["code"] == "version_not_staged"
    assert server.status()["versions"] == [0, old]
