"""What is held against the checkpoint's headers and scales before a server allocates anything."""

import copy
import logging
from collections.abc import Mapping

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from orbit_kernels.checkpoint import HFCheckpoint
from orbit_kernels.formats import (
    BaseScheme,
    Bf16Format,
    Int4Format,
    Mxfp4Format,
    Nvfp4Format,
    TensorSpec,
    WeightFormat,
)
from orbit_kernels.fusing import GATE_UP, fused_with
from orbit_sglang.quant.scheme import read_scheme

logger = logging.getLogger(__name__)

CHECKED_FAMILIES = ("llama", "qwen3", "qwen3_moe")
TIED_HEAD = "lm_head.weight"
# SGLang converts a plain tensor of any dtype; codes without a scale would become numbers.
PLAIN_DTYPES = (torch.float16, torch.float32, torch.float64)
EXPERTS = ".mlp.experts."
STACKED_EXPERTS = {"gate_up_proj": GATE_UP, "down_proj": ("down_proj",)}


def check_checkpoint(model_path: str, device: str) -> None:
    """Refuse a checkpoint that would be served wrongly.

    Args:
        model_path: a local folder.
        device: where the server computes.

    Raises:
        ValueError: the quantisation is not implemented or not on this device, or tensors are missing, superfluous, of another
            shape or dtype, truncated, or hold impossible scales; all are listed by name. On a GPU also NVFP4 linears that are
            fused into one and differ in their global scale.
    """
    scheme = read_scheme(model_path)
    config = AutoConfig.from_pretrained(model_path)
    if config.model_type not in CHECKED_FAMILIES:
        logger.warning("Tensors of a %s checkpoint are not checked; known are %s", config.model_type, CHECKED_FAMILIES)
        return
    _check_layers(config)
    model = _meta_model(config)
    formats = _quantized_linears(model, scheme)
    _check_device(formats, device)
    checkpoint = HFCheckpoint(model_path)
    checkpoint.check(_expected_tensors(model, formats), optional=frozenset({TIED_HEAD}))
    checkpoint.check_values(formats)
    if device != "cpu":
        _check_global_scales(checkpoint, formats, device)


def _check_layers(config: PretrainedConfig) -> None:
    """SGLang 0.5.12 builds experts in every layer of a Qwen3-MoE (models/qwen3_moe.py:766) and would not load dense ones."""
    if config.model_type != "qwen3_moe":
        return
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        raise ValueError(
            f"mlp_only_layers {config.mlp_only_layers}, decoder_sparse_step {config.decoder_sparse_step}: SGLang puts experts "
            "into every layer; serve a checkpoint without dense layers"
        )


def _meta_model(config: PretrainedConfig) -> PreTrainedModel:
    """The unquantised model with names and shapes but no weights."""
    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(plain)


def _quantized_linears(model: PreTrainedModel, scheme: BaseScheme) -> dict[str, WeightFormat]:
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    linears += [name.removesuffix(".weight") for name in _parameters(model) if EXPERTS in name]
    formats = {name: scheme.common_format(fused_with(name)) for name in linears}
    return {name: weight_format for name, weight_format in formats.items() if not isinstance(weight_format, Bf16Format)}


def _check_device(formats: Mapping[str, WeightFormat], device: str) -> None:
    """Refuse formats that SGLang 0.5.12 has no kernel for, and that only the CPU reference computes with."""
    reference_only = {
        name: weight_format.describe() for name, weight_format in formats.items() if _needs_reference(weight_format)
    }
    if reference_only and device != "cpu":
        name, described = next(iter(reference_only.items()))
        raise ValueError(f"{name}: {described}: SGLang has no kernel for it on {device}; serve it with --device cpu")


def _needs_reference(weight_format: WeightFormat) -> bool:
    return (
        isinstance(weight_format, Mxfp4Format)
        or (isinstance(weight_format, Int4Format) and not weight_format.symmetric)
        or (isinstance(weight_format, Nvfp4Format) and not weight_format.quantized_input)
    )


def _check_global_scales(checkpoint: HFCheckpoint, formats: Mapping[str, WeightFormat], device: str) -> None:
    """Refuse what SGLang 0.5.12 would compute with another weight.

    It multiplies a fused linear by the largest of its parts' global scales (``modelopt_quant.py:1364``,
    ``compressed_tensors_w4a4_nvfp4.py:94``).
    """
    for name, weight_format in formats.items():
        if not isinstance(weight_format, Nvfp4Format):
            continue
        stored = [f"{part}.{weight_format.global_scale_leaf}" for part in fused_with(name)]
        values = [checkpoint.tensor(leaf).item() for leaf in stored]
        if len(set(values)) > 1:
            found = ", ".join(f"{leaf} is {value}" for leaf, value in zip(stored, values, strict=True))
            raise ValueError(
                f"{found}: on {device} SGLang takes one scale for linears that are fused into one; quantise them with the "
                "same, or serve with --device cpu"
            )


def _expected_tensors(model: PreTrainedModel, quantized: Mapping[str, WeightFormat]) -> dict[str, TensorSpec]:
    """Every tensor of the checkpoint by name, a tied head only as the embeddings; plain ones of any width but bytes."""
    expected = {
        name: TensorSpec(tuple(shape), torch.bfloat16, also=PLAIN_DTYPES) for name, shape in _parameters(model).items()
    }
    for name, weight_format in quantized.items():
        weight = expected.pop(f"{name}.weight")
        expected |= {f"{name}.{leaf}": spec for leaf, spec in weight_format.specs(*weight.shape).items()}
    return expected


def _parameters(model: PreTrainedModel) -> dict[str, torch.Size]:
    """Shapes of the parameters by name; experts, which transformers 5 stacks, one by one as a file holds them."""
    shapes = {}
    for name, value in model.named_parameters():
        prefix, _, leaf = name.rpartition(".")
        if not prefix.endswith(EXPERTS.rstrip(".")):
            shapes[name] = value.shape
            continue
        parts = STACKED_EXPERTS[leaf]
        num_experts, rows, columns = value.shape
        for expert in range(num_experts):
            for part in parts:
                shapes[f"{prefix}.{expert}.{part}.weight"] = torch.Size((rows // len(parts), columns))
    return shapes
