"""This module lists every change to SGLang 0.5.12; ``orbit doctor --changes`` prints it.

The changes are grouped by process, in the order in which a request meets them. A GPU needs all of them but those of
``orbit_sglang.cpu.changes``.
"""

from sglang.srt.plugins.hook_registry import HookType

from orbit_kernels.upstream.ledger import Added, Change, OnInstance, name_of
from orbit_sglang.base import quantization, recording
from orbit_sglang.control import gate
from orbit_sglang.cpu import changes as for_cpu
from orbit_sglang.http import ending, refusals, reporting, request_body, request_check, routes, states
from orbit_sglang.http import gate as http_gate
from orbit_sglang.model import forward, latent_attention
from orbit_sglang.model.slotted import AdaptedExpertsInput, AdaptedLatent, AdaptedLayer
from orbit_sglang.model.slotted import experts as slotted_experts
from orbit_sglang.model.slotted import latent as slotted_latent
from orbit_sglang.model.slotted import layer as slotted_layer
from orbit_sglang.scheduler import routed_experts, seeds, slot_scheduler
from orbit_sglang.startup import flags, launch
from orbit_sglang.upstream.hooks import Fields, Hook

START = "start-up, every process"
HTTP = "HTTP process"
SCHEDULER = "scheduler process"
MODEL = "model, in the scheduler process"

BEFORE, AFTER, AROUND = HookType.BEFORE, HookType.AFTER, HookType.AROUND
SLOTS = "SGLang has versions of an adapter that change while it generates"
_ARGS = "sglang.srt.server_args.ServerArgs"
_SERVER = "sglang.srt.entrypoints.http_server."
_ENGINE = "sglang.srt.entrypoints.engine.Engine."
_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager."
_CHAT = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat."
_COMPLETION = "sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion."
_DISPATCHER = "sglang.utils.TypeBasedDispatcher.__iadd__"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_CAPTURER = "sglang.srt.state_capturer."
_LOADER = "sglang.srt.model_loader.loader.DefaultModelLoader.load_weights_and_postprocess"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner."
_QUANTIZATION = "sglang.srt.layers.quantization."
_FP8 = _QUANTIZATION + "fp8."
_COMPRESSED = _QUANTIZATION + "compressed_tensors.compressed_tensors."
_DEEPSEEK = "sglang.srt.models.deepseek_v2."
_STREAM_PARAMETERS = ("self", "adapted_request", "request", "raw_request")
_RESPONSE_PARAMETERS = ("self", "request", "ret", "created")


def sections() -> dict[str, list[Change]]:
    """Returns every change by the process that needs it.

    Those for a CPU come last, so that they wrap what is around a GPU too.
    """
    return {
        START: _start(),
        HTTP: _http(),
        SCHEDULER: _scheduler(),
        MODEL: _model(),
        **for_cpu.sections(),
    }


def _start() -> list[Change]:
    return [
        Fields(
            target=_ARGS,
            add=flags.inject_fields,
            names=tuple(flag.field for flag in flags.FLAGS),
            why="options of the slots are options of the server, for verl and for the command line alike",
            until="SGLang lets a plugin declare options",
        ),
        _hook(
            _ARGS + ".__init__",
            AROUND,
            flags.around_init,
            ("self", "model_path"),
            why="takes the options, and refuses what slots cannot be combined with before anything is allocated",
            until="SGLang lets a plugin declare options and check them",
        ),
        _hook(
            _ARGS + ".add_cli_args",
            AFTER,
            flags.after_add_cli_args,
            ("parser",),
            why="adds the flags to the command line",
            until="SGLang lets a plugin declare options",
        ),
        _hook(
            _SERVER + "launch_server",
            BEFORE,
            launch.before_launch_server,
            ("server_args",),
            why="a taken port is found before the model is loaded, not minutes after",
            until="SGLang binds its port first",
        ),
        _hook(
            _ENGINE + "_launch_subprocesses",
            AROUND,
            launch.around_launch,
            ("cls", "server_args"),
            why="checks the checkpoint, and that every scheduler process has these changes",
            until="SGLang refuses to start when a plugin's hook is not applied",
        ),
    ]


