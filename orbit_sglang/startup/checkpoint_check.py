"""This module checks the checkpoint's headers and scales before a server allocates anything."""

import copy
import logging
from collections.abc import Mapping
from typing import Any

import torch
from sglang.srt.utils import cpu_has_amx_support
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config, PretrainedConfig, PreTrainedModel

from orbit_kernels.checkpoint.files import HFCheckpoint
from orbit_kernels.families import FAMILIES, family_of
from orbit_kernels.formats import (
    BaseScheme,
    Bf16Format,
    Fp8Format,
    Int4Format,
    Mxfp4Format,
    Nvfp4Format,
    TensorSpec,
    WeightFormat,
)
from orbit_kernels.linears.fusing import GATE_UP, LATENTS, fused_with
from orbit_kernels.linears.names import EXPERTS, ROUTER_BIAS, unused_tensors
from orbit_sglang.startup.scheme import language_config, language_prefix, read_config, read_scheme

logger = logging.getLogger(__name__)

# SGLang converts a plain tensor of any dtype; codes without a scale would become numbers.
PLAIN_DTYPES = (torch.float16, torch.float32, torch.float64)
ABSORBED_BLOCK = (128, 128)
NVFP4_CAPABILITY = (10, 0)
STACKED_EXPERTS = {"gate_up_proj": GATE_UP, "down_proj": ("down_proj",)}


def check_checkpoint(model_path: str, device: str) -> None:
    """Refuses a checkpoint that would be served wrongly.

    Args:
        model_path: a local folder.
        device: where the server computes.

    Raises:
        ValueError: the quantisation is not implemented or not on this device, or tensors are missing, superfluous, of
            another shape or dtype, truncated, or hold impossible scales; all are listed by name. On a GPU also NVFP4
            linears that are fused into one and differ in their global scale.
    """
    scheme = read_scheme(model_path)
    fields = read_config(model_path)
    _check_attention(fields)
    if family_of(fields.get("model_type")) is None:
        known = [model_type for family in FAMILIES for model_type in family.model_types]
        logger.warning("Tensors of a %s checkpoint are not checked; known are %s", fields.get("model_type"), known)
        return
    config = _language_config(model_path, fields)
    _check_layers(config)
    if device == "cpu":
        _check_cpu(config)
    model, prefix = _meta_model(config), language_prefix(model_path)
    formats = _quantized_linears(model, prefix, scheme)
    _check_device(formats, device)
    checkpoint = HFCheckpoint(model_path)
    num_layers = config.num_hidden_layers if _has_latents(config.model_type) else None
    unused = unused_tensors(checkpoint.specs, prefix=prefix, num_layers=num_layers, tied_head=True)
    checkpoint.check(_expected_tensors(model, prefix, formats), optional=unused)
    checkpoint.check_values(formats)
    if device != "cpu":
        if torch.cuda.is_available():
            _check_capability(formats, torch.cuda.get_device_capability())
        _check_latents(formats, device)
        _check_global_scales(checkpoint, formats, device)


def _check_attention(fields: Mapping[str, Any]) -> None:
    """Refuses attention over chosen tokens.

    Its indexer reads latents that have an adapter's rotation, and was not compared.
    """
    text = language_config(fields)
    if text.get("index_topk") is not None:
        raise ValueError(
            f"index_topk {text['index_topk']}: sparse attention (DeepSeek-V3.2) is not served with slots; serve DeepSeek-V3 "
            "or Kimi-K2, or start without --enable-orbit-slots"
        )


def _language_config(model_path: str, fields: Mapping[str, Any]) -> PretrainedConfig:
    """Returns transformers' configuration of the language model; it knows Kimi-K2 as DeepSeek-V3.

    Raises:
        ValueError: SGLang would compute another router than the published one, or fail to build any.
    """
    text = language_config(fields)
    if not _has_latents(text["model_type"]):
        return AutoConfig.from_pretrained(model_path)
    for field, published in family_of(text["model_type"]).published.items():
        if text.get(field) != published:
            raise ValueError(
                f"config.json: {field} is {text.get(field)!r}, must be {published!r}: SGLang's router and layers of a "
                f"{text['model_type']} are made for that; correct the file if the checkpoint is one"
            )
    return DeepseekV3Config(**{field: value for field, value in text.items() if field != "model_type"})


