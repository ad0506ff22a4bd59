"""The plain server, and servers that must not start."""

import dataclasses
import socket

import pytest

from orbit_cli.doctor import State
from orbit_cli.server_checks import server_checks
from tests.support.adapters import random_adapter
from tests.support.configurations import CONFIGURATIONS, SLOTS
from tests.support.server import (
    PROMPT,
    START_TIMEOUT_S,
    free_port,
    launch,
    output_logprobs,
    prompt_logprobs,
    serve,
    stop,
)

pytestmark = pytest.mark.server("qwen3")

PROMPTS = [PROMPT, PROMPT[:1], [(3 * index) % 50 + 3 for index in range(300)]]


@pytest.fixture(scope="module")
def plain_server(checkpoints, tmp_path_factory):
    """Qwen3 without slots."""
    with serve(checkpoints.plain("qwen3"), tmp_path_factory.mktemp("plain") / "log", "--dtype", "float32") as server:
        yield server


def answers(server, **fields) -> list[tuple]:
    single = [server.generate(prompt=prompt, tokens=32, **fields) for prompt in PROMPTS]
    batch = server.generate(prompt=PROMPTS, tokens=32, **fields)
    return [(answer["output_ids"], prompt_logprobs(answer), output_logprobs(answer)) for answer in single + batch]


def test_adapter_off_is_bitwise_the_plain_server(server, plain_server):
    untouched = answers(server)
    server.install(random_adapter(1))
    assert answers(server) != untouched
    beside_a_version = answers(server, orbit_version=0)
    plain = answers(plain_server)
    assert untouched == plain
    assert beside_a_version == plain


def test_the_command_line_serves_bitwise_what_the_forked_server_of_the_tests_serves(server, checkpoints, tmp_path):
    """Nothing of this start is forked: every process imports for itself."""
    flags = CONFIGURATIONS["qwen3"].flags
    with serve(checkpoints.plain("qwen3"), tmp_path / "log", *flags, cold=True) as cold:
        assert answers(cold) == answers(server)
        for one in (cold, server):
            one.install(random_adapter(1))
        assert answers(cold) == answers(server)
        assert [process.name() for process in cold.schedulers()] == [process.name() for process in server.schedulers()]


def test_doctor_says_that_a_plain_server_has_no_slots(plain_server):
    (check,) = server_checks(plain_server.url, None)
    assert check.state is State.FAILED and "--enable-orbit-slots" in check.detail


def test_a_port_in_use_ends_the_server_with_a_clear_text(checkpoints, tmp_path):
    with socket.socket() as taken:
        port = free_port()
        taken.bind(("127.0.0.1", port))
        taken.listen()
        log = tmp_path / "log"
        process = launch(checkpoints.plain("qwen3"), log, port, *SLOTS)
        try:
            assert process.wait(timeout=START_TIMEOUT_S) != 0
        finally:
            stop(process)
    assert f"--host 127.0.0.1 --port {port}: Address already in use; choose another --port" in log.read_text()
    assert "Load weight" not in log.read_text()


@pytest.fixture(scope="module")
def server_args(checkpoints):
    from sglang.srt.server_args import ServerArgs

    from orbit_sglang import plugin

    plugin.register()
    model = str(checkpoints.plain("qwen3"))
    base = {"model_path": model, "device": "cpu", "attention_backend": "torch_native", "enable_orbit_slots": True}
    return lambda **changes: ServerArgs(**{**base, **changes})


def test_server_args_know_the_flags_as_fields(server_args):
    args = server_args(orbit_fused="split", orbit_block_size=16)
    fields = {field.name for field in dataclasses.fields(args)}
    assert {"enable_orbit_slots", "orbit_adapter", "orbit_block_size", "orbit_fused"} <= fields
    assert (args.orbit_fused, args.orbit_block_size) == ("split", 16)
    assert dataclasses.replace(args, orbit_block_size=64).orbit_block_size == 64


def test_every_hook_is_applied(server_args):
    from orbit_sglang import plugin
    from orbit_sglang.upstream import hooks

    report = hooks.hook_report()
    assert len(report) == len(plugin.hook_table()) and [status for status in report if status.problem] == []


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"tp_size": 2, "ep_size": 2}, "ep_size=2"),
        ({"pp_size": 2}, "pp_size=2"),
        ({"tokenizer_worker_num": 2}, "tokenizer_worker_num=2"),
        ({"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["all"]}, "SGLang's own LoRA"),
        ({"enable_torch_compile": True}, "enable_torch_compile=True"),
        ({"orbit_block_size": 1}, "--orbit-block-size 1"),
        ({"orbit_fused": "both"}, "--orbit-fused 'both'"),
        ({"orbit_adapter": "boft"}, "--orbit-adapter 'boft': must be one of oft, lora"),
        ({"orbit_rank": 0}, "--orbit-rank 0"),
        ({"orbit_max_adapter_bytes": 0}, "--orbit-max-adapter-bytes 0"),
        ({"orbit_base_activations": "some"}, "--orbit-base-activations 'some'"),
        ({"orbit_dequant_chunk_mb": 0}, "--orbit-dequant-chunk-mb 0"),
        ({"load_format": "dummy"}, "load_format='dummy'"),
        ({"enable_multimodal": True}, "enable_multimodal=True.*those of text"),
        ({"enforce_shared_experts_fusion": True}, "enforce_shared_experts_fusion=True"),
        ({"enable_attn_tp_input_scattered": True}, "enable_attn_tp_input_scattered=True"),
        ({"moe_dense_tp_size": 1}, "moe_dense_tp_size=1"),
        ({"enable_prefill_context_parallel": True}, "enable_prefill_context_parallel=True"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(server_args, changes, reason):
    with pytest.raises(ValueError, match=reason):
        server_args(**changes)


def test_a_plain_server_may_use_what_slots_cannot(server_args):
    assert server_args(enable_orbit_slots=False, tp_size=2).tp_size == 2


def test_a_hook_that_is_not_applied_stops_the_start(server_args, monkeypatch):
    from sglang.srt.plugins.hook_registry import HookType

    from orbit_sglang.model import forward
    from orbit_sglang.upstream import hooks

    lost = hooks.Hook(
        "sglang.srt.managers.scheduler.Scheduler.gone", HookType.AFTER, forward.after_load_model, ("self",)
    )
    monkeypatch.setattr(hooks, "_HOOKS", [*hooks._HOOKS, lost])
    with pytest.raises(hooks.HookError, match="Scheduler.gone: the target does not exist"):
        server_args()
