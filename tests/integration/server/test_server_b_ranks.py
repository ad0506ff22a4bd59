"""One server of two ranks (tensor parallelism on gloo): the same versions at the same batch boundary, or none."""

import re
import resource

import harness
import psutil
import pytest
import quantized_models
import requests
import tiny_models
import torch
from harness import PROMPT, TWO_RANKS, output_logprobs, prompt_logprobs, spans
from peft import PeftModel

# What holds for one rank holds for two: the same tests, with this module's server.
from test_server_1_qwen3 import test_abandoned_requests_free_their_slot, test_equals_peft_per_token  # noqa: F401
from test_server_2_activation import (  # noqa: F401
    test_a_request_that_chose_its_version_keeps_it,
    test_finish_ends_a_request_on_the_version_it_started_with,
    test_requests_that_have_not_started_take_the_new_version,
    test_requests_that_lose_their_cache_in_a_pause_all_finish,
    test_switch_continues_on_the_new_version_and_shares_no_cache,
)
from test_server_8_quantized import assert_close, expected_logprobs, served_logprobs

from orbit_kernels.adapters import LoRAMethod
from orbit_kernels.checkpoint.files import HFCheckpoint
from orbit_kernels.checkpoint.manifest import BaseManifest

FLAGS = (*harness.QWEN3_FLAGS, "--orbit-seeded-sampling", "--enable-metrics", *TWO_RANKS)
INT4_FLAGS = (*harness.LORA_FLAGS, "--orbit-base-activations", "none", *TWO_RANKS)
LONG = {"max_new_tokens": 12000, "ignore_eos": True}


@pytest.fixture
def qwen3(servers):
    """Qwen3 on two ranks, tied rotations; idle, and on the base model."""
    return servers.get("qwen3", *FLAGS).idle_on_base()


def test_the_ranks_hold_the_files_between_them(qwen3, servers):
    served = BaseManifest.from_json(qwen3.get("/orbit/base").text)
    assert quantized_models.difference_from_files(servers.checkpoint("qwen3"), served) is None
    assert [str(cut) for cut in served.cuts["model.layers.1.mlp.down_proj.weight"]] == ["[1, 0:64]", "[1, 64:128]"]
    assert "model.layers.1.input_layernorm.weight" in served.tensors


def test_a_rank_that_fails_to_stage_fails_the_stage_on_all(qwen3):
    active, staged = (qwen3.install(tiny_models.random_adapter(seed)) for seed in (1, 2))
    qwen3.rollback(active)
    before = qwen3.generate()
    _, second = qwen3.schedulers()
    limits = second.rlimit(resource.RLIMIT_NOFILE)
    second.rlimit(resource.RLIMIT_NOFILE, (second.num_fds(), limits[1]))  # it cannot open the payload
    try:
        refused = qwen3.stage(staged + 1, tiny_models.random_adapter(3))
    finally:
        second.rlimit(resource.RLIMIT_NOFILE, limits)
    assert refused.status_code == 500 and "rank 1: staging failed: OSError" in refused.json()["error"]["message"]
    after = qwen3.generate()
    assert spans(after) == [[active, 0, 16]] and after["output_ids"] == before["output_ids"]
    assert qwen3.status()["staging"] is None
    # The first rank had already overwritten the slot: it is empty on both.
    assert qwen3.status()["versions"] == [0, active]
    assert qwen3.stage(staged + 1, tiny_models.random_adapter(3)).status_code == 200


def test_a_wrong_adapter_is_refused_once(qwen3):
    refused = qwen3.stage(qwen3.new_version(), tiny_models.random_adapter(1, block_size=16))
    assert refused.status_code == 422 and len(refused.json()["error"]["detail"]) == 1


def exported(server: harness.Server) -> dict[str, float]:
    """Orbit's metrics by name and labels."""
    lines = (line.rsplit(" ", 1) for line in server.get("/metrics").text.splitlines() if line.startswith("orbit_"))
    return {name: float(value) for name, value in lines}


