"""This module puts FP8 in blocks behind SGLang's ``Fp8LinearMethod``."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from orbit_sglang.base.quantization import SCALE
from orbit_sglang.cpu.stacked_parameter import StackedParameter
from orbit_sglang.startup.enabled import slots_enabled

logger = logging.getLogger(__name__)


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
    """Gives each part scales of its own when a part ends inside a block; runs around ``create_weights``.

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
