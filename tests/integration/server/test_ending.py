"""SIGTERM ends a server that has refused and aborted requests, and runs one (Qwen3, a server of its own)."""

import os
import signal

import requests

from orbit_sglang.http.ending import DRAIN_S
from tests.support.configurations import SLOTS
from tests.support.server import PROMPT, Running, Server, serve, wait_for

IDS, TEXTS = {"input_ids": PROMPT}, {"text": ["1+2", "1" * 40000, "2+3"]}
REFUSED = (
    {"input_ids": [3] * 20000},
    {**IDS, "sampling_params": {"temperature": -1}},
    {**IDS, "sampling_params": {"no_such_parameter": 1}},
    {**IDS, "sampling_params": {"temperature": -1, "n": 3}},
    {**IDS, "orbit_version": 99},
    {**IDS, "orbit_version": 99, "stream": True},
    {**IDS, "orbit_version": 99, "sampling_params": {"n": 3}},
    {"input_ids": [PROMPT, [3] * 20000, PROMPT], "sampling_params": {"max_new_tokens": 4}},
    {**TEXTS, "sampling_params": {"max_new_tokens": 4}},
    {**IDS, "lora_path": "none"},
    {**IDS, "rid": ["twice", "twice"]},
)


def test_sigterm_waits_for_running_requests_alone_and_only_so_long(checkpoints, tmp_path):
    long = {**IDS, "rid": "long", "stream": True, "sampling_params": {"max_new_tokens": 16000, "ignore_eos": True}}
    with serve(checkpoints.plain("qwen3"), tmp_path / "log", *SLOTS) as server:
        for body in REFUSED:
            assert server.post("/generate", body).status_code in (400, 500)
        abort_waiting_and_running(server)
        with requests.post(server.url + "/generate", json=long, stream=True, timeout=60):
            wait_for(lambda: server.status()["requests"])
            os.kill(server.process.pid, signal.SIGTERM)
            server.process.wait(timeout=DRAIN_S + 15)
        assert "Remaining number of requests 1. Remaining requests remaining_rids=['long']" in server.log.read_text()


def abort_waiting_and_running(server: Server) -> None:
    """Requests that end before and after they began: the server runs 32 at once."""
    endless = {**IDS, "sampling_params": {"max_new_tokens": 10000, "ignore_eos": True}}
    many = [Running(lambda: server.post("/generate", endless).json()) for _ in range(40)]
    wait_for(lambda: sum(server.status()["requests"].values()) == len(many))
    assert server.post("/abort_request", {"abort_all": True}).status_code == 200
    assert {one.join()["meta_info"]["finish_reason"]["type"] for one in many} == {"abort"}
