"""This module reads ``quant_method: fp8``: block-scaled E4M3, as DeepSeek-V3 and Qwen3-FP8 write it."""

from collections.abc import Mapping
from typing import Any

import torch

from orbit_kernels.formats.fp8 import Fp8Format
from orbit_kernels.formats.scheme.fields import Rules, path_pattern, refuse_unknown, require

_WHERE = "quantization_config (fp8)"
_SKIPPED = ("modules_to_not_convert", "ignored_layers")
_KNOWN = {"quant_method", "fmt", "activation_scheme", "weight_block_size", "scale_fmt", *_SKIPPED}


def read(config: Mapping[str, Any], dense_dtype: torch.dtype) -> Rules:
    """Returns the rules of an FP8 configuration; every linear outside ``modules_to_not_convert`` is quantised.

    Raises:
        ValueError: per-tensor or static scales, another encoding than E4M3, or an unknown field.
    """
    refuse_unknown(_WHERE, config, _KNOWN)
    require(_WHERE, config, "fmt", "e4m3", None)
    require(_WHERE, config, "activation_scheme", "dynamic")
    scale_dtype = require(_WHERE, config, "scale_fmt", "ue8m0", "float", None)
    block = config.get("weight_block_size")
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(isinstance(size, int) for size in block):
        raise ValueError(f"{_WHERE}: weight_block_size is {block!r}; only blocks are implemented, e.g. [128, 128]")
    weight_format = Fp8Format(
        block_rows=block[0],
        block_columns=block[1],
        scale_dtype="ue8m0" if scale_dtype == "ue8m0" else "float32",
    )
    skipped = [name for key in _SKIPPED for name in config.get(key) or ()]
    return Rules(formats=((".*", weight_format),), ignored=tuple(path_pattern(name) for name in skipped))