def _has_latents(model_type: str) -> bool:
    family = family_of(model_type)
    return family is not None and family.latent is not None


def _check_layers(config: PretrainedConfig) -> None:
    """Refuses a Qwen3-MoE with dense layers, which SGLang 0.5.12 would not load.

    It builds experts in all of them (``srt/models/qwen3_moe.py::"self.is_layer_sparse = True"``).
    """
    if config.model_type != "qwen3_moe":
        return
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        raise ValueError(
            f"mlp_only_layers {config.mlp_only_layers}, decoder_sparse_step {config.decoder_sparse_step}: SGLang puts experts "
            "into every layer; serve a checkpoint without dense layers"
        )


def _check_cpu(config: PretrainedConfig) -> None:
    """Refuses SGLang's operators for AMX, which read the weights of shared experts past their ``apply``.

    They are called in ``srt/models/deepseek_v2.py::DeepseekV2MoE.forward_cpu``.
    """
    if _has_latents(config.model_type) and cpu_has_amx_support():
        raise ValueError(
            f"--device cpu: SGLang's CPU kernels (sgl-kernel) would compute a {config.model_type} past the adapters of its "
            "shared experts; serve where they are not installed, or on a GPU"
        )


def _meta_model(config: PretrainedConfig) -> PreTrainedModel:
    """Returns the unquantised model with names and shapes but no weights."""
    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(plain)


