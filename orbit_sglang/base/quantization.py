"""These hooks let SGLang read the quantisation of a checkpoint as it is meant, on every device."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from sglang.srt.layers.quantization.fp8 import Fp8Config

from orbit_sglang.model.naming import packed_modules_mapping, without_language_prefix
from orbit_sglang.startup.enabled import slots_enabled

SCALE = "weight_scale_inv"


def after_fp8_config(result: Fp8Config, cls: type, config: dict[str, Any]) -> Fp8Config:
    """Lets names of ignored layers reach fused linears and those of a language model; runs after ``from_config``."""
    if slots_enabled() and result.ignored_layers:
        result.packed_modules_mapping = packed_modules_mapping(result.packed_modules_mapping)
        result.ignored_layers = without_language_prefix(result.ignored_layers)
    return result


def after_compressed_tensors_config(
    result: CompressedTensorsConfig, cls: type, config: dict[str, Any]
) -> CompressedTensorsConfig:
    """Lets the names in ``ignore`` reach fused linears and those of a language model; runs after ``from_config``."""
    if slots_enabled():
        result.packed_modules_mapping = packed_modules_mapping(result.packed_modules_mapping)
        result.ignore = without_language_prefix(result.ignore)
    return result


def around_llama_load(original: Callable, model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
    """Lets a Llama find the scales of blocks; runs around ``LlamaForCausalLM.load_weights``.

    SGLang 0.5.12 looks every ``weight_scale_inv`` up as ``weight_scale``
    (``srt/models/llama.py::LlamaForCausalLM.load_weights``), the name of per-tensor scales; it then drops those of
    blocks with a warning and serves with uninitialised ones.
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
