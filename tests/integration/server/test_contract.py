"""Llama with tied embeddings: split rotations, no overlap schedule, small prefill chunks, limits and a key."""

import http.client
import json
import select
from urllib.parse import urlsplit

import jsonschema
import pytest
import requests
import torch
from typer.testing import CliRunner

from orbit_cli import doctor
from orbit_cli.doctor import State
from orbit_cli.main import app
from orbit_cli.server_checks import server_checks
from orbit_cli.slots import KEY_VARIABLE
from orbit_kernels.adapters import OFTMethod
from orbit_kernels.checkpoint.manifest import BaseManifest
from orbit_kernels.contract.peft_folder import write_peft_folder
from tests.support.adapters import random_adapter
from tests.support.configurations import KEY
from tests.support.quantized import difference_from_files
from tests.support.references import peft_logprobs
from tests.support.server import PROMPT, Running, all_logprobs, output_logprobs, prompt_logprobs, spans, wait_for

pytestmark = pytest.mark.server("llama")

# ../shared/docs/interfaces.md, with the statuses of a malformed request, of a missing key, of a scheduler that is late, and of
# what fails below any route.
CONTRACT = {
    ("get", "/orbit/status"): {200, 401, 500, 503},
    ("get", "/orbit/base"): {200, 401, 500, 503},
    ("post", "/orbit/stage"): {200, 400, 401, 408, 409, 413, 422, 500, 503},
    ("post", "/orbit/activate"): {200, 400, 401, 409, 500, 503},
    ("post", "/orbit/rollback"): {200, 400, 401, 409, 500, 503},
    ("post", "/orbit/discard"): {200, 401, 409, 500, 503},
    ("get", "/orbit/adapter"): {200, 400, 401, 500, 503},
}


def split_adapter(seed: int, **kwargs):
    return random_adapter(seed, method=OFTMethod(block_size=16), tied=False, **kwargs)


def test_split_rotations_equal_peft_per_token(server, checkpoints, tmp_path):
    base = server.generate(tokens=24)
    adapter = split_adapter(1)
    server.install(adapter)
    answer = server.generate(tokens=24)
    served = all_logprobs(answer)
    expected = peft_logprobs(checkpoints.plain("llama"), adapter, PROMPT + answer["output_ids"])
    assert (served[:23] - torch.tensor(prompt_logprobs(base))).abs().max() > 0.1
    assert (served - expected).abs().max() <= 1e-4  # measured 8e-6


def test_one_part_of_a_fused_projection_may_carry_a_rotation(server, checkpoints, tmp_path):
    """q_proj alone; k_proj and v_proj are the base. docs/field-cases.md: what the version before left."""
    adapter = split_adapter(2, targets=("q_proj", "down_proj"))
    server.install(adapter)
    answer = server.generate(tokens=24)
    served = all_logprobs(answer)
    expected = peft_logprobs(checkpoints.plain("llama"), adapter, PROMPT + answer["output_ids"])
    assert (served - expected).abs().max() <= 1e-4


def test_base_and_two_versions_in_one_batch(server):
    server.install(split_adapter(1))
    server.install(split_adapter(2))
    versions = server.status()["versions"]
    alone = [server.generate(tokens=24, orbit_version=version) for version in versions]
    for version, one, mixed in zip(
        versions, alone, server.generate_on(versions, tokens=24, logprob_start_len=-1), strict=True
    ):
        assert spans(mixed) == [[version, 0, 24]] and mixed["output_ids"] == one["output_ids"]
        assert (torch.tensor(output_logprobs(mixed)) - torch.tensor(output_logprobs(one))).abs().max() <= 1e-4


def test_a_switch_in_the_middle_of_a_chunked_prefill_pollutes_no_cache(server):
    old = server.install(split_adapter(1))
    new = server.new_version()
    assert server.stage(new, split_adapter(2)).status_code == 200
    prompts = [[(step * index) % 50 + 3 for index in range(900)] for step in (7, 11, 13)]
    quick = {"prompt": prompts, "tokens": 8, "logprob_start_len": -1}
    running = Running(lambda: server.generate(**quick))
    wait_for(lambda: sum(server.status()["requests"].values()) == 3)
    assert server.activate(new, "switch").status_code == 200
    for answer in running.join():
        assert sum(count for _, _, count in spans(answer)) == 8
        assert {version for version, _, _ in spans(answer)} <= {old, new}
    served = server.generate(**quick)
    assert server.post("/flush_cache").status_code == 200
    for answer, cold in zip(served, server.generate(**quick), strict=True):
        assert spans(answer) == [[new, 0, 8]] and answer["output_ids"] == cold["output_ids"]


