"""This module writes the ``quantization_config`` that ``read_base_scheme`` and the deployed servers read."""

from collections.abc import Sequence
from typing import Any

from orbit_kernels.formats.common.weight_format import WeightFormat
from orbit_kernels.formats.fp8 import Fp8Format
from orbit_kernels.formats.int4 import Int4Format
from orbit_kernels.formats.mxfp4 import Mxfp4Format
from orbit_kernels.formats.nvfp4 import Nvfp4Format


def quantization_config(weight_format: WeightFormat, ignored: Sequence[str]) -> dict[str, Any]:
    """Returns the configuration of a model in which all linears but those ignored have one format.

    FP8 is written as DeepSeek and Qwen do; INT4, NVFP4 and MXFP4 are written as compressed-tensors does.

    Args:
        weight_format: of the quantised linears.
        ignored: module names of the other linears.

    Raises:
        ValueError: a format, or a style of one, that is only read.
    """
    if isinstance(weight_format, Fp8Format):
        return _fp8(weight_format, ignored)
    if isinstance(weight_format, Int4Format):
        weights = _arguments("int", "group", weight_format.group_size)
        return _compressed_tensors("pack-quantized", weights | {"symmetric": weight_format.symmetric}, None, ignored)
    if isinstance(weight_format, Mxfp4Format):
        weights = _arguments("float", "group", weight_format.describe()["group_size"])
        return _compressed_tensors("mxfp4-pack-quantized", weights | {"scale_dtype": "torch.uint8"}, None, ignored)
    if isinstance(weight_format, Nvfp4Format) and weight_format.style == "compressed-tensors":
        weights = _arguments("float", "tensor_group", weight_format.describe()["group_size"])
        weights |= {"scale_dtype": "torch.float8_e4m3fn"}
        inputs = weights | {"dynamic": "local"} if weight_format.quantized_input else None
        return _compressed_tensors("nvfp4-pack-quantized", weights, inputs, ignored)
    raise ValueError(f"{weight_format.describe()}: only read, not written; use the compressed-tensors style")


def _fp8(weight_format: Fp8Format, ignored: Sequence[str]) -> dict[str, Any]:
    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(weight_format.block),
        "modules_to_not_convert": list(ignored),
    }
    return config | ({"scale_fmt": "ue8m0"} if weight_format.scale_dtype == "ue8m0" else {})


def _arguments(kind: str, strategy: str, group_size: int) -> dict[str, Any]:
    return {
        "num_bits": 4,
        "type": kind,
        "symmetric": True,
        "strategy": strategy,
        "group_size": group_size,
        "dynamic": False,
    }


def _compressed_tensors(
    file_format: str, weights: dict[str, Any], inputs: dict[str, Any] | None, ignored: Sequence[str]
) -> dict[str, Any]:
    # Seconds that a reader of checkpoints does without: compressed-tensors imports transformers.
    import compressed_tensors
    from compressed_tensors.quantization import QuantizationConfig

    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": file_format}
    config = QuantizationConfig.model_validate(
        {
            "config_groups": {"group_0": group},
            "format": file_format,
            "ignore": list(ignored),
            "quantization_status": "compressed",
        }
    )
    return config.model_dump(mode="json") | {"version": compressed_tensors.__version__}
