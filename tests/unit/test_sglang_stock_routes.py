"""Orbit's decision about every route and every message of the installed SGLang, taken from SGLang itself."""

import asyncio
import inspect
from pathlib import Path

import httpx
import pytest
import zmq
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from sglang.srt.managers import io_struct
from sglang.srt.managers.scheduler import Scheduler

from orbit_kernels.contract import routes
from orbit_kernels.contract.errors import ErrorCode, Refusal
from orbit_sglang.control import gate as message_gate
from orbit_sglang.control.messages import StatusRequest
from orbit_sglang.http import stock_routes
from orbit_sglang.http.gate import Gate

PAGE = Path(__file__).resolve().parents[2] / "docs" / "stock-routes.md"
# SGLang adds them for an option or an environment variable.
CONDITIONAL = {"GET /metrics", "HEAD /metrics", "POST /dumper/{method}"}


@pytest.fixture(scope="module")
def stock() -> set[str]:
    from sglang.srt.entrypoints.http_server import app

    ours = {route.path for route in routes.ROUTES}
    contexts = [context for context in iter_route_contexts(app.routes) if context.path not in ours]
    return {f"{method} {context.path}" for context in contexts for method in context.methods}


def test_every_stock_route_is_decided_and_every_decision_is_about_one(stock):
    assert len(stock) > 90
    assert not stock_routes.SERVED & stock_routes.REFUSED.keys()
    assert (stock_routes.SERVED | stock_routes.REFUSED.keys()) - CONDITIONAL == stock


@pytest.mark.parametrize("word", ["update_weight", "lora", "weights_checker", "hicache", "memory_occupation"])
def test_every_stock_route_named_like_this_is_refused(stock, word):
    named = {route for route in stock if word in route}
    assert named and all(stock_routes.reason_to_refuse(*route.split()) for route in named)


def test_the_page_lists_the_decisions(stock):
    lines = [
        f"| `{route}` | {'served' if reason is None else f'refused: {reason}'} |"
        for route in sorted(stock | CONDITIONAL, key=lambda route: route.split()[::-1])
        for reason in [stock_routes.REFUSED.get(route)]
    ]
    assert [line for line in PAGE.read_text().splitlines() if line.startswith("| `")] == lines


def asked(method: str, path: str, root_path: str = "") -> httpx.Response:
    """What the gate lets an application answer that has a route for anything."""
    app = FastAPI(root_path=root_path)
    app.add_api_route("/{path:path}", lambda: "served", methods=["GET", "POST", "PUT", "DELETE", "PATCH"])
    app.add_middleware(Gate)

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.request(method, path)

    return asyncio.run(ask())


@pytest.mark.parametrize(
    "method, path",
    [
        ("POST", "/update_weights_from_something_new"),
        ("POST", "/update_weights_from_tensor"),
        ("POST", "/update_weights_from_tensor/"),
        ("POST", "//update_weights_from_tensor"),
        ("POST", "/update_weights%5Ffrom_tensor"),
        ("PATCH", "/generate"),
        ("GET", "/v1/responses/a/b"),
        ("POST", "/v1/models/update"),
        ("POST", "/orbit/new"),
    ],
)
def test_what_is_not_listed_is_refused(method, path):
    answer = asked(method, path)
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "route_refused"
    assert "--enable-orbit-slots" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "method, path",
    [("POST", "/generate"), ("PUT", "/generate"), ("GET", "/v1/models/a/b"), ("POST", "/v1/responses/r1/cancel")],
)
def test_what_is_listed_is_served(method, path):
    assert asked(method, path).text == '"served"'


def test_a_root_path_is_no_way_around():
    assert asked("POST", "/proxy/update_weights_from_tensor", "/proxy").status_code == 403
    assert asked("POST", "/proxy/generate", "/proxy").status_code == 200


def test_messages_that_change_weights_or_are_not_listed_are_refused():
    scheduler = object.__new__(Scheduler)
    inspect.unwrap(Scheduler.init_request_dispatcher)(scheduler)
    refused = {
        name.__name__ for name in scheduler._request_dispatcher._mapping if not issubclass(name, message_gate.SERVED)
    }
    assert refused == {
        "AddExternalCorpusReqInput",
        "AttachHiCacheStorageReqInput",
        "CheckWeightsReqInput",
        "ClearHiCacheReqInput",
        "DestroyWeightsUpdateGroupReqInput",
        "DetachHiCacheStorageReqInput",
        "DumperControlReqInput",
        "InitWeightsSendGroupForRemoteInstanceReqInput",
        "InitWeightsUpdateGroupReqInput",
        "ListExternalCorporaReqInput",
        "LoadLoRAAdapterFromTensorsReqInput",
        "LoadLoRAAdapterReqInput",
        "ReleaseMemoryOccupationReqInput",
        "RemoveExternalCorpusReqInput",
        "ResumeMemoryOccupationReqInput",
        "RpcReqInput",
        "SendWeightsToRemoteInstanceReqInput",
        "UnloadLoRAAdapterReqInput",
        "UpdateWeightFromDiskReqInput",
        "UpdateWeightsFromDistributedReqInput",
        "UpdateWeightsFromIPCReqInput",
        "UpdateWeightsFromTensorReqInput",
    }
    assert message_gate.reason_to_refuse(object())


def test_a_guarded_socket_sends_what_is_served_and_nothing_else():
    with zmq.Context() as context, context.socket(zmq.PAIR) as sender, context.socket(zmq.PAIR) as receiver:
        receiver.bind("inproc://scheduler")
        sender.connect("inproc://scheduler")
        message_gate.guard(sender)
        for refused in (
            io_struct.UpdateWeightsFromTensorReqInput(serialized_named_tensors=["x"]),
            io_struct.UpdateWeightFromDiskReqInput(model_path="x"),
            io_struct.ReleaseMemoryOccupationReqInput(),
            io_struct.ReleaseMemoryOccupationReqInput(tags=["kv_cache", "weights"]),
        ):
            with pytest.raises(Refusal, match=f"{type(refused).__name__} is refused") as caught:
                sender.send_pyobj(refused)
            assert caught.value.code is ErrorCode.ROUTE_REFUSED
        sender.send_pyobj(StatusRequest(ticket=7))
        sender.send_pyobj(io_struct.ReleaseMemoryOccupationReqInput(tags=["kv_cache"]))
        assert receiver.recv_pyobj().ticket == 7
        assert receiver.recv_pyobj().tags == ["kv_cache"]
        assert not receiver.poll(0)
