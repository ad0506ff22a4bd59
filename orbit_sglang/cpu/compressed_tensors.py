"""compressed-tensors behind SGLang's ``CompressedTensorsLinearMethod``: INT4, NVFP4 and MXFP4.

SGLang chooses a scheme per linear. Those that it does not have in 0.5.12 are added for a CPU: asymmetric INT4, NVFP4 with
unquantised inputs, and MXFP4.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from compressed_tensors import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs
from sglang.srt.layers.parameter import GroupQuantScaleParameter, ModelWeightParameter
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from sglang.srt.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsLinearScheme,
    CompressedTensorsW4A4Fp4,
    CompressedTensorsWNA16,
)
from sglang.srt.plugins.hook_registry import HookType

from orbit_kernels.formats import Mxfp4Format
from orbit_kernels.formats.common.weight_format import as_dtype
from orbit_sglang.cpu import linear
from orbit_sglang.startup.enabled import slots_enabled
from orbit_sglang.upstream.hooks import Hook

_PACKAGE = "sglang.srt.layers.quantization.compressed_tensors.compressed_tensors."
_CONFIG = _PACKAGE + "CompressedTensorsConfig."


def hook_table() -> list[Hook]:
    """The hooks of this family."""
    method = _PACKAGE + "CompressedTensorsLinearMethod."
    after, around = HookType.AFTER, HookType.AROUND
    return [
        Hook(
            _CONFIG + "get_supported_act_dtypes",
            after,
            linear.after_supported_act_dtypes,
            ("cls",),
            cpu_only=True,
        ),
        Hook(
            _CONFIG + "_check_scheme_supported",
            around,
            around_check_scheme,
            ("self", "min_capability", "error"),
            cpu_only=True,
        ),
        Hook(
            _CONFIG + "_get_scheme_from_parts",
            around,
            around_scheme,
            ("self", "weight_quant", "input_quant"),
            cpu_only=True,
        ),
        Hook(
            method + "create_weights",
            after,
            after_create_weights,
            ("self", "layer", "input_size_per_partition", "output_partition_sizes"),
            cpu_only=True,
        ),
        *linear.method_hooks(method),
    ]


class Mxfp4Scheme(CompressedTensorsLinearScheme):
    """Parameters of ``mxfp4-pack-quantized``: two E2M1 values a byte, and a UE8M0 scale for each 32 of them."""

    def create_weights(
        self,
        layer: torch.nn.Module,
        output_partition_sizes: Sequence[int],
        input_size_per_partition: int,
        weight_loader: Callable,
        **_sizes: Any,
    ) -> None:
        """Register the format's tensors of all parts, stacked by rows."""
        specs = Mxfp4Format().specs(sum(output_partition_sizes), input_size_per_partition)
        for leaf, kind in {"weight_packed": ModelWeightParameter, "weight_scale": GroupQuantScaleParameter}.items():
            data = torch.empty(specs[leaf].shape, dtype=specs[leaf].dtype)
            parameter = kind(data=data, input_dim=1, output_dim=0, weight_loader=_bitwise(weight_loader))
            layer.register_parameter(leaf, parameter)

    @classmethod
    def get_min_capability(cls) -> int:
        """Not asked of a CPU, the only device that the reference serves."""
        return 0

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing to repack."""

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x W^T`` by the reference, the only implementation."""
        return layer.orbit_reference(x, bias)


def _bitwise(weight_loader: Callable) -> Callable:
    """A loader of bytes that files may also declare as ``float8_e8m0fnu`` or ``int8``."""

    def load(parameter: torch.nn.Parameter, loaded_weight: torch.Tensor, *shard: Any) -> None:
        weight_loader(parameter, as_dtype(loaded_weight, parameter.dtype), *shard)

    return load


class WeightOnlyNvfp4Scheme(CompressedTensorsW4A4Fp4):
    """Parameters of ``nvfp4-pack-quantized`` without scales of the input."""

    def create_weights(self, layer: torch.nn.Module, **sizes: Any) -> None:
        """Register what SGLang registers, but for ``input_global_scale``."""
        super().create_weights(layer, **sizes)
        del layer.input_global_scale


def after_create_weights(result: None, method: Any, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    """After ``create_weights``: a packed weight is also called ``weight``, as SGLang itself does for MLPs.

    ``DeepseekV2AttentionMLA`` asks for the dtype of that (``models/deepseek_v2.py:1536`` of SGLang 0.5.12).
    """
    if slots_enabled() and hasattr(layer, "weight_packed"):
        layer.weight = layer.weight_packed


def around_check_scheme(original: Callable, config: CompressedTensorsConfig, min_capability: int, error: bool = True):
    """Around ``_check_scheme_supported``: it asks for the compute capability of a CUDA device."""
    return slots_enabled() or original(config, min_capability, error)


def around_scheme(
    original: Callable,
    config: CompressedTensorsConfig,
    weight_quant: QuantizationArgs,
    input_quant: QuantizationArgs | None,
) -> CompressedTensorsLinearScheme:
    """Around ``_get_scheme_from_parts``: the schemes that SGLang does not have."""
    if not slots_enabled():
        return original(config, weight_quant, input_quant)
    if config.quant_format == CompressionFormat.mxfp4_pack_quantized.value:
        return Mxfp4Scheme()
    if config.quant_format == CompressionFormat.nvfp4_pack_quantized.value and input_quant is None:
        return WeightOnlyNvfp4Scheme()
    if config.quant_format == CompressionFormat.pack_quantized.value and not weight_quant.symmetric:
        return CompressedTensorsWNA16(
            strategy=weight_quant.strategy,
            num_bits=weight_quant.num_bits,
            group_size=weight_quant.group_size,
            symmetric=False,
            actorder=weight_quant.actorder,
        )
    return original(config, weight_quant, input_quant)