def _http() -> list[Change]:
    return [
        _hook(
            _TOKENIZER + "init_request_dispatcher",
            AFTER,
            routes.install,
            ("self",),
            why="the slots' routes, the answers of the scheduler and the request's version come from here",
            until="SGLang lets a plugin add routes and messages",
        ),
        Added(
            target=_SERVER + "app.add_api_route",
            by=name_of(routes.Routes.add_to),
            why="the routes /orbit/* are on the server's own port",
            until="SGLang lets a plugin add routes",
        ),
        Added(
            target=_SERVER + "app.add_middleware",
            by=name_of(request_body.VersionInBody),
            why="SGLang drops the key orbit_version of a body, which its request models do not declare",
            until="SGLang passes unknown keys of a body on to the scheduler",
        ),
        Added(
            target=_SERVER + "app.add_middleware",
            by=name_of(http_gate.Gate),
            why="routes that change weights, load adapters or are not known yet are refused, keys or no keys",
            until="SGLang can freeze its weights",
        ),
        OnInstance(
            method=gate.SEND,
            by=name_of(gate.guard),
            why="sgl.Engine and verl's actor send no message that changes weights or loads adapters",
            until="SGLang can freeze its weights",
        ),
        _hook(
            _TOKENIZER + "_create_tokenized_object",
            AFTER,
            request_check.after_create_tokenized_object,
            ("self", "obj", "input_text", "input_ids"),
            why="tokens outside the vocabulary, NaN as temperature, stop strings without a tokeniser end SGLang's scheduler",
            until="SGLang checks them",
        ),
        _hook(
            _TOKENIZER + "sigterm_watchdog",
            AROUND,
            ending.around_watchdog,
            ("self",),
            why="a SIGTERM ends the server in bounded time",
            until="SGLang bounds its wait for running requests",
        ),
        Added(
            target=_DISPATCHER,
            by=name_of(routes.install),
            why="replies of the scheduler to control operations find their route",
            until="SGLang lets a plugin add messages",
        ),
        _hook(
            _TOKENIZER + "_handle_batch_output",
            BEFORE,
            reporting.before_batch_output,
            ("self", "recv_obj"),
            why="SGLang reports only the last chunk of customized_info; the versions of all tokens are wanted",
            until="SGLang accumulates customized_info over a request's chunks",
        ),
        _hook(
            _TOKENIZER + "_handle_abort_finish_reason",
            BEFORE,
            refusals.before_abort,
            ("self", "out", "state", "is_stream"),
            why="a version that no slot holds is answered with 400 on every route",
            until="SGLang answers an aborted request with its status where it streams",
        ),
        _hook(
            _TOKENIZER + "generate_request",
            AROUND,
            reporting.around_generate,
            ("self", "obj", "request"),
            why="a stream of an OpenAI route sees the versions of its tokens",
            until="SGLang's OpenAI routes pass customized_info on",
        ),
        _hook(
            _TOKENIZER + "generate_request",
            AROUND,
            states.around_generate,
            ("self", "obj", "request"),
            why="a server that is told to end does not wait for requests that it refused",
            until="SGLang drops the state of a request that it refuses",
        ),
        _hook(
            _TOKENIZER + "_handle_abort_req",
            AROUND,
            states.around_abort,
            ("self", "recv_obj"),
            why="a server that is told to end does not wait for requests that were aborted before they ran",
            until="SGLang drops the state of a request that ends in the waiting queue",
        ),
        *(
            _hook(
                target,
                AFTER,
                reporting.after_openai_response,
                _RESPONSE_PARAMETERS,
                why="an OpenAI answer says which version made its tokens",
                until="SGLang's OpenAI routes pass customized_info on",
            )
            for target in (_CHAT + "_build_chat_response", _COMPLETION + "_build_completion_response")
        ),
        *(
            _hook(
                target,
                AROUND,
                reporting.around_openai_stream,
                _STREAM_PARAMETERS,
                why="an OpenAI stream says at a choice's end which version made its tokens",
                until="SGLang's OpenAI routes pass customized_info on",
            )
            for target in (_CHAT + "_generate_chat_stream", _COMPLETION + "_generate_completion_stream")
        ),
    ]


def _scheduler() -> list[Change]:
    return [
        _hook(
            _SCHEDULER + "init_request_dispatcher",
            AFTER,
            slot_scheduler.install,
            ("self",),
            why="attaches the slots to the scheduler, and proves that this process has every change",
            until=SLOTS,
        ),
        Added(
            target=_DISPATCHER,
            by=name_of(slot_scheduler.install),
            why="control operations reach the slots between two batches",
            until="SGLang lets a plugin add messages",
        ),
        _hook(
            _SCHEDULER + "get_init_info",
            AFTER,
            slot_scheduler.after_init_info,
            ("self",),
            why="tells the main process that the slots are in place",
            until="SGLang refuses to start when a plugin's hook is not applied",
        ),
        _hook(
            _SCHEDULER + "_add_request_to_queue",
            BEFORE,
            slot_scheduler.before_queue,
            ("self", "req", "is_retracted"),
            why="a request gets its version and that version's namespace of the prefix cache",
            until=SLOTS,
        ),
        _hook(
            _SCHEDULER + "process_input_requests",
            BEFORE,
            slot_scheduler.before_input,
            ("self", "recv_reqs"),
            why="messages that change weights or load adapters are refused, whoever sent them",
            until="SGLang can freeze its weights",
        ),
        _hook(
            _SCHEDULER + "process_input_requests",
            AFTER,
            slot_scheduler.after_input,
            ("self", "recv_reqs"),
            why="a staging's end is noticed once an iteration",
            until=SLOTS,
        ),
        _hook(
            _SCHEDULER + "maybe_sleep_on_idle",
            AROUND,
            slot_scheduler.around_sleep,
            ("self",),
            why="an idle scheduler stays awake until a staging has ended",
            until=SLOTS,
        ),
        _hook(
            "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch",
            AFTER,
            seeds.after_from_schedule_batch,
            ("cls", "batch", "vocab_size"),
            why="a request's seed is honoured, so that a rollout can be repeated",
            until="SGLang honours sampling_seed without --enable-deterministic-inference",
        ),
        _hook(
            _CAPTURER + "routed_experts.RoutedExpertsCapturer.__init__",
            AROUND,
            routed_experts.around_capturer,
            ("self", "model_config", "num_tokens", "max_running_requests"),
            why="room for a whole batch where prompts are not taken in chunks; a dense model is refused",
            until="SGLang sizes that buffer by the batch when chunked_prefill_size is -1",
        ),
        _hook(
            "sglang.srt.managers.schedule_batch.ScheduleBatch.release_req",
            BEFORE,
            routed_experts.before_release,
            ("self", "idx"),
            why="a retracted request keeps the experts that were reported with its log-probs",
            until="SGLang keeps the record of a retracted request",
        ),
        _hook(
            _SCHEDULER + "maybe_collect_routed_experts",
            AFTER,
            routed_experts.after_collect,
            ("self", "req"),
            why="puts the kept record in front of the new one",
            until="SGLang keeps the record of a retracted request",
        ),
        _hook(
            _SCHEDULER + "stream_output_generation",
            AROUND,
            routed_experts.around_stream_output,
            ("self", "reqs", "return_logprob"),
            why="a batch may mix requests that ask for their experts with others, which would end the server",
            until="SGLang keeps a place for every request in a step's records",
        ),
    ]


