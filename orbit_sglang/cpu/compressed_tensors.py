"""This module puts compressed-tensors behind SGLang's ``CompressedTensorsLinearMethod``: INT4, NVFP4 and MXFP4.

SGLang chooses a scheme per linear. Those that it does not have in 0.5.12 are added for a CPU: asymmetric INT4, NVFP4
with unquantised inputs, and MXFP4.
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

from orbit_kernels.formats import Mxfp4Format
from orbit_kernels.formats.common.weight_format import as_dtype
from orbit_sglang.startup.enabled import slots_enabled


class Mxfp4Scheme(CompressedTensorsLinearScheme):
    """A ``Mxfp4Scheme`` has the parameters of ``mxfp4-pack-quantized``.

    A byte holds two E2M1 values, and each 32 of them have a UE8M0 scale.
    """

    def create_weights(
        self,
        layer: torch.nn.Module,
        output_partition_sizes: Sequence[int],
        input_size_per_partition: int,
        weight_loader: Callable,
        **_sizes: Any,
    ) -> None:
        """Registers the format's tensors of all parts, stacked by rows."""
        specs = Mxfp4Format().specs(sum(output_partition_sizes), input_size_per_partition)
        for leaf, kind in {"weight_packed": ModelWeightParameter, "weight_scale": GroupQuantScaleParameter}.items():
            data = torch.empty(specs[leaf].shape, dtype=specs[leaf].dtype)
            parameter = kind(data=data, input_dim=1, output_dim=0, weight_loader=_bitwise(weight_loader))
            layer.register_parameter(leaf, parameter)

    @classmethod
    def get_min_capability(cls) -> int:
        """Returns 0; a CPU, the only device that the reference serves, is not asked for it."""
        return 0

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Does nothing, as there is nothing to repack."""

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Returns ``x W^T`` as the reference, the only implementation, computes it."""
        return layer.orbit_reference(x, bias)


def _bitwise(weight_loader: Callable) -> Callable:
    """Returns a loader of bytes that files may also declare as ``float8_e8m0fnu`` or ``int8``."""

    def load(parameter: torch.nn.Parameter, loaded_weight: torch.Tensor, *shard: Any) -> None:
        weight_loader(parameter, as_dtype(loaded_weight, parameter.dtype), *shard)

    return load


class WeightOnlyNvfp4Scheme(CompressedTensorsW4A4Fp4):
    """A ``WeightOnlyNvfp4Scheme`` has the parameters of ``nvfp4-pack-quantized`` without scales of the input."""

    def create_weights(self, layer: torch.nn.Module, **sizes: Any) -> None:
        """Registers what SGLang registers, but for ``input_global_scale``."""
        super().create_weights(layer, **sizes)
        del layer.input_global_scale


def after_create_weights(result: None, method: Any, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    """Also calls a packed weight ``weight``, as SGLang itself does for MLPs; runs after ``create_weights``.

    ``DeepseekV2AttentionMLA`` asks for the dtype of that
    (``srt/models/deepseek_v2.py::"fused_qkv_a_proj_with_mqa.weight.dtype"``).
    """
    if slots_enabled() and hasattr(layer, "weight_packed"):
        layer.weight = layer.weight_packed


def around_check_scheme(original: Callable, config: CompressedTensorsConfig, min_capability: int, error: bool = True):
    """Accepts every scheme; runs around ``_check_scheme_supported``.

    That asks for the compute capability of a CUDA device.
    """
    return slots_enabled() or original(config, min_capability, error)


def around_scheme(
    original: Callable,
    config: CompressedTensorsConfig,
    weight_quant: QuantizationArgs,
    input_quant: QuantizationArgs | None,
) -> CompressedTensorsLinearScheme:
    """Chooses the schemes that SGLang does not have; runs around ``_get_scheme_from_parts``."""
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
