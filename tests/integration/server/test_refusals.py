"""Payloads and calls that a server refuses, with nothing changed (Qwen3, tied rotations)."""

import dataclasses
import pickle

import psutil
import pytest
import requests
import torch

from orbit_kernels.adapters import OFTMethod
from orbit_kernels.adapters.config import AdapterConfig
from orbit_kernels.contract.payload import Adapter
from tests.support.adapters import random_adapter
from tests.support.server import output_logprobs

pytestmark = pytest.mark.server("qwen3")

GOOD = random_adapter(1)
NAMES = sorted(GOOD.tensors)
K_PROJ = "base_model.model.model.layers.0.self_attn.k_proj.oft_R.weight"


def with_tensors(**changes: torch.Tensor) -> Adapter:
    return dataclasses.replace(GOOD, tensors={**GOOD.tensors, **changes})


class Marker:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


REFUSED = {
    "truncated": (GOOD.encode()[:-100], "not a safetensors file"),
    "empty": (b"", "not a safetensors file"),
    "no configuration": (lambda: _without_configuration(), "adapter_config"),
    "unknown name": (with_tensors(**{"base_model.model.lm_head.oft_R.weight": torch.zeros(2, 496)}), "lm_head"),
    "wrong shape": (with_tensors(**{NAMES[0]: torch.zeros(4, 495)}), NAMES[0]),
    "wrong dtype": (with_tensors(**{NAMES[0]: torch.zeros(4, 496, dtype=torch.int32)}), "int32"),
    "not finite": (with_tensors(**{NAMES[0]: torch.full((4, 496), torch.nan)}), "not finite"),
    "wrong block size": (random_adapter(1, method=OFTMethod(block_size=16)), "--orbit-block-size"),
    "missing": (dataclasses.replace(GOOD, tensors={NAMES[0]: GOOD.tensors[NAMES[0]]}), "missing"),
    "part beside its owner": (with_tensors(**{K_PROJ: torch.zeros(2, 496)}), "fused is 'tied'"),
    "another format": (GOOD.encode().replace(b'"orbit_format":"2"', b'"orbit_format":"9"'), "this release reads '2'"),
    "untied parts": (random_adapter(1, tied=False), "--orbit-fused split"),
    "part of a tied projection": (random_adapter(1, targets=("q_proj", "o_proj")), "k_proj"),
}


def _without_configuration() -> bytes:
    from safetensors.torch import save

    return save({name: tensor.clone() for name, tensor in GOOD.tensors.items()})


def refuse(server, payload, code: int = 422) -> dict:
    """Stage something that must be refused while a version is active, and return the error."""
    active = server.install(random_adapter(7))
    before, answer = server.status(), server.generate()
    response = server.stage(active + 1, payload() if callable(payload) else payload)
    assert response.status_code == code, response.text
    after = server.status()
    assert (after["active_version"], after["slots"], after["highest_seen"]) == (
        active,
        before["slots"],
        before["highest_seen"],
    )
    assert output_logprobs(server.generate()) == output_logprobs(answer)
    return response.json()["error"]


@pytest.mark.parametrize("case", REFUSED)
def test_a_payload_that_does_not_fit_is_refused(server, case):
    payload, reason = REFUSED[case]
    error = refuse(server, payload)
    assert error["code"] == "adapter_refused"
    assert any(reason in problem for problem in error["detail"]), error


def test_a_payload_that_finds_no_room_is_refused(server):
    """A limit on the size of the HTTP process's files has a write fail in the middle, as a full disk does."""
    (http, *_), size = server.processes(), 8 << 20
    before = http.rlimit(psutil.RLIMIT_FSIZE)
    http.rlimit(psutil.RLIMIT_FSIZE, (size // 2, before[1]))
    try:
        error = refuse(server, bytes(size), code=500)
    finally:
        http.rlimit(psutil.RLIMIT_FSIZE, before)
    assert error["code"] == "stage_failed"
    assert "File too large; free space there, or set TMPDIR" in error["message"]


def test_one_unknown_name_among_eight_is_listed(server):
    """docs/field-cases.md: names that fit nothing."""
    tensors = {name: GOOD.tensors[name] for name in NAMES[:7]} | {
        "base_model.model.x.oft_R.weight": torch.zeros(2, 496)
    }
    error = refuse(server, Adapter(tensors, GOOD.config))
    assert any(problem.startswith("base_model.model.x.oft_R.weight: unknown tensor") for problem in error["detail"])


def test_an_adapter_that_matches_nothing_is_refused(server):
    """docs/field-cases.md: names that fit nothing."""
    config = AdapterConfig(target_modules=("wqkv",))
    error = refuse(server, Adapter({"base_model.model.wqkv.oft_R.weight": torch.zeros(2, 496)}, config))
    assert any("match no linear of the model" in problem for problem in error["detail"])


def test_a_pickle_is_refused_and_never_loaded(server, tmp_path):
    """docs/field-cases.md: pickle payload."""
    marker = tmp_path / "marker"
    refuse(server, pickle.dumps(Marker(marker)))
    assert not marker.exists()


@pytest.mark.parametrize("version", ["", "x", "-1", "1.5", "1" * 400, "1" * 5000, str(2**53), str(2**64), "\u0661"])
def test_a_version_that_is_no_number_is_refused(server, version):
    response = server.post("/orbit/stage", params={"version": version}, data=GOOD.encode())
    assert response.status_code == 400 and response.json()["error"]["code"] == "bad_version"


def test_a_version_that_is_not_new_is_refused(server):
    active = server.install(GOOD)
    for version in (0, active - 1, active):
        response = server.stage(version, GOOD)
        assert response.status_code == 409 and response.json()["error"]["code"] == "version_not_new"


@pytest.mark.parametrize(
    "body, status, code",
    [
        ({"version": 10**6}, 409, "version_not_staged"),
        ({"version": "1"}, 400, "bad_version"),
        ({"version": 10**400}, 400, "bad_version"),
        ({}, 400, "bad_version"),
        ({"version": 1, "inflight": "abort"}, 400, "bad_inflight"),
        ({"version": 1, "mode": "finish"}, 400, "bad_body"),
        ([1], 400, "bad_body"),
    ],
)
def test_an_activation_that_cannot_be_done_is_refused(server, body, status, code):
    response = server.post("/orbit/activate", body)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert server.status()["active_version"] == 0


@pytest.mark.parametrize("path", ["/orbit/activate", "/generate"])
def test_a_body_that_is_nested_beyond_reading_is_refused(server, path):
    text = '{"orbit_version": ' + "[" * 100_000
    response = requests.post(server.url + path, data=text, headers={"Content-Type": "application/json"}, timeout=60)
    assert response.status_code == 400 and response.json()["error"]["code"].startswith("bad_")