def _model() -> list[Change]:
    return [
        _hook(
            _FP8 + "Fp8Config.from_config",
            AFTER,
            quantization.after_fp8_config,
            ("cls", "config"),
            why="names of layers that are not quantised reach fused linears and language models of other models",
            until="SGLang's Qwen3, Llama and Kimi-K2.5 define packed_modules_mapping",
        ),
        _hook(
            _COMPRESSED + "CompressedTensorsConfig.from_config",
            AFTER,
            quantization.after_compressed_tensors_config,
            ("cls", "config"),
            why="names of layers that are not quantised reach fused linears and language models of other models",
            until="SGLang's Qwen3, Llama and Kimi-K2.5 define packed_modules_mapping",
        ),
        _hook(
            "sglang.srt.models.llama.LlamaForCausalLM.load_weights",
            AROUND,
            quantization.around_llama_load,
            ("self", "weights"),
            why="SGLang drops the scales of a Llama's FP8 blocks and serves with uninitialised ones",
            until="SGLang's Llama loads weight_scale_inv",
        ),
        _hook(
            _DEEPSEEK + "DeepseekV2AttentionMLA.__init__",
            AFTER,
            latent_attention.after_init,
            ("self", "config", "hidden_size"),
            why="both latents' projections are known as parts of SGLang's one linear, whose fused kernel is left out",
            until="SGLang's fused projection goes through quant_method.apply and knows its parts",
        ),
        _hook(
            _LOADER,
            AROUND,
            recording.around_load,
            ("model", "weights", "target_device"),
            why="the base is digested as it is stored, between loading and repacking",
            until="SGLang calls a plugin between the two",
        ),
        OnInstance(
            method=recording.LOAD_WEIGHTS,
            by=name_of(recording.around_load),
            why="there is no other place between loading and repacking",
            until="SGLang calls a plugin between the two",
        ),
        _hook(
            _RUNNER + "load_model",
            AFTER,
            forward.after_load_model,
            ("self",),
            why="puts the slots beside the linears",
            until=SLOTS,
        ),
        OnInstance(
            method=slotted_layer.APPLY,
            by=name_of(AdaptedLayer),
            why="a linear's product gets the adapter of each token's slot",
            until=SLOTS,
        ),
        OnInstance(
            method=slotted_latent.FORWARD,
            by=name_of(AdaptedLatent),
            why="absorbed attention reads kv_b_proj's input from the cache, so it is rotated where it is made",
            until=SLOTS,
        ),
        OnInstance(
            method=slotted_experts.FORWARD,
            by=name_of(AdaptedExpertsInput),
            why="one rotation of all experts turns their input, in front of SGLang's own kernels",
            until=SLOTS,
        ),
        _hook(
            "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
            AFTER,
            forward.after_init_new,
            ("cls", "batch", "model_runner"),
            why="a batch remembers slots and versions, as its requests may move before it has ended",
            until=SLOTS,
        ),
        _hook(
            _RUNNER + "forward",
            AROUND,
            forward.around_forward,
            ("self", "forward_batch"),
            why="a forward pass has its tokens' slots, and its logits their versions",
            until=SLOTS,
        ),
    ]


def _hook(target: str, type: HookType, function, parameters: tuple[str, ...], **reasons: str) -> Hook:
    return Hook(target=target, type=type, function=function, parameters=parameters, **reasons)
