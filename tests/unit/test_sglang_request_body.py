import asyncio
import json

import pytest

from orbit_sglang.http.request_body import VersionInBody, move_version
from orbit_sglang.http.stock_routes import CHOOSING_PATHS, SERVED

POST = {"type": "http", "method": "POST", "path": "/generate", "query_string": b""}
OTHER_PATHS = sorted({path for method, path in map(str.split, SERVED) if method != "GET"} - set(CHOOSING_PATHS))


def moved(body: dict, path: str) -> dict:
    return json.loads(move_version(json.dumps(body).encode(), path))


def test_native_request_carries_the_version_in_its_sampling_params():
    body = {"text": "a", "orbit_version": 3, "sampling_params": {"temperature": 0, "custom_params": {"k": 1}}}
    expected = {"text": "a", "sampling_params": {"temperature": 0, "custom_params": {"k": 1, "orbit_version": 3}}}
    assert moved(body, "/generate") == expected


@pytest.mark.parametrize("params", [None, {}])
def test_native_request_without_sampling_params(params):
    body = {"text": "a", "orbit_version": 0, "sampling_params": params}
    assert moved(body, "/generate")["sampling_params"] == {"custom_params": {"orbit_version": 0}}


def test_every_request_of_a_batch_gets_the_version():
    body = {"text": ["a", "b"], "orbit_version": 2, "sampling_params": [{"temperature": 0}, {"temperature": 1}]}
    params = moved(body, "/generate")["sampling_params"]
    assert [item["custom_params"] for item in params] == [{"orbit_version": 2}] * 2


def test_openai_request_carries_the_version_in_custom_params():
    assert moved({"prompt": "a", "orbit_version": 1}, "/v1/completions") == {
        "prompt": "a",
        "custom_params": {"orbit_version": 1},
    }


@pytest.mark.parametrize("body", [b'{"text": "orbit_version"}', b'{"orbit_version": ', b'["orbit_version"]', b"{}"])
def test_other_bodies_pass_unchanged(body):
    assert move_version(body, "/generate") is body


@pytest.mark.parametrize("params", ["greedy", [3], {"custom_params": [1]}])
def test_params_that_cannot_hold_the_version_are_refused(params):
    with pytest.raises(ValueError, match="must be a JSON object"):
        moved({"text": "a", "orbit_version": 1, "sampling_params": params}, "/generate")


@pytest.mark.parametrize("path", OTHER_PATHS)
@pytest.mark.parametrize("body", [{"orbit_version": 1}, {"instances": [{"text": "a", "orbit_version": 0}]}])
def test_routes_that_would_drop_the_version_refuse_it(path, body):
    with pytest.raises(ValueError, match=f"{path} cannot choose a version"):
        moved(body, path)
    assert moved({"input": "orbit_version"}, path) == {"input": "orbit_version"}


def test_a_body_nested_too_deeply_is_answered_and_goes_no_further():
    body = b'{"orbit_version": ' + b"[" * 100_000
    sent = []

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    async def app(scope, receive, send):
        pytest.fail("the body was passed on")

    asyncio.run(VersionInBody(app)(POST, receive, send))
    assert sent[0]["status"] == 400 and b"nested too deeply" in sent[1]["body"]


def test_middleware_joins_chunks_and_keeps_later_messages():
    messages = [
        {"type": "http.request", "body": b'{"text": "a", "orb', "more_body": True},
        {"type": "http.request", "body": b'it_version": 4}', "more_body": False},
        {"type": "http.disconnect"},
    ]
    seen = []

    async def receive():
        return messages.pop(0)

    async def app(scope, receive, send):
        seen.extend([await receive(), await receive()])

    asyncio.run(VersionInBody(app)(POST, receive, None))
    assert json.loads(seen[0]["body"])["sampling_params"] == {"custom_params": {"orbit_version": 4}}
    assert seen[1] == {"type": "http.disconnect"}
