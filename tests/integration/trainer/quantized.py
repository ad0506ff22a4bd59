"""Quantised checkpoints that the trainer's tests share, and transformers on their dequantised weights."""

import dataclasses
import functools
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import safetensors.torch
import torch
from peft import PeftModel
from trainer_support import load_reference
from transformers import PreTrainedModel

from orbit_kernels.formats import Fp8Format, Int4Format, Mxfp4Format, Nvfp4Format, WeightFormat
from orbit_kernels.formats.scheme.write import quantization_config
from orbit_kernels.linears.fusing import GATE_UP, fused_with

FORMATS: dict[str, WeightFormat] = {
    "fp8": Fp8Format(),
    "fp8_ue8m0": Fp8Format(block_rows=32, block_columns=32, scale_dtype="ue8m0"),
    "int4": Int4Format(group_size=32),
    "int4_asymmetric": Int4Format(group_size=16, symmetric=False),
    "nvfp4": Nvfp4Format(),
    "nvfp4_modelopt": Nvfp4Format(style="modelopt"),
    "mxfp4": Mxfp4Format(),
}
_LINEAR_SUFFIXES = ("_proj.weight", "_proj_with_mqa.weight")
QUANTISES_INPUTS = ("fp8", "fp8_ue8m0", "nvfp4", "nvfp4_modelopt")


def weight_format(name: str, dtype: torch.dtype) -> WeightFormat:
    """One of FORMATS for a model of this dtype, which INT4's scales share."""
    found = FORMATS[name]
    return dataclasses.replace(found, scale_dtype=dtype) if isinstance(found, Int4Format) else found


def linears_of(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the linears of the decoder layers."""
    return sorted(name.removesuffix(".weight") for name in tensors if name.endswith(_LINEAR_SUFFIXES))


def quantize(path: Path, stored_as: WeightFormat, folder: Path, ignored: Sequence[str] = ()) -> Path:
    """The checkpoint at ``path`` in another format, all linears but those ignored."""
    shutil.copytree(path, folder)
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    for module in [module for module in linears_of(tensors) if module not in ignored]:
        weight_OI = tensors.pop(f"{module}.weight")
        options = {"largest_input": _largest_input(module)} if isinstance(stored_as, Nvfp4Format) else {}
        for leaf, tensor in stored_as.quantize(weight_OI, **options).items():
            tensors[f"{module}.{leaf}"] = tensor
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    edit_config(folder, quantization_config=_config(stored_as, ignored))
    return folder


def edit_config(folder: Path, **fields) -> None:
    """Set fields of ``config.json``."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def dequantized_reference(
    original: Path, quantized: Path, stored_as: WeightFormat, dtype: torch.dtype, *, deployed: bool = False
) -> PreTrainedModel:
    """transformers' model of the original with the weights that the quantised checkpoint means.

    Args:
        original: checkpoint that was quantised.
        quantized: the result.
        stored_as: format of its linears.
        dtype: of weights and activations.
        deployed: round the linears' inputs as the deployed kernel does, the gradient passing straight through.
    """
    tensors = safetensors.torch.load_file(quantized / "model.safetensors")
    model = load_reference(original, dtype)
    stored = {module: stored_linear(tensors, module) for module in linears_of(model.state_dict())}
    for module, parts in stored.items():
        linear = model.get_submodule(module)
        linear.weight.data.copy_(stored_as.dequantize(parts, dtype))
        if deployed:
            fused = [stored[part] for part in fused_with(module)]
            linear.register_forward_pre_hook(functools.partial(_round_input, stored_as, fused))
    return model


def stored_linear(tensors: Mapping[str, torch.Tensor], module: str) -> dict[str, torch.Tensor]:
    """The stored tensors of one linear by leaf name."""
    prefix = f"{module}."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def with_adapter(model: PreTrainedModel, folder: Path) -> PeftModel:
    """The reference with the adapter that the trainer wrote to ``folder``."""
    return PeftModel.from_pretrained(model, str(folder), is_trainable=True)


def _round_input(stored_as, fused, _module, inputs):
    (x,) = inputs
    flat_TI = x.detach().reshape(-1, x.shape[-1])
    rounded = stored_as.model_input(flat_TI, fused).view(x.shape)
    return x + (rounded - x).detach()


def _largest_input(module: str) -> float:
    """Another one for each part of a fused linear: the kernel's one scale is then of the largest."""
    return {"q_proj": 4.0, "k_proj": 6.0, "v_proj": 5.0, "gate_proj": 5.0, "up_proj": 6.0}.get(
        module.rpartition(".")[2], 8.0
    )


def _config(stored_as: WeightFormat, ignored: Sequence[str]) -> dict:
    if stored_as == FORMATS["nvfp4_modelopt"]:
        ignore = ["lm_head", *ignored]
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ignore}
    return quantization_config(stored_as, ["lm_head", *ignored])


def dequantized_moe_tensors(
    quantized: Path, stored_as: WeightFormat, model: PreTrainedModel
) -> dict[str, torch.Tensor]:
    """transformers' parameters of a mixture, experts fused, with the weights that the quantised checkpoint means."""
    tensors = safetensors.torch.load_file(quantized / "model.safetensors")

    def weight(module: str) -> torch.Tensor:
        stored = stored_linear(tensors, module)
        plain = not f"{module}.weight".endswith(_LINEAR_SUFFIXES)
        return stored["weight"] if plain else stored_as.dequantize(stored, torch.float32)

    def parameter(name: str, held: torch.Tensor) -> torch.Tensor:
        prefix, _, leaf = name.rpartition(".")
        if not prefix.endswith(".experts"):
            return weight(prefix)
        parts = GATE_UP if leaf == "gate_up_proj" else ("down_proj",)
        return torch.stack(
            [torch.cat([weight(f"{prefix}.{expert}.{part}") for part in parts]) for expert in range(len(held))]
        )

    return {name: parameter(name, held) for name, held in model.named_parameters()}