def test_state_changing_routes_need_the_key(server):
    """docs/field-cases.md: routes and keys."""
    payload = split_adapter(1).encode()
    calls = [
        ("POST", "/orbit/stage?version=10000", payload),
        ("POST", "/orbit/activate", b'{"version": 0}'),
        ("POST", "/orbit/rollback", b"{}"),
        ("POST", "/orbit/discard", b""),
        ("GET", "/orbit/adapter?version=1", b""),
    ]
    before = server.status()
    for method, path, body in calls:
        assert requests.request(method, server.url + path, data=body, timeout=60).status_code == 401, path
        wrong = {"Authorization": f"Bearer {KEY}x"}
        assert requests.request(method, server.url + path, data=body, headers=wrong, timeout=60).status_code == 401
    after = server.status()
    assert (after["slots"], after["highest_seen"]) == (before["slots"], before["highest_seen"])


def test_the_base_is_that_of_the_files_with_a_tied_head_once(server, checkpoints):
    served = BaseManifest.from_json(requests.get(server.url + "/orbit/base", timeout=60).text)
    assert difference_from_files(checkpoints.plain("llama"), served) is None
    assert "lm_head.weight" not in served.tensors and len(served.formats) == 3 * 7


def test_a_payload_beyond_the_limit_is_refused(server):
    response = server.stage(server.new_version(), bytes(2_000_001))
    assert response.status_code == 413 and "--orbit-max-adapter-bytes" in response.json()["error"]["message"]


def test_a_stalled_payload_blocks_nobody_and_is_given_up(server):
    """docs/field-cases.md: staging that stalls."""
    version = server.new_version()
    stalled = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)
    stalled.putrequest("POST", f"/orbit/stage?version={version}")
    stalled.putheader("Authorization", f"Bearer {KEY}")
    stalled.putheader("Content-Length", "100000")
    stalled.endheaders(b"begin")
    server.install(split_adapter(1))
    answered, _, _ = select.select([stalled.sock], [], [], 0)
    assert not answered, "the other version waited until the stalled one was given up"
    response = stalled.getresponse()
    assert response.status == 408 and b"body_timeout" in response.read()


def test_a_body_that_breaks_off_changes_nothing(server):
    before = server.status()
    broken = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)
    broken.putrequest("POST", f"/orbit/stage?version={server.new_version()}")
    broken.putheader("Authorization", f"Bearer {KEY}")
    broken.putheader("Content-Length", "100000")
    broken.endheaders(split_adapter(1).encode()[:50000])
    broken.close()
    after = server.status()
    assert (after["slots"], after["staging"]) == (before["slots"], None)
    server.install(split_adapter(1))


def test_metrics_are_exported(server):
    version = server.install(split_adapter(1))
    server.stage(version, split_adapter(1))
    server.stage(version + 1, b"")
    server.stage(version + 1, bytes(2_000_001))
    server.rollback(0)

    def exported() -> dict[str, float]:
        lines = server.get("/metrics").text.splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if "orbit_" in line[:6])}

    with server.in_flight(tokens=400):
        wait_for(lambda: exported().get('orbit_requests_in_flight{version="0"}') == 1)
    metrics = exported()
    assert metrics["orbit_active_version"] == 0
    assert metrics["orbit_stage_seconds_count"] >= 1
    assert metrics["orbit_activate_pause_seconds_count"] >= 2
    assert metrics["orbit_rollback_total"] >= 1
    reasons = {"version_not_new", "adapter_refused", "adapter_too_large"}
    assert all(metrics[f'orbit_stage_rejected_total{{reason="{reason}"}}'] >= 1 for reason in reasons)


@pytest.fixture
def description(server) -> dict:
    return server.get("/openapi.json").json()


def test_openapi_describes_every_route_of_the_contract(description):
    operations = {
        (method, path): operation
        for path, methods in description["paths"].items()
        for method, operation in methods.items()
        if path.startswith("/orbit/")
    }
    assert {route: set(map(int, operation["responses"])) for route, operation in operations.items()} == CONTRACT
    assert all(operation["summary"] and operation["description"] for operation in operations.values())
    for route in (("post", "/orbit/stage"), ("get", "/orbit/adapter")):
        (parameter,) = operations[route]["parameters"]
        assert (parameter["name"], parameter["in"], parameter["required"]) == ("version", "query", True)
        assert parameter["schema"]["type"] == "integer"
    assert operations["post", "/orbit/stage"]["requestBody"]["content"].keys() == {"application/octet-stream"}
    assert operations["get", "/orbit/adapter"]["responses"]["200"]["content"].keys() == {"application/octet-stream"}


