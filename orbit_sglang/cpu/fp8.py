"""FP8 in blocks behind SGLang's ``Fp8LinearMethod``."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType

from orbit_sglang.base.quantization import SCALE
from orbit_sglang.cpu import linear
from orbit_sglang.cpu.stacked_parameter import StackedParameter
from orbit_sglang.startup.enabled import slots_enabled
from orbit_sglang.upstream.hooks import Hook

logger = logging.getLogger(__name__)

_FP8 = "sglang.srt.layers.quantization.fp8."


def hook_table() -> list[Hook]:
    """The hooks of this family."""
    method = _FP8 + "Fp8LinearMethod."
    return [
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
    ]


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
    if not (ragged and slots_enabled()):
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
