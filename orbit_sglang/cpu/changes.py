"""This module lists the changes to SGLang 0.5.12 that only a CPU needs; it is part of ``orbit_sglang.changes``.

They replace what SGLang computes with CUDA, Triton or AMX.
"""

import torch
from sglang.srt.plugins.hook_registry import HookType

from orbit_kernels.upstream.ledger import Change, Device, OnInstance, name_of
from orbit_sglang.base import recording
from orbit_sglang.cpu import (
    compressed_tensors,
    engine,
    experts,
    fp8,
    grammar,
    latent_attention,
    linear,
    loading,
    sampling,
)
from orbit_sglang.upstream.hooks import Attribute, Hook

ENGINE = "CPU: engine, sampling and loading"
BASE = "CPU: the base as it is stored"
ATTENTION = "CPU: latent attention"

AFTER, AROUND, REPLACE = HookType.AFTER, HookType.AROUND, HookType.REPLACE
CPU_KERNELS = "SGLang computes it on a CPU without AMX"
_ENGINE = "sglang.srt.entrypoints.engine.Engine."
_CAPTURER = "sglang.srt.state_capturer."
_LOADER = "sglang.srt.model_loader.loader.DefaultModelLoader.load_weights_and_postprocess"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner."
_QUANTIZATION = "sglang.srt.layers.quantization."
_FP8 = _QUANTIZATION + "fp8."
_COMPRESSED = _QUANTIZATION + "compressed_tensors.compressed_tensors."
_MODELOPT = _QUANTIZATION + "modelopt_quant."
_DEEPSEEK = "sglang.srt.models.deepseek_v2."
_DEEPSEEK_COMMON = "sglang.srt.models.deepseek_common."
_DEEPSEEK_LOADER = _DEEPSEEK_COMMON + "deepseek_weight_loader.DeepseekV2WeightLoaderMixin."
_TOPK = "sglang.srt.layers.moe.topk."


def sections() -> dict[str, list[Change]]:
    """Returns them by what they are for."""
    return {ENGINE: _engine(), BASE: _base(), ATTENTION: _attention()}


def _engine() -> list[Change]:
    pinning = "SGLang asks whether there is an accelerator to pin memory for (is_pin_memory_available)"
    return [
        *(
            Attribute(
                target=target,
                expected=torch,
                value=_TORCH,
                why="SGLang pins memory without an accelerator, which torch refuses",
                until=pinning,
                device=Device.CPU,
            )
            for target in ("sglang.srt.layers.logits_processor.torch", "sglang.srt.state_capturer.base.torch")
        ),
        _hook(
            _CAPTURER + "base.TopkCaptureOutput.copy_to_cpu",
            AFTER,
            engine.after_copy_to_cpu,
            ("self",),
            why="on a CPU the copy is the same memory, which the next forward pass writes over",
            until="SGLang clones there",
        ),
        _hook(
            _ENGINE + "_launch_subprocesses",
            AROUND,
            engine.around_launch,
            ("cls", "server_args"),
            why="SGLang refuses more ranks than NUMA nodes",
            until="SGLang divides the cores of a node between ranks",
        ),
        _hook(
            "sglang.srt.distributed.parallel_state.init_model_parallel_group",
            AROUND,
            engine.around_group,
            ("group_ranks", "local_rank", "backend"),
            why="ranks on CPUs have gloo, and neither NCCL nor a custom all-reduce",
            until="SGLang leaves both out on a CPU",
        ),
        _hook(
            "sglang.srt.layers.sampler.multinomial_with_seed",
            REPLACE,
            sampling.multinomial_with_seed,
            ("logprobs", "seed", "positions"),
            why="SGLang's seeded sampling is a Triton kernel",
            until="SGLang has one in torch",
        ),
        _hook(
            "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask",
            REPLACE,
            grammar.apply_vocab_mask,
            ("self", "logits", "vocab_mask"),
            why="SGLang raises on a CPU, and a request with a regex or a JSON schema ends the server",
            until="SGLang applies the mask on a CPU",
        ),
        _hook(
            _LOADER,
            AROUND,
            loading.around_load,
            ("model", "weights", "target_device"),
            why="quantised linears get the trainer's own product, between loading and repacking",
            until="SGLang calls a plugin between the two",
        ),
        OnInstance(
            method=recording.LOAD_WEIGHTS,
            by=name_of(loading.around_load),
            why="there is no other place between loading and repacking",
            until="SGLang calls a plugin between the two",
            device=Device.CPU,
        ),
        _hook(
            "sglang.srt.configs.update_config.update_intermediate_size",
            AROUND,
            loading.around_width_padding,
            ("model_config", "attr_name", "intermediate_padding_size"),
            why="SGLang pads widths for AMX, and would hold other tensors than the checkpoint has",
            until="SGLang pads only where AMX is used",
        ),
    ]


