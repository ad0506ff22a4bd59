"""What a body passes through in the server before anything is changed: taken, or refused in the form of the contract."""

import json
from collections.abc import Coroutine
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from orbit_kernels.adapters import AdapterMethod, LoRAMethod, OFTMethod
from orbit_kernels.adapters.config import AdapterConfig, tensor_name
from orbit_kernels.contract.errors import ErrorCode, error_body
from orbit_kernels.contract.keys import INFLIGHT_MODES, REQUESTED_VERSION_KEY
from orbit_kernels.contract.payload import Adapter, AdapterError
from orbit_kernels.contract.versions import MAX_VERSION
from orbit_sglang.control import messages
from orbit_sglang.http.request_body import VersionInBody
from orbit_sglang.http.routes import Routes
from orbit_sglang.http.stock_routes import CHOOSING_PATHS, NATIVE_PATH
from tests.support.fuzz_bodies import (
    JSON_TEXTS,
    assembled,
    config_header,
    fuzzed,
    json_bodies,
    parts,
    payloads,
    with_text,
)

LINEARS = {
    f"model.layers.{layer}.{part}": (32, 32)
    for layer in range(2)
    for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")
}
GENERATION = {
    "text": "a",
    REQUESTED_VERSION_KEY: 1,
    "sampling_params": {"custom_params": {"k": 1}},
    "custom_params": {},
}
CONTROL = {"version": 1, "inflight": "switch"}


def payload(method: AdapterMethod) -> bytes:
    """A valid payload; q_proj and k_proj share what acts on the input."""
    config = AdapterConfig(method=method, target_modules=("q_proj", "k_proj", "down_proj"))
    tensors = {
        tensor_name(module, leaf): torch.full(shape, 0.01)
        for module, size in LINEARS.items()
        for leaf, shape in method.shapes(*size).items()
        if config.tied_names(tensor_name(module, leaf))[0] == tensor_name(module, leaf)
    }
    return Adapter(tensors, config, tied=True).encode()


def result_of(call: Coroutine) -> Any:
    """What a coroutine returns that never has to wait."""
    with pytest.raises(StopIteration) as done:
        call.send(None)
    return done.value.value


def assert_refusal(text: str | bytes) -> None:
    assert json.loads(text)["error"].keys() == {"code", "message", "detail"}
    assert "Traceback" not in str(text)


GOOD = {"oft": payload(OFTMethod(block_size=16)), "lora": payload(LoRAMethod(rank=4))}


@fuzzed(2000)
@given(payloads(GOOD["oft"]) | payloads(GOOD["lora"]))
def test_a_payload_is_an_adapter_that_fits_or_is_refused_with_its_problems(body):
    try:
        adapter = Adapter.decode(body)
        adapter.check(LINEARS)
    except AdapterError as refused:
        assert refused.problems
        assert_refusal(
            JSONResponse(error_body(ErrorCode.ADAPTER_REFUSED, "the adapter was refused", refused.problems)).body
        )
    else:
        assert Adapter.decode(adapter.encode()).digest() == adapter.digest()


@pytest.mark.parametrize(
    "method, key, text",
    [("oft", "peft_type", "[]"), ("lora", "lora_alpha", "1" * 400), ("oft", "layers_to_transform", "[" * 50_000)],
)
def test_a_configuration_that_no_fuzzer_may_miss_is_refused(method, key, text):
    header, tensors = parts(GOOD[method])
    config = json.loads(header["__metadata__"]["adapter_config"])
    with pytest.raises(AdapterError):
        Adapter.decode(assembled(config_header(header, with_text(config, key, text)), tensors))


@pytest.mark.parametrize(
    "entry",
    [
        {"__metadata__": None},
        {"empty": {"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]}},
        {"empty": {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}},
    ],
)
def test_a_header_that_no_fuzzer_may_miss_is_refused(entry):
    header, tensors = parts(GOOD["oft"])
    with pytest.raises(AdapterError):
        Adapter.decode(assembled(json.dumps({**header, **entry}), tensors)).check(LINEARS)


@fuzzed(1000)
@given(json_bodies(GENERATION), st.sampled_from([*CHOOSING_PATHS, "/v1/responses", "/v1/score", "/invocations"]))
def test_a_generation_body_passes_or_has_its_version_moved_or_is_refused(body, path):
    refusal, passed = [], []

    async def app(scope, receive, send) -> None:
        passed.append((await receive())["body"])

    async def receive() -> dict:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict) -> None:
        refusal.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "query_string": b""}
    result_of(VersionInBody(app)(scope, receive, send))
    if refusal:
        assert refusal[0]["status"] == 400 and not passed
        assert_refusal(refusal[1]["body"])
    elif passed != [body]:
        asked, found = json.loads(body), json.loads(passed[0])
        assert REQUESTED_VERSION_KEY not in found
        holders = found["sampling_params"] if path == NATIVE_PATH else found
        for holder in holders if isinstance(holders, list) else [holders]:
            version = holder["custom_params"][REQUESTED_VERSION_KEY]
            assert json.dumps(version) == json.dumps(asked[REQUESTED_VERSION_KEY])


class Outbox:
    """In the frontend's place: keeps what would go to the scheduler."""

    def __init__(self):
        self.sent: list[messages.ControlRequest] = []

    async def call(self, message: messages.ControlRequest) -> dict:
        self.sent.append(message)
        return {}

    async def stage(self, version: int, chunks) -> dict:
        return await self.call(messages.StageRequest(version=version, path=""))


def request(body: bytes, query: bytes = b"") -> Request:
    async def receive() -> dict:
        return {"type": "http.request", "body": body, "more_body": False}

    return Request({"type": "http", "method": "POST", "path": "/", "query_string": query, "headers": []}, receive)


def assert_sent_or_refused(outbox: Outbox, response: Response) -> None:
    if response.status_code == 400:
        assert_refusal(response.body)
        assert not outbox.sent
        return
    (message,) = outbox.sent
    assert response.status_code == 200
    if message.version is not None or not isinstance(message, messages.RollbackRequest):
        assert type(message.version) is int and 0 <= message.version <= MAX_VERSION
    if not isinstance(message, messages.StageRequest):
        assert message.inflight in INFLIGHT_MODES


@fuzzed(1000)
@given(st.sampled_from(["activate", "rollback"]), json_bodies(CONTROL))
def test_a_control_body_is_sent_on_or_refused(route, body):
    outbox = Outbox()
    assert_sent_or_refused(outbox, result_of(getattr(Routes(outbox), route)(request(body))))


@fuzzed(500)
@given(JSON_TEXTS | st.text(max_size=8) | st.integers(0, 10**20).map(str))
def test_a_version_in_the_query_is_sent_on_or_refused(text):
    outbox = Outbox()
    query = b"version=" + text.encode(errors="surrogatepass")
    assert_sent_or_refused(outbox, result_of(Routes(outbox).stage(request(b"", query))))
