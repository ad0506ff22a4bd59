"""One server of two ranks (tensor parallelism on gloo): the same versions at the same batch boundary, or none."""

import re
import resource

import psutil
import pytest
import requests
import torch

from orbit_kernels.adapters import LoRAMethod, OFTMethod
from orbit_kernels.checkpoint.files import HFCheckpoint
from orbit_kernels.checkpoint.manifest import BaseManifest
from tests.support import tiny_models
from tests.support.adapters import random_adapter
from tests.support.configurations import CONFIGURATIONS, SLOTS, TWO_RANKS
from tests.support.quantized import difference_from_files, quantize
from tests.support.references import assert_close, peft_model, token_logprobs, transformers_model
from tests.support.server import (
    PROMPT,
    START_TIMEOUT_S,
    Running,
    Server,
    all_logprobs,
    free_port,
    launch,
    output_logprobs,
    prompt_logprobs,
    serve,
    spans,
    stop,
    wait_for,
)

pytestmark = pytest.mark.server("qwen3 on two ranks")

INT4_FLAGS = (*CONFIGURATIONS["lora"].flags, "--orbit-base-activations", "none", *TWO_RANKS)
LONG = {"max_new_tokens": 12000, "ignore_eos": True}


def test_the_ranks_hold_the_files_between_them(server, checkpoints):
    served = BaseManifest.from_json(server.get("/orbit/base").text)
    assert difference_from_files(checkpoints.plain("qwen3"), served) is None
    assert [str(cut) for cut in served.cuts["model.layers.1.mlp.down_proj.weight"]] == ["[1, 0:64]", "[1, 64:128]"]
    assert "model.layers.1.input_layernorm.weight" in served.tensors


def test_a_rank_that_fails_to_stage_fails_the_stage_on_all(server):
    active, staged = (server.install(random_adapter(seed)) for seed in (1, 2))
    server.rollback(active)
    before = server.generate()
    _, second = server.schedulers()
    limits = second.rlimit(resource.RLIMIT_NOFILE)
    second.rlimit(resource.RLIMIT_NOFILE, (second.num_fds(), limits[1]))  # it cannot open the payload
    try:
        refused = server.stage(staged + 1, random_adapter(3))
    finally:
        second.rlimit(resource.RLIMIT_NOFILE, limits)
    assert refused.status_code == 500 and "rank 1: staging failed: OSError" in refused.json()["error"]["message"]
    after = server.generate()
    assert spans(after) == [[active, 0, 16]] and after["output_ids"] == before["output_ids"]
    assert server.status()["staging"] is None
    # The first rank had already overwritten the slot: it is empty on both.
    assert server.status()["versions"] == [0, active]
    assert server.stage(staged + 1, random_adapter(3)).status_code == 200


def test_a_wrong_adapter_is_refused_once(server):
    refused = server.stage(server.new_version(), random_adapter(1, method=OFTMethod(block_size=16)))
    assert refused.status_code == 422 and len(refused.json()["error"]["detail"]) == 1


def exported(server: Server) -> dict[str, float]:
    """Orbit's metrics by name and labels."""
    lines = (line.rsplit(" ", 1) for line in server.get("/metrics").text.splitlines() if line.startswith("orbit_"))
    return {name: float(value) for name, value in lines}


def test_what_both_ranks_do_is_counted_and_logged_once(server):
    server.install(random_adapter(1))
    before = exported(server)
    version = server.install(random_adapter(2))
    server.stage(version + 1, b"")
    server.rollback(0)
    after = exported(server)
    for name, times in {
        "orbit_stage_seconds_count": 1,
        "orbit_activate_pause_seconds_count": 2,
        "orbit_rollback_total": 1,
    }.items():
        assert after[name] - before[name] == times
    refused = 'orbit_stage_rejected_total{reason="adapter_refused"}'
    assert after[refused] - before.get(refused, 0) == 1
    log = server.log.read_text()
    for event in ("staged", "activated"):
        assert len(re.findall(rf'orbit: {event} {{"version": {version},', log)) == 1
    assert len(re.findall(rf'orbit: stage refused {{"version": {version + 1}, "code": "adapter_refused"', log)) == 1


