"""What trainer and server say to each other, against the server's routes and flags and the keys of a run."""

import argparse
import asyncio
import json
import pickle
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import get_args

import pytest
from fastapi import FastAPI
from sglang.srt.utils.auth import AuthLevel

from orbit_kernels.adapters import METHODS
from orbit_kernels.contract import client, routes
from orbit_kernels.contract.answers import Activated, EmptySlot, FilledSlot, StagedAdapter, Status
from orbit_kernels.contract.client import AsyncSlotClient, CallError, SlotClient
from orbit_kernels.contract.errors import ErrorCode, Refusal
from orbit_kernels.contract.options import AdapterOptions, AdapterType, BaseOptions
from orbit_kernels.contract.versions import BASE_VERSION, steps_of, version_of
from orbit_sglang.http.routes import Routes
from orbit_sglang.scheduler.versions import SlotVersions
from orbit_sglang.startup.flags import FLAGS
from orbit_sglang.startup.options import FrozenBaseConfig, ServerOptions, SlotsConfig, command_line
from orbit_verl.config.keys import AdapterSettings, BaseSettings, Keys
from orbit_verl.driver.run_config import SGLANG, _passed_on

SHARED = [
    (declared, field, rule, keys, server)
    for declared, keys, server in (
        (AdapterOptions, AdapterSettings, SlotsConfig),
        (BaseOptions, BaseSettings, FrozenBaseConfig),
    )
    for field, rule in declared.declared()
]


def test_the_contract_is_importable_without_torch_verl_and_sglang():
    modules = "answers, client, errors, keys, options, routes, versions"
    code = f"from orbit_kernels.contract import {modules}\nimport sys; print({{'torch', 'verl', 'sglang'}} & {{*sys.modules}})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout == "set()\n", ran.stderr


def test_versions_and_steps_are_each_others_inverse():
    assert [version_of(steps) for steps in (0, 1, 7)] == [1, 2, 8]
    assert [steps_of(version_of(steps)) for steps in range(5)] == list(range(5))
    assert steps_of(BASE_VERSION) < 0


@pytest.mark.parametrize("code", ErrorCode)
def test_every_code_has_one_status_and_survives_the_way_between_processes(code):
    assert 400 <= code.status < 600 and ErrorCode(code.value) is code
    refusal = pickle.loads(pickle.dumps(Refusal(code, "why", [1])))
    assert refusal.code is code and str(refusal) == "why"
    assert json.dumps(refusal.body) == json.dumps({"error": {"code": str(code), "message": "why", "detail": [1]}})


def test_every_code_is_declared_by_a_route_or_belongs_to_generation():
    assert {code for route in routes.ROUTES for code in route.codes} | set(routes.STOCK_REFUSALS) == set(ErrorCode)


@pytest.fixture(scope="module")
def app() -> FastAPI:
    """SGLang's application in place of which only the slots' routes are added; nothing is asked of the frontend."""
    app = FastAPI()
    Routes(None).add_to(app)
    return app


def test_the_server_has_exactly_the_declared_routes(app):
    served = {
        (method, route.path): getattr(route.endpoint, "_auth_level", AuthLevel.NORMAL)
        for route in app.routes
        if route.path.startswith("/orbit/")
        for method in route.methods
    }
    assert served == {
        (route.method, route.path): AuthLevel.ADMIN_OPTIONAL if route.needs_key else AuthLevel.NORMAL
        for route in routes.ROUTES
    }


def test_openapi_says_of_each_route_what_is_declared(app):
    paths = app.openapi()["paths"]
    for route in routes.ROUTES:
        operation = paths[route.path][route.method.lower()]
        assert operation["summary"] == route.summary
        described = {
            code: int(status)
            for status, response in operation["responses"].items()
            if status not in ("200", "401")
            for code in response["description"].split(", ")
        }
        assert described == {code.value: code.status for code in route.codes}
        (media_type,) = operation["responses"]["200"]["content"]
        assert media_type == (routes.PAYLOAD if route.answer is None else "application/json")


@pytest.mark.parametrize("side", [AsyncSlotClient, SlotClient])
def test_the_client_has_exactly_the_declared_routes(side):
    public = {name for name in vars(side) if not name.startswith("_")}
    assert public == {route.name for route in routes.ROUTES}


def test_what_the_slots_say_of_themselves_is_read_as_it_was_said():
    versions = SlotVersions()
    versions.begin_stage(3, {})
    versions.finish_stage(StagedAdapter(version=3, adapter_type="lora", digest="d", num_bytes=8, modules={"q_proj": 1}))
    status = Status(
        active_version=0,
        versions=versions.versions,
        highest_seen=3,
        slots=versions.describe(),
        staging=None,
        adapter={"type": "lora", "rank": 4, "fused": "tied"},
        requests={0: 2, 3: 1},
        counters={"staged": 1},
        last_activate_pause_ms=None,
        busy_s=0.5,
    )
    body = status.model_dump(mode="json")
    assert body["slots"] == [
        {
            "slot": 1,
            "state": "staged",
            "version": 3,
            "adapter_type": "lora",
            "digest": "d",
            "num_bytes": 8,
            "modules": {"q_proj": 1},
        },
        {"slot": 2, "state": "empty", "version": None},
    ]
    assert body["requests"] == {"0": 2, "3": 1}
    read = Status.model_validate_json(json.dumps(body))
    assert read == status and [type(slot) for slot in read.slots] == [FilledSlot, EmptySlot]
    assert read.holder_of(3).slot == 1 and read.holder_of(2) is None


def test_the_adapter_types_are_the_methods():
    assert get_args(AdapterType) == tuple(METHODS)