def _base() -> list[Change]:
    return [
        *_reference(_FP8 + "Fp8Config", _FP8 + "Fp8LinearMethod"),
        _hook(
            _FP8 + "Fp8LinearMethod.create_weights",
            AROUND,
            fp8.around_create_weights,
            ("self", "layer", "input_size_per_partition", "output_partition_sizes"),
            why="parts of a fused linear that end inside a block have scales of their own",
            until="SGLang takes such parts",
        ),
        *_reference(_COMPRESSED + "CompressedTensorsConfig", _COMPRESSED + "CompressedTensorsLinearMethod"),
        _hook(
            _COMPRESSED + "CompressedTensorsConfig._check_scheme_supported",
            AROUND,
            compressed_tensors.around_check_scheme,
            ("self", "min_capability", "error"),
            why="SGLang asks a CUDA device for its compute capability",
            until="SGLang does not ask on a CPU",
        ),
        _hook(
            _COMPRESSED + "CompressedTensorsConfig._get_scheme_from_parts",
            AROUND,
            compressed_tensors.around_scheme,
            ("self", "weight_quant", "input_quant"),
            why="asymmetric INT4, weight-only NVFP4 and MXFP4 have no scheme in SGLang",
            until="SGLang has these schemes",
        ),
        _hook(
            _COMPRESSED + "CompressedTensorsLinearMethod.create_weights",
            AFTER,
            compressed_tensors.after_create_weights,
            ("self", "layer", "input_size_per_partition", "output_partition_sizes"),
            why="DeepseekV2AttentionMLA asks a packed linear for its weight",
            until="SGLang's latent attention asks for the dtype of its activations instead",
        ),
        *_reference(_MODELOPT + "ModelOptFp4Config", _MODELOPT + "ModelOptFp4LinearMethod"),
        _hook(
            "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.__init__",
            AROUND,
            experts.around_layer,
            ("self", "num_experts"),
            why="routed experts are held as they are stored and computed by the trainer's own function",
            until=CPU_KERNELS,
        ),
        _hook(
            _RUNNER + "check_quantized_moe_compatibility",
            AROUND,
            experts.around_block_check,
            ("self",),
            why="SGLang asks for whole FP8 blocks, the reference takes ragged ones",
            until=CPU_KERNELS,
        ),
        _hook(
            _TOPK + "fused_topk",
            AROUND,
            experts.around_topk,
            ("hidden_states", "gating_output", "topk"),
            why="without AMX it is a CUDA kernel",
            until=CPU_KERNELS,
        ),
        _hook(
            _TOPK + "biased_grouped_topk",
            AROUND,
            experts.around_biased_topk,
            ("hidden_states", "gating_output", "correction_bias", "topk"),
            why="without AMX it is compiled, and its scores have the dtype of the logits instead of fp32",
            until=CPU_KERNELS,
        ),
    ]


def _attention() -> list[Change]:
    return [
        _hook(
            _DEEPSEEK + "DeepseekV2AttentionMLA.__init__",
            AFTER,
            latent_attention.after_init,
            ("self", "config", "hidden_size"),
            why="quantised projections of the latents have room for scales of each",
            until="SGLang's fused projection knows its parts",
        ),
        _hook(
            _DEEPSEEK_COMMON + "attention_backend_handler.AttentionBackendRegistry.get_handler",
            AROUND,
            latent_attention.around_handler,
            ("cls", "backend_name"),
            why="prompts are absorbed too, where SGLang would choose a path of Triton's",
            until=CPU_KERNELS,
        ),
        _hook(
            _DEEPSEEK + "get_rope_wrapper",
            AROUND,
            latent_attention.around_rope,
            ("head_size", "rotary_dim", "max_position", "base", "is_neox_style", "rope_scaling"),
            why="on a CPU it knows nothing but YaRN",
            until="SGLang takes an unscaled rotary embedding there",
        ),
        _hook(
            _DEEPSEEK_LOADER + "do_load_weights",
            AROUND,
            latent_attention.around_load,
            ("self", "weights", "is_nextn"),
            why="SGLang takes the first of two scalars for both latents",
            until="SGLang concatenates scalars",
        ),
        _hook(
            _DEEPSEEK_LOADER + "post_load_weights",
            AROUND,
            latent_attention.around_absorb,
            ("self", "is_nextn"),
            why="SGLang would quantise the absorbed weight once more",
            until=CPU_KERNELS,
        ),
    ]


_TORCH = engine.TorchWithoutPinning("torch")


def _reference(config: str, method: str) -> list[Change]:
    """Returns what puts the trainer's own product behind one of SGLang's quantisations."""
    layer = ("self", "layer")
    return [
        _hook(
            config + ".get_supported_act_dtypes",
            AFTER,
            linear.after_supported_act_dtypes,
            ("cls",),
            why="the reference takes fp32 activations too, in which rounding is visible",
            until=CPU_KERNELS,
        ),
        _hook(
            method + ".process_weights_after_loading",
            AROUND,
            linear.around_process_weights,
            layer,
            why="the reference reads the tensors as they are stored, nothing is repacked",
            until=CPU_KERNELS,
        ),
        _hook(
            method + ".apply",
            AROUND,
            linear.around_apply,
            (*layer, "x", "bias"),
            why="SGLang has no kernel for it on a CPU; the trainer's own product computes it",
            until=CPU_KERNELS,
        ),
    ]


def _hook(target: str, type: HookType, function, parameters: tuple[str, ...], **reasons: str) -> Hook:
    return Hook(target=target, type=type, function=function, parameters=parameters, device=Device.CPU, **reasons)
