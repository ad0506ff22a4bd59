"""Attacks on the frozen base, and requests that must not end a server, over HTTP."""

import base64

import pytest
import requests
from sglang.srt.utils import MultiprocessingSerializer

from tests.support.adapters import random_adapter
from tests.support.server import PROMPT, output_logprobs

pytestmark = pytest.mark.server("qwen3", "llama")


def payload_of_builtins(marker) -> str:
    """A pickle of nothing but ``builtins.open``, which makes a file where it is read."""
    return base64.b64encode(b"cbuiltins\nopen\n(V" + str(marker).encode() + b"\nVw\ntR.").decode()


def test_a_pickle_of_builtins_runs_nothing_and_the_base_stays(server, checkpoints, tmp_path):
    read_here, marker = tmp_path / "read_here", tmp_path / "marker"
    MultiprocessingSerializer.deserialize(payload_of_builtins(read_here))
    assert read_here.exists(), "the attack is none"

    base, answer, before = server.get("/orbit/base").json(), server.generate(), server.status()
    attack = {"serialized_named_tensors": [payload_of_builtins(marker)]}
    for path, body in (
        ("/update_weights_from_tensor", attack),
        ("/update_weights_from_tensor/", attack),
        (
            "/load_lora_adapter_from_tensors",
            {"lora_name": "a", "config_dict": {}, "serialized_tensors": payload_of_builtins(marker)},
        ),
        ("/update_weights_from_disk", {"model_path": str(checkpoints.plain("llama"))}),
        ("/weights_checker", {"action": "reset_tensors"}),
        ("/release_memory_occupation", {}),
    ):
        refused = server.post(path, body)
        assert refused.status_code == 403, refused.text
        assert refused.json()["error"].keys() == {"code", "message", "detail"}
        assert refused.json()["error"]["code"] == "route_refused"
    assert not marker.exists()
    assert server.get("/orbit/base").json() == base
    assert {**server.status(), "busy_s": 0} == {**before, "busy_s": 0}
    assert output_logprobs(server.generate()) == output_logprobs(answer)


@pytest.mark.parametrize("path", ["/v1/score", "/v1/embeddings", "/v1/rerank", "/v1/responses", "/tokenize"])
def test_a_route_that_cannot_choose_a_version_refuses_the_choice(server, path):
    for body in ({"model": "m", "orbit_version": 0}, {"items": [{"custom_params": {"orbit_version": 0}}]}):
        answer = server.post(path, body)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "bad_body", answer.text
        assert f"{path} cannot choose a version" in answer.json()["error"]["message"]
    assert server.post(path, {"model": "m", "query": "orbit_version"}).status_code != 403


def test_a_version_in_the_query_is_refused(server):
    answer = server.post("/generate", {"input_ids": PROMPT}, params={"orbit_version": 0})
    assert answer.status_code == 400 and "top of the body" in answer.json()["error"]["message"]


@pytest.mark.server("qwen3")
class TestRequestsThatEndedServers:
    @pytest.mark.parametrize(
        "constraint, allowed",
        [
            ({"regex": "[0-9]+"}, "0123456789 "),
            ({"json_schema": '{"type": "integer"}'}, "-0123456789 "),
            ({"ebnf": 'root ::= "1" | "1" root'}, "1 "),
        ],
    )
    def test_structured_output_is_served_on_a_cpu(self, server, constraint, allowed):
        server.install(random_adapter(1))
        params = {"max_new_tokens": 6, "temperature": 0, **constraint}
        answer = server.post("/generate", {"input_ids": PROMPT, "sampling_params": params})
        assert answer.status_code == 200, answer.text
        text = answer.json()["text"]
        assert text.strip() and set(text) <= set(allowed), text

    @pytest.mark.parametrize(
        "body, named",
        [
            ({"input_ids": [10**6]}, "input_ids 1000000: must be integers from 0 to 63"),
            ({"input_ids": [-5]}, "input_ids -5"),
            ({"input_ids": [PROMPT, [64]]}, "input_ids 64"),
            ({"input_ids": PROMPT, "return_logprob": True, "top_logprobs_num": 65}, "top_logprobs_num 65"),
            ({"input_ids": PROMPT, "return_logprob": True, "top_logprobs_num": -3}, "top_logprobs_num -3"),
            ({"input_ids": PROMPT, "return_logprob": True, "token_ids_logprob": [10**6]}, "token_ids_logprob 1000000"),
        ],
    )
    def test_numbers_out_of_range_are_answered_with_400(self, server, body, named):
        answer = server.post("/generate", body)
        assert answer.status_code == 400 and named in answer.json()["error"]["message"]
        assert server.generate(tokens=2)

    def test_a_temperature_that_is_no_number_is_answered_with_400(self, server):
        text = '{"input_ids": [3, 4], "sampling_params": {"temperature": NaN, "max_new_tokens": 4}}'
        json_type = {"Content-Type": "application/json"}
        answer = requests.post(server.url + "/generate", data=text, headers=json_type, timeout=60)
        assert answer.status_code == 400 and "temperature nan: must be finite" in answer.json()["error"]["message"]
        assert server.generate(tokens=2)