def test_the_ranks_sample_the_same_tokens(server):
    """Requests without a seed: one drawn by each rank for itself would make the ranks' caches those of other tokens."""
    server.install(random_adapter(1))
    sampling = {"sampling_params": {"temperature": 1.0}}
    answers = server.generate(prompt=[PROMPT] * 8, tokens=40, **sampling)
    assert len({str(answer["output_ids"]) for answer in answers}) == 8
    for answer in answers:
        again = server.generate(prompt=PROMPT + answer["output_ids"], tokens=1)
        difference = torch.tensor(prompt_logprobs(again)[-40:]) - torch.tensor(output_logprobs(answer))
        assert difference.abs().max() <= 1e-4


@pytest.fixture(scope="module")
def int4(checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks") / "int4"
    return quantize(checkpoints.plain("qwen3", torch.bfloat16), folder, "int4")


def test_lora_on_a_quantised_base_equals_peft_per_token(checkpoints, int4, tmp_path):
    adapter = random_adapter(1, method=LoRAMethod(rank=4), tied=False)
    with serve(int4, tmp_path / "log", *INT4_FLAGS) as server:
        served = BaseManifest.from_json(server.get("/orbit/base").text)
        base = server.generate(tokens=24)
        server.install(adapter)
        adapted = server.generate(tokens=24)
    files = HFCheckpoint(int4)
    stored = ((name, files.tensor(name)) for name in files.specs if "_proj." in name)  # the rest is served in fp32
    expected = BaseManifest.of({}, stored, served.cuts).tensors
    assert {name: served.tensors[name] for name in expected} == expected
    assert "model.layers.0.self_attn.o_proj.weight_packed[1, 4:8]" in expected
    model = transformers_model(int4, torch.float32)
    assert_close(all_logprobs(base), token_logprobs(model, PROMPT + base["output_ids"]), 1e-5, 1e-4)
    model = peft_model(model, adapter)
    assert_close(all_logprobs(adapted), token_logprobs(model, PROMPT + adapted["output_ids"]), 1e-5, 1e-4)
    assert (all_logprobs(adapted)[:23] - all_logprobs(base)[:23]).abs().mean() > 1e-2


def test_experts_on_a_cpu_refuse_a_second_rank(checkpoints, tmp_path):
    folder = tiny_models.save("qwen3_moe", tmp_path / "moe", torch.float32)
    log = tmp_path / "log"
    process = launch(folder, log, free_port(), *SLOTS, *TWO_RANKS)
    try:
        assert process.wait(timeout=START_TIMEOUT_S) != 0
    finally:
        stop(process)
    assert (
        "--tp-size 2: on a CPU the routed experts of model.layers.0.mlp.experts are computed by one rank"
        in log.read_text()
    )


def test_a_dead_rank_ends_the_server(checkpoints, tmp_path):
    """Nothing hangs: the running request and the next action get an error, and no process is left."""
    with serve(checkpoints.plain("qwen3"), tmp_path / "log", *SLOTS, *TWO_RANKS) as server:
        processes, (_, second) = server.processes(), server.schedulers()
        running = Running(lambda: _outcome(server, {"input_ids": PROMPT, "sampling_params": LONG}))
        wait_for(lambda: server.status()["requests"])
        second.kill()
        assert running.join() == "an error"
        assert server.process.wait(timeout=60) != 0
        assert _outcome(server, {"input_ids": PROMPT}) == "an error"
        assert psutil.wait_procs(processes, timeout=60)[1] == []


def _outcome(server: Server, body: dict) -> str:
    try:
        return "tokens" if server.post("/generate", body).ok else "an error"
    except requests.ConnectionError:
        return "an error"