def test_what_both_ranks_do_is_counted_and_logged_once(qwen3):
    qwen3.install(tiny_models.random_adapter(1))
    before = exported(qwen3)
    version = qwen3.install(tiny_models.random_adapter(2))
    qwen3.stage(version + 1, b"")
    qwen3.rollback(0)
    after = exported(qwen3)
    for name, times in {
        "orbit_stage_seconds_count": 1,
        "orbit_activate_pause_seconds_count": 2,
        "orbit_rollback_total": 1,
    }.items():
        assert after[name] - before[name] == times
    refused = 'orbit_stage_rejected_total{reason="adapter_refused"}'
    assert after[refused] - before.get(refused, 0) == 1
    log = qwen3.log.read_text()
    for event in ("staged", "activated"):
        assert len(re.findall(rf'orbit: {event} {{"version": {version},', log)) == 1
    assert len(re.findall(rf'orbit: stage refused {{"version": {version + 1}, "code": "adapter_refused"', log)) == 1


def test_the_ranks_sample_the_same_tokens(qwen3):
    """Requests without a seed: one drawn by each rank for itself would make the ranks' caches those of other tokens."""
    qwen3.install(tiny_models.random_adapter(1))
    sampling = {"sampling_params": {"temperature": 1.0}}
    answers = qwen3.generate(prompt=[PROMPT] * 8, tokens=40, **sampling)
    assert len({str(answer["output_ids"]) for answer in answers}) == 8
    for answer in answers:
        again = qwen3.generate(prompt=PROMPT + answer["output_ids"], tokens=1)
        difference = torch.tensor(prompt_logprobs(again)[-40:]) - torch.tensor(output_logprobs(answer))
        assert difference.abs().max() <= 1e-4


@pytest.fixture(scope="module")
def int4(servers, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks") / "int4"
    return quantized_models.save(servers.checkpoint("qwen3", torch.bfloat16), folder, "int4")


def test_lora_on_a_quantised_base_equals_peft_per_token(servers, int4, tmp_path):
    servers.stop()
    adapter = tiny_models.random_adapter(1, method=LoRAMethod(rank=4), tied=False)
    with harness.serve(int4, tmp_path / "log", *INT4_FLAGS) as server:
        served = BaseManifest.from_json(server.get("/orbit/base").text)
        base = server.generate(tokens=24)
        server.install(adapter)
        adapted = server.generate(tokens=24)
    files = HFCheckpoint(int4)
    stored = ((name, files.tensor(name)) for name in files.specs if "_proj." in name)  # the rest is served in fp32
    expected = BaseManifest.of({}, stored, served.cuts).tensors
    assert {name: served.tensors[name] for name in expected} == expected
    assert "model.layers.0.self_attn.o_proj.weight_packed[1, 4:8]" in expected
    model = quantized_models.transformers_model(int4, torch.float32)
    assert_close(served_logprobs(base), expected_logprobs(model, base), 1e-5, 1e-4)
    model = PeftModel.from_pretrained(model, quantized_models.save_adapter(adapter, tmp_path / "peft")).eval()
    assert_close(served_logprobs(adapted), expected_logprobs(model, adapted), 1e-5, 1e-4)
    assert (served_logprobs(adapted)[:23] - served_logprobs(base)[:23]).abs().mean() > 1e-2


def test_experts_on_a_cpu_refuse_a_second_rank(servers, tmp_path):
    servers.stop()
    folder = tiny_models.save_qwen3_moe(tmp_path / "moe", torch.float32)
    log = tmp_path / "log"
    process = harness.launch(folder, log, harness.free_port(), *harness.QWEN3_FLAGS, *TWO_RANKS)
    try:
        assert process.wait(timeout=harness.START_TIMEOUT_S) != 0
    finally:
        harness.stop(process)
    assert (
        "--tp-size 2: on a CPU the routed experts of model.layers.0.mlp.experts are computed by one rank"
        in log.read_text()
    )


def test_a_dead_rank_ends_the_server(servers, tmp_path):
    """Nothing hangs: the running request and the next action get an error, and no process is left."""
    servers.stop()
    with harness.serve(servers.checkpoint("qwen3"), tmp_path / "log", *harness.QWEN3_FLAGS, *TWO_RANKS) as server:
        processes, (_, second) = server.processes(), server.schedulers()
        running = harness.Running(lambda: _outcome(server, {"input_ids": PROMPT, "sampling_params": LONG}))
        harness.wait_for(lambda: server.status()["requests"])
        second.kill()
        assert running.join() == "an error"
        assert server.process.wait(timeout=60) != 0
        assert _outcome(server, {"input_ids": PROMPT}) == "an error"
        assert psutil.wait_procs(processes, timeout=60)[1] == []


def _outcome(server: harness.Server, body: dict) -> str:
    try:
        return "tokens" if server.post("/generate", body).ok else "an error"
    except requests.ConnectionError:
        return "an error"
