"""Entry point of the SGLang plugin (group ``sglang.srt.plugins``)."""

from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookType

from orbit_sglang.base import quantization, recording
from orbit_sglang.cpu import compressed_tensors, experts, fp8, modelopt, sampling
from orbit_sglang.cpu import engine as cpu
from orbit_sglang.cpu import latent_attention as cpu_latent_attention
from orbit_sglang.cpu import loading as cpu_loading
from orbit_sglang.http import refusals, reporting, routes
from orbit_sglang.model import forward, latent_attention
from orbit_sglang.scheduler import routed_experts, seeds
from orbit_sglang.scheduler import slot_scheduler as scheduler
from orbit_sglang.startup import flags, launch
from orbit_sglang.upstream import hooks

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager."
_ARGS = "sglang.srt.server_args.ServerArgs."
_HTTP = "sglang.srt.entrypoints.http_server."
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner."
_CHAT = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat."
_COMPLETION = "sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion."
_STREAM_PARAMETERS = ("self", "adapted_request", "request", "raw_request")
_RESPONSE_PARAMETERS = ("self", "request", "ret", "created")


def hook_table() -> list[hooks.Hook | hooks.CpuAttribute]:
    """Every hook on SGLang 0.5.12."""
    before, after, around = HookType.BEFORE, HookType.AFTER, HookType.AROUND
    hook = hooks.Hook
    return [
        hook(_ARGS + "__init__", around, flags.around_init, ("self", "model_path")),
        hook(_ARGS + "add_cli_args", after, flags.after_add_cli_args, ("parser",)),
        hook(_HTTP + "launch_server", before, launch.before_launch_server, ("server_args",)),
        hook(
            "sglang.srt.entrypoints.engine.Engine._launch_subprocesses",
            around,
            launch.around_launch,
            ("cls", "server_args"),
        ),
        hook(
            "sglang.srt.model_loader.loader.DefaultModelLoader.load_weights_and_postprocess",
            around,
            recording.around_load,
            ("model", "weights", "target_device"),
        ),
        *quantization.hook_table(),
        hook(
            "sglang.srt.models.deepseek_v2.DeepseekV2AttentionMLA.__init__",
            after,
            latent_attention.after_init,
            ("self", "config", "hidden_size"),
        ),
        *cpu_loading.hook_table(),
        *fp8.hook_table(),
        *compressed_tensors.hook_table(),
        *modelopt.hook_table(),
        *experts.hook_table(),
        *cpu_latent_attention.hook_table(),
        hook(_RUNNER + "load_model", after, forward.after_load_model, ("self",)),
        hook(_RUNNER + "forward", around, forward.around_forward, ("self", "forward_batch")),
        hook(
            "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
            after,
            forward.after_init_new,
            ("cls", "batch", "model_runner"),
        ),
        hook(_SCHEDULER + "init_request_dispatcher", after, scheduler.install, ("self",)),
        hook(_SCHEDULER + "get_init_info", after, scheduler.after_init_info, ("self",)),
        hook(_SCHEDULER + "_add_request_to_queue", before, scheduler.before_queue, ("self", "req", "is_retracted")),
        hook(_SCHEDULER + "process_input_requests", after, scheduler.after_input, ("self", "recv_reqs")),
        hook(_SCHEDULER + "maybe_sleep_on_idle", around, scheduler.around_sleep, ("self",)),
        hook(
            "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch",
            after,
            seeds.after_from_schedule_batch,
            ("cls", "batch", "vocab_size"),
        ),
        hook(
            "sglang.srt.layers.sampler.multinomial_with_seed",
            HookType.REPLACE,
            sampling.multinomial_with_seed,
            ("logprobs", "seed", "positions"),
            cpu_only=True,
        ),
        *cpu.hook_table(),
        *routed_experts.hook_table(),
        hook(_TOKENIZER + "init_request_dispatcher", after, routes.install, ("self",)),
        hook(_TOKENIZER + "_handle_batch_output", before, reporting.before_batch_output, ("self", "recv_obj")),
        hook(
            _TOKENIZER + "_handle_abort_finish_reason",
            before,
            refusals.before_abort,
            ("self", "out", "state", "is_stream"),
        ),
        hook(_TOKENIZER + "generate_request", around, reporting.around_generate, ("self", "obj", "request")),
        hook(_CHAT + "_build_chat_response", after, reporting.after_openai_response, _RESPONSE_PARAMETERS),
        hook(_CHAT + "_generate_chat_stream", around, reporting.around_chat_stream, _STREAM_PARAMETERS),
        hook(_COMPLETION + "_build_completion_response", after, reporting.after_openai_response, _RESPONSE_PARAMETERS),
        hook(
            _COMPLETION + "_generate_completion_stream", around, reporting.around_completion_stream, _STREAM_PARAMETERS
        ),
    ]


_registered = False


def register() -> None:
    """Add the flags and hooks to SGLang; harmless when repeated.

    SGLang calls it in each of its processes. A caller that builds ``ServerArgs`` itself calls it first: it then loads
    SGLang's plugins, so that the hooks are applied when it returns.
    """
    global _registered
    if _registered:
        return
    _registered = True  # before load_plugins, which calls this function again
    flags.inject_fields()
    hooks.register(hook_table())
    load_plugins()