def _quantized_linears(model: PreTrainedModel, prefix: str, scheme: BaseScheme) -> dict[str, WeightFormat]:
    linears = [prefix + name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    linears += [name.removesuffix(".weight") for name in _tensors(model, prefix) if EXPERTS in name]
    known = set(linears)
    formats = {name: scheme.common_format([part for part in fused_with(name) if part in known]) for name in linears}
    return {name: weight_format for name, weight_format in formats.items() if not isinstance(weight_format, Bf16Format)}


def _check_device(formats: Mapping[str, WeightFormat], device: str) -> None:
    """Refuses formats that SGLang 0.5.12 has no kernel for, and that only the CPU reference computes with."""
    reference_only = {
        name: weight_format.describe() for name, weight_format in formats.items() if _needs_reference(weight_format)
    }
    if reference_only and device != "cpu":
        name, described = next(iter(reference_only.items()))
        raise ValueError(f"{name}: {described}: SGLang has no kernel for it on {device}; serve it with --device cpu")


def _check_capability(formats: Mapping[str, WeightFormat], capability: tuple[int, int]) -> None:
    """Refuses what SGLang's own checks find on older GPUs only once a scheduler loads the model.

    They ask for 10.0 for NVFP4 (``modelopt_quant.py::ModelOptFp4Config.get_min_capability``,
    ``compressed_tensors_w4a4_nvfp4.py::CompressedTensorsW4A4Fp4.get_min_capability``).
    """
    name = next((name for name, weight_format in formats.items() if isinstance(weight_format, Nvfp4Format)), None)
    if name is not None and capability < NVFP4_CAPABILITY:
        raise ValueError(
            f"{name}: NVFP4 on a GPU of compute capability {capability[0]}.{capability[1]}: SGLang's kernels need "
            f"{NVFP4_CAPABILITY[0]}.{NVFP4_CAPABILITY[1]} (Blackwell); serve the FP8 or INT4 checkpoint there"
        )


def _needs_reference(weight_format: WeightFormat) -> bool:
    return (
        isinstance(weight_format, Mxfp4Format)
        or (isinstance(weight_format, Int4Format) and not weight_format.symmetric)
        or (isinstance(weight_format, Nvfp4Format) and not weight_format.quantized_input)
    )


def _check_global_scales(checkpoint: HFCheckpoint, formats: Mapping[str, WeightFormat], device: str) -> None:
    """Refuses what SGLang 0.5.12 would compute with another weight.

    It multiplies a fused linear by the largest of its parts' global scales
    (``modelopt_quant.py::ModelOptFp4LinearMethod.process_weights_after_loading``,
    ``compressed_tensors_w4a4_nvfp4.py::CompressedTensorsW4A4Fp4.process_weights_after_loading``).
    """
    for name, weight_format in formats.items():
        if not isinstance(weight_format, Nvfp4Format):
            continue
        stored = [f"{part}.{weight_format.global_scale_leaf}" for part in fused_with(name) if part in formats]
        values = [checkpoint.tensor(leaf).item() for leaf in stored]
        if len(set(values)) > 1:
            found = ", ".join(f"{leaf} is {value}" for leaf, value in zip(stored, values, strict=True))
            raise ValueError(
                f"{found}: on {device} SGLang takes one scale for linears that are fused into one; quantise them with the "
                "same, or serve with --device cpu"
            )


def _check_latents(formats: Mapping[str, WeightFormat], device: str) -> None:
    """Refuses what SGLang 0.5.12 has no code for on a GPU.

    It absorbs ``kv_b_proj`` if that is plain or FP8, and fuses the projections of the latents if these have a
    ``weight``. FP8 of other blocks than 128x128 it would quantise once more, by tensor. The code is
    ``deepseek_weight_loader.py::DeepseekV2WeightLoaderMixin.post_load_weights`` and
    ``srt/models/deepseek_v2.py::DeepseekV2AttentionMLA.__init__``.
    """
    for name, weight_format in formats.items():
        leaf = name.rsplit(".", 1)[-1]
        fp8 = isinstance(weight_format, Fp8Format)
        absorbed = fp8 and (weight_format.block_rows, weight_format.block_columns) == ABSORBED_BLOCK
        fused = "weight" in weight_format.specs(*ABSORBED_BLOCK)
        if (leaf == "kv_b_proj" and not absorbed) or (leaf in LATENTS and not fused):
            raise ValueError(
                f"{name}: {weight_format.describe()}: SGLang's latent attention has no place for it on {device}; leave "
                "attention unquantised or in FP8 of 128x128 blocks, as published checkpoints do, or serve with --device cpu"
            )


def _expected_tensors(
    model: PreTrainedModel, prefix: str, quantized: Mapping[str, WeightFormat]
) -> dict[str, TensorSpec]:
    """Returns every tensor of the checkpoint by name.

    A tied head is there only as the embeddings; plain tensors may be of any width but bytes.
    """
    expected = {
        name: TensorSpec(tuple(shape), torch.bfloat16, also=PLAIN_DTYPES)
        for name, shape in _tensors(model, prefix).items()
    }
    for name, weight_format in quantized.items():
        weight = expected.pop(f"{name}.weight")
        expected |= {f"{name}.{leaf}": spec for leaf, spec in weight_format.specs(*weight.shape).items()}
    return expected


def _tensors(model: PreTrainedModel, prefix: str) -> dict[str, torch.Size]:
    """Returns the shapes of the tensors by name.

    Experts, which transformers 5 stacks, come one by one as a file holds them.
    """
    biases = {name: value.shape for name, value in model.named_buffers() if name.endswith(ROUTER_BIAS)}
    shapes = {prefix + name: shape for name, shape in biases.items()}
    for name, value in model.named_parameters():
        module, _, leaf = name.rpartition(".")
        if not module.endswith(EXPERTS.rstrip(".")):
            shapes[prefix + name] = value.shape
            continue
        parts = STACKED_EXPERTS[leaf]
        num_experts, rows, columns = value.shape
        for expert in range(num_experts):
            for part in parts:
                shapes[f"{prefix}{module}.{expert}.{part}.weight"] = torch.Size((rows // len(parts), columns))
    return shapes
