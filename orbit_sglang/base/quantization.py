"""What lets SGLang read the quantisation of a checkpoint as it is meant, on every device."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.plugins.hook_registry import HookType

from orbit_sglang.model.naming import packed_modules_mapping, without_language_prefix
from orbit_sglang.startup.enabled import slots_enabled
from orbit_sglang.upstream.hooks import Hook

SCALE = "weight_scale_inv"
_QUANTIZATION = "sglang.srt.layers.quantization."


def hook_table() -> list[Hook]:
    """The hooks on the configurations and on one model's loader."""
    return [
        Hook(_QUANTIZATION + "fp8.Fp8Config.from_config", HookType.AFTER, after_fp8_config, ("cls", "config")),
        Hook(
            _QUANTIZATION + "compressed_tensors.compressed_tensors.CompressedTensorsConfig.from_config",
            HookType.AFTER,
            after_compressed_tensors_config,
            ("cls", "config"),
        ),
        Hook(
            "sglang.srt.models.llama.LlamaForCausalLM.load_weights",
            HookType.AROUND,
            around_llama_load,
            ("self", "weights"),
        ),
    ]


def after_fp8_config(result: Fp8Config, cls: type, config: dict[str, Any]) -> Fp8Config:
    """After ``from_config``: let the names of ignored layers reach the fused linears, and those of a language model."""
    if slots_enabled() and result.ignored_layers:
        result.packed_modules_mapping = packed_modules_mapping(result.packed_modules_mapping)
        result.ignored_layers = without_language_prefix(result.ignored_layers)
    return result


def after_compressed_tensors_config(
    result: CompressedTensorsConfig, cls: type, config: dict[str, Any]
) -> CompressedTensorsConfig:
    """After ``from_config``: let the names in ``ignore`` reach the fused linears, and those of a language model."""
    if slots_enabled():
        result.packed_modules_mapping = packed_modules_mapping(result.packed_modules_mapping)
        result.ignore = without_language_prefix(result.ignore)
    return result


def around_llama_load(original: Callable, model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
    """Around ``LlamaForCausalLM.load_weights``: let it find the scales of blocks.

    SGLang 0.5.12 looks every ``weight_scale_inv`` up as ``weight_scale`` (``models/llama.py:630``), the name of per-tensor
    scales; it then drops those of blocks with a warning and serves with uninitialised ones.
    """
    if not slots_enabled():
        return original(model, weights)
    layers = [module for module in model.modules() if SCALE in dict(module.named_parameters(recurse=False))]
    for layer in layers:
        _rename(layer, SCALE, "weight_scale")
    try:
        return original(model, weights)
    finally:
        for layer in layers:
            _rename(layer, "weight_scale", SCALE)


def _rename(layer: torch.nn.Module, old: str, new: str) -> None:
    parameter = getattr(layer, old)
    delattr(layer, old)
    layer.register_parameter(new, parameter)
