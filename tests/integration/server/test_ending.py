"""SIGTERM ends a server that has refused requests and runs one (Qwen3, a server of its own)."""

import os
import signal

import requests

from orbit_sglang.http.ending import DRAIN_S
from tests.support.configurations import SLOTS
from tests.support.server import PROMPT, serve, wait_for

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
        with requests.post(server.url + "/generate", json=long, stream=True, timeout=60):
            wait_for(lambda: server.status()["requests"])
            os.kill(server.process.pid, signal.SIGTERM)
            server.process.wait(timeout=DRAIN_S + 15)
        assert "Remaining number of requests 1. Remaining requests remaining_rids=['long']" in server.log.read_text()
