"""FP8 in blocks behind SGLang's ``Fp8LinearMethod``."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.plugins.hook_registry import HookType

from orbit_sglang.hooks import Hook
from orbit_sglang.naming import packed_modules_mapping, without_language_prefix
from orbit_sglang.quant import linear
from orbit_sglang.quant.parameter import StackedParameter

logger = logging.getLogger(__name__)

_FP8 = "sglang.srt.layers.quantization.fp8."
SCALE = "weight_scale_inv"


def hook_table() -> list[Hook]:
    """The hooks of this family."""
    method = _FP8 + "Fp8LinearMethod."
    return [
        Hook(_FP8 + "Fp8Config.from_config", HookType.AFTER, after_from_config, ("cls", "config")),
        Hook(
            _FP8 + "Fp8Config.get_supported_act_dtypes",
            HookType.AFTER,
            linear.after_supported_act_dtypes,
            ("cls",),
            cpu_only=True,
        ),
        Hook(
            method + "create_weights",
            HookType.AROUND,
            around_create_weights,
            ("self", "layer", "input_size_per_partition", "output_partition_sizes"),
            cpu_only=True,
        ),
        *linear.method_hooks(method),
        Hook(
            "sglang.srt.models.llama.LlamaForCausalLM.load_weights",
            HookType.AROUND,
            around_llama_load,
            ("self", "weights"),
        ),
    ]


def after_from_config(result: Fp8Config, cls: type, config: dict[str, Any]) -> Fp8Config:
    """After ``from_config``: let the names of ignored layers reach the fused linears, and those of a language model."""
    if linear.slots_enabled() and result.ignored_layers:
        result.packed_modules_mapping = packed_modules_mapping(result.packed_modules_mapping)
        result.ignored_layers = without_language_prefix(result.ignored_layers)
    return result


def around_create_weights(
    original: Callable,
    method: Any,
    layer: torch.nn.Module,
    input_size_per_partition: int,
    output_partition_sizes: Sequence[int],
    *args: Any,
    weight_loader: Callable,
    **kwargs: Any,
) -> None:
    """Around ``create_weights``: give each part scales of its own when a part ends inside a block.

    SGLang refuses such parts, because its kernels read one grid of scales for the fused weight.
    """
    positional = (method, layer, input_size_per_partition, output_partition_sizes, *args)
    kwargs["weight_loader"] = weight_loader
    block = method.quant_config.weight_block_size
    ragged = block and len(output_partition_sizes) > 1 and any(rows % block[0] for rows in output_partition_sizes)
    if not (ragged and linear.slots_enabled()):
        original(*positional, **kwargs)
        return
    logger.warning(
        "Fused parts of %s rows: SGLang's CUDA kernels refuse parts that end inside a block of %s rows",
        list(output_partition_sizes),
        block[0],
    )
    original(*positional, **{**kwargs, "skip_block_quant_check": True})
    part_rows = [-(-rows // block[0]) for rows in output_partition_sizes]
    stacked = layer.weight_scale_inv.new_empty(sum(part_rows), layer.weight_scale_inv.shape[1])
    layer.register_parameter(SCALE, StackedParameter(data=stacked, part_rows=part_rows, weight_loader=weight_loader))


def around_llama_load(original: Callable, model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
    """Around ``LlamaForCausalLM.load_weights``: let it find the scales of blocks.

    SGLang 0.5.12 looks every ``weight_scale_inv`` up as ``weight_scale`` (``models/llama.py:630``), the name of per-tensor
    scales; it then drops those of blocks with a warning and serves with uninitialised ones.
    """
    if not linear.slots_enabled():
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