@pytest.mark.parametrize("declared, field, rule, keys, server", SHARED, ids=[field.name for _, field, *_ in SHARED])
def test_a_shared_option_is_one_key_one_flag_and_one_setting_that_is_passed_on(declared, field, rule, keys, server):
    (flag,) = (flag for flag in FLAGS if flag.field == rule.flag)
    assert (flag.default, flag.help) == (field.default, rule.help) and rule.help
    for side in (keys, server):
        (found,) = (found for other, found in side.declared() if other.name == field.name)
        assert found is rule and getattr(side(), field.name) == field.default
    (passed,) = (implied for implied in _passed_on(keys()) if implied.key == f"{SGLANG}.{rule.flag}")
    assert (passed.value, passed.reason) == (field.default, f"{keys.group}.{field.name}")


@pytest.mark.parametrize("declared, field, rule, keys, server", SHARED, ids=[field.name for _, field, *_ in SHARED])
def test_a_wrong_value_is_refused_by_the_name_that_its_user_wrote(declared, field, rule, keys, server):
    wrong = "wrong" if isinstance(field.default, str) else 0
    with pytest.raises(ValueError, match=rf"^{keys.group}\.{field.name}={wrong!r}: must be "):
        keys(**{field.name: wrong})
    with pytest.raises(ValueError, match=rf"^{command_line(rule.flag)} {wrong!r}: must be "):
        server(**{field.name: wrong})


@pytest.mark.parametrize("side", [AdapterSettings, SlotsConfig])
def test_one_adapter_of_all_experts_needs_tied_rotations(side: type[Keys] | type[ServerOptions]):
    side(experts="common")
    for wrong in ({"type": "lora"}, {"fused": "split"}):
        with pytest.raises(ValueError, match="one rotation of the experts' input needs"):
            side(experts="common", **wrong)


@pytest.mark.parametrize("value", ["3", 1.5, True, None])
def test_a_whole_number_is_one(value):
    with pytest.raises(ValueError, match=r"^orbit\.adapter\.rank=.*: must be a whole number, e\.g\. 16$"):
        AdapterSettings(rank=value)


def test_flags_reach_the_options_that_declare_them():
    parser = argparse.ArgumentParser()
    for flag in FLAGS:
        flag.add_to(parser)
    defaults = parser.parse_args([])
    assert SlotsConfig.from_server_args(defaults) == SlotsConfig()
    assert FrozenBaseConfig.from_server_args(defaults) == FrozenBaseConfig()
    given = parser.parse_args(["--orbit-adapter", "lora", "--orbit-rank", "4", "--orbit-dequant-chunk-mb", "8"])
    assert SlotsConfig.from_server_args(given) == SlotsConfig(type="lora", rank=4)
    assert FrozenBaseConfig.from_server_args(given) == FrozenBaseConfig(dequant_chunk_mb=8)
    assert parser.format_help()


class Answering(BaseHTTPRequestHandler):
    """Answers every request with what the server's ``answer`` holds, and notes what came."""

    def do_GET(self) -> None:
        self.server.seen.append((self.command, self.path, self.headers.get("Authorization")))
        status, body = self.server.answer
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def answering():
    """A server of HTTP that says whatever a test makes it say, as a gateway or another program in its place would."""
    server = HTTPServer(("127.0.0.1", 0), Answering)
    server.seen, server.answer = [], (200, b"")
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def failure(call) -> CallError:
    with pytest.raises(CallError) as caught:
        call()
    return caught.value


def test_a_refusal_is_read_with_code_status_message_and_detail(answering):
    refusal = Refusal(ErrorCode.VERSION_NOT_STAGED, "version 4 is not staged", {"versions": [0]})
    answering.answer = refusal.code.status, json.dumps(refusal.body).encode()
    error = failure(lambda: SlotClient(answering.url).activate(4))
    assert (error.status, error.code) == (409, ErrorCode.VERSION_NOT_STAGED)
    assert (error.message, error.detail) == (refusal.message, refusal.detail)
    assert str(error) == "HTTP 409 version_not_staged: version 4 is not staged {'versions': [0]}"


@pytest.mark.parametrize(
    "answer",
    [(500, b"gateway broke"), (401, b'{"error":"Unauthorized"}'), (200, b"[]"), (400, b'{"error": {"code": 1}}')],
)
def test_any_other_answer_is_an_error_with_its_status_and_text(answering, answer):
    answering.answer = answer
    error = failure(SlotClient(answering.url).status)
    assert (error.status, error.code) == (answer[0], None) and answer[1].decode() in str(error)


def test_a_key_goes_with_every_call(answering):
    answering.answer = 200, Activated(active_version=1, pause_ms=0.1, busy_s=0, requests={}).model_dump_json().encode()
    server = SlotClient(answering.url, "k")
    assert server.activate(1).active_version == server.rollback().active_version == 1
    assert [(method, path) for method, path, _ in answering.seen] == [
        ("POST", "/orbit/activate"),
        ("POST", "/orbit/rollback"),
    ]
    assert {key for *_, key in answering.seen} == {"Bearer k"}


def test_no_answer_is_an_error_without_a_status_and_never_says_the_key():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        error = failure(SlotClient(url, "secret", timeout_s=0.3).status)
    assert error.status is None and str(error) == "no answer: nothing within 0.3 s"
    assert failure(SlotClient(url, "secret").status).message == "ConnectError: Connection refused"
    assert failure(SlotClient("nowhere", "secret").status).message == "UnsupportedProtocol"
    for key in ("", " secret", "secret\n", "sécret"):
        with pytest.raises(ValueError, match="the key ") as refused:
            SlotClient(url, key)
        assert "cret" not in str(refused.value)


def test_a_limit_of_one_call_overrides_the_clients():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = AsyncSlotClient(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=client.TIMEOUT_S)
        assert "0.2 s" in failure(lambda: asyncio.run(server.status(timeout_s=0.2))).message