@pytest.mark.parametrize(
    "path, body, valid",
    [
        ("/orbit/activate", {"version": 1}, True),
        ("/orbit/activate", {"version": 1, "inflight": "switch"}, True),
        ("/orbit/activate", {}, False),
        ("/orbit/activate", {"version": -1}, False),
        ("/orbit/activate", {"version": 1, "inflight": "abort"}, False),
        ("/orbit/activate", {"version": 1, "mode": "finish"}, False),
        ("/orbit/rollback", {}, True),
        ("/orbit/rollback", {"version": 0, "inflight": "switch"}, True),
        ("/orbit/rollback", {"version": None}, False),
    ],
)
def test_a_body_is_valid_by_openapi_exactly_where_the_server_takes_it(server, description, path, body, valid):
    content = description["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    assert jsonschema.Draft202012Validator(content["schema"]).is_valid(body) == valid
    assert (server.post(path, body).status_code != 400) == valid


def test_answers_are_as_openapi_describes_them(server, description):
    def hold(response: requests.Response, status: int) -> None:
        assert response.status_code == status, response.text
        method, path = response.request.method.lower(), urlsplit(response.url).path
        content = description["paths"][path][method]["responses"][str(status)]["content"]
        (media_type,) = content
        assert response.headers["content-type"] == media_type
        if media_type == "application/json":
            schema = {**content[media_type]["schema"], "components": description["components"]}
            jsonschema.validate(response.json(), schema, jsonschema.Draft202012Validator)
            described = description["components"]["schemas"][schema["$ref"].rsplit("/", 1)[-1]]
            assert response.json().keys() == described["properties"].keys()

    version = server.new_version()
    hold(server.get("/orbit/base"), 200)
    hold(server.stage(version, split_adapter(1)), 200)
    hold(server.get("/orbit/status"), 200)
    hold(server.activate(version), 200)
    hold(server.get("/orbit/adapter", version=version), 200)
    hold(server.post("/orbit/rollback", {}), 200)
    hold(server.post("/orbit/discard"), 200)
    hold(server.get("/orbit/status"), 200)
    hold(server.stage(version, split_adapter(1)), 409)
    hold(server.stage(version + 1, b""), 422)
    hold(server.stage(version + 1, bytes(2_000_001)), 413)
    hold(server.stage(-1, b""), 400)
    hold(server.activate(version), 409)
    hold(server.activate(-1), 400)
    hold(server.post("/orbit/rollback", {"version": version}), 409)
    hold(server.get("/orbit/adapter", version=version), 400)
    for method, path in CONTRACT:
        if path not in ("/orbit/status", "/orbit/base"):
            hold(requests.request(method, server.url + path, timeout=60), 401)


def found_by_doctor(server, key: str | None) -> dict[str, doctor.Check]:
    return {check.subject: check for check in server_checks(server.url, key)}


def test_doctor_says_what_the_server_holds(server):
    version = server.install(split_adapter(1))
    assert server.stage(version + 1, split_adapter(2)).status_code == 200
    with server.in_flight(tokens=400):
        found = found_by_doctor(server, KEY)
    assert {check.state for check in found.values()} == {State.OK}
    digests = {slot["version"]: slot["digest"][:12] for slot in server.status()["slots"]}
    assert found["server, slots"].detail == "type oft, block_size 16, fused split"
    for subject, held in (("active", version), ("staged", version + 1)):
        detail = found[f"server, {subject} version"].detail
        assert detail.startswith(f"{held} (") and digests[held] in detail
    assert found["server, requests in flight"].detail == f"1 on version {version}"
    assert found["server, last activation"].detail.endswith(" ms")
    base = BaseManifest.from_json(server.get("/orbit/base").text)
    assert found["server, base"].detail == f"{len(base.tensors)} tensors, digest {base.digest}"


@pytest.mark.parametrize(
    "key, exit_code, line", [(KEY, 0, "accepted"), (f"{KEY}x", 1, "refused"), (None, 0, "need one")]
)
def test_doctor_tries_the_key_and_never_prints_it(server, monkeypatch, key, exit_code, line):
    monkeypatch.setattr(doctor, "run_checks", list)
    before = server.status()["slots"]
    ran = CliRunner().invoke(app, ["doctor", "--server", server.url, *(["--api-key", key] if key else [])])
    assert ran.exit_code == exit_code, ran.output
    assert line in found_by_doctor(server, key)["server, key"].detail
    assert KEY not in ran.output and server.status()["slots"] == before


def test_the_command_moves_an_adapter_through_the_slots_and_never_prints_the_key(server, tmp_path, monkeypatch):
    adapter, version = split_adapter(3), server.new_version()
    write_peft_folder(adapter, tmp_path / "adapter", base_model="of peft's")

    def orbit(*arguments: str) -> dict:
        ran = CliRunner().invoke(app, [*arguments, "--server", server.url])
        assert ran.exit_code == 0, ran.output
        assert KEY not in ran.output
        return json.loads(ran.stdout)

    refused = CliRunner().invoke(app, ["stage", str(tmp_path / "adapter"), "--server", server.url])
    assert refused.exit_code == 1 and refused.stderr.startswith("error: HTTP 401")
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    staged = orbit("stage", str(tmp_path / "adapter"))
    assert (staged["version"], staged["digest"]) == (version, adapter.digest())
    assert orbit("activate", str(version))["active_version"] == version == orbit("status")["active_version"]
    assert orbit("rollback", "0", "--inflight", "switch")["active_version"] == 0
    assert version in orbit("discard")["discarded"]
    again = CliRunner().invoke(app, ["activate", str(version), "--server", server.url])
    assert again.exit_code == 1 and "version_not_staged" in again.stderr and KEY not in again.output
    nothing = CliRunner().invoke(app, ["stage", str(tmp_path), "--server", server.url])
    assert nothing.exit_code == 1 and "no adapter_config.json" in nothing.stderr
