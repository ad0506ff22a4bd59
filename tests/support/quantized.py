"""Checkpoints in every low-precision format: how a test makes one, and what its files mean, read without SGLang."""

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Sequence

import safetensors.torch
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from orbit_kernels.checkpoint.files import HFCheckpoint
from orbit_kernels.checkpoint.manifest import BaseManifest, first_difference
from orbit_kernels.formats import Fp8Format, Int4Format, Mxfp4Format, Nvfp4Format, WeightFormat, read_base_scheme
from orbit_kernels.formats.scheme.write import quantization_config
from orbit_kernels.frozen.product import StoredWeight
from tests.support.adapters import LINEAR_WEIGHT

FORMATS: dict[str, WeightFormat] = {
    "fp8": Fp8Format(),
    "fp8_ue8m0": Fp8Format(scale_dtype="ue8m0"),
    "int4": Int4Format(),
    "int4_asymmetric": Int4Format(symmetric=False),
    "nvfp4": Nvfp4Format(),
    "nvfp4_weight_only": Nvfp4Format(quantized_input=False),
    "nvfp4_modelopt": Nvfp4Format(style="modelopt"),
    "mxfp4": Mxfp4Format(),
}
# As a trainer's linears are divided: several blocks or groups in the smallest of them.
DIVISIBLE_FORMATS = {
    **FORMATS,
    "fp8_ue8m0": Fp8Format(block_rows=32, block_columns=32, scale_dtype="ue8m0"),
    "int4_asymmetric": Int4Format(group_size=16, symmetric=False),
}
QUANTISES_INPUTS = ("fp8", "fp8_ue8m0", "nvfp4", "nvfp4_modelopt")
# Another one for each part of a fused linear: a kernel's one scale is then that of the largest.
_LARGEST_INPUT = {
    **{"q_proj": 6.0, "k_proj": 7.0, "v_proj": 8.0, "gate_proj": 5.0, "up_proj": 6.0},
    **{"q_a_proj": 6.0, "kv_a_proj_with_mqa": 7.0},
}


def weight_format(name: str, dtype: torch.dtype) -> WeightFormat:
    """One of DIVISIBLE_FORMATS for a model of this dtype, which INT4's scales share."""
    found = DIVISIBLE_FORMATS[name]
    return dataclasses.replace(found, scale_dtype=dtype) if isinstance(found, Int4Format) else found


def quantize(
    source: pathlib.Path,
    folder: pathlib.Path,
    style: str | WeightFormat,
    *,
    plain: Sequence[str] = (),
    only: str = "",
) -> pathlib.Path:
    """Write a checkpoint again, with its linears quantised that have ``only`` in their name and nothing of ``plain``.

    The parts of a fused linear have NVFP4 scales of their own.

    Args:
        style: a name of FORMATS, or any format.
    """
    shutil.copytree(source, folder)
    stored_as = FORMATS[style] if isinstance(style, str) else style
    checkpoint = HFCheckpoint(source)
    tensors, ignored = {}, {"lm_head"}
    for name in checkpoint.specs:
        match = LINEAR_WEIGHT.fullmatch(name)
        if match is None:
            tensors[name] = checkpoint.tensor(name)
        elif only not in name or any(part in name for part in plain):
            tensors[name] = checkpoint.tensor(name)
            ignored.add(match["module"])
        else:
            stored = quantize_weight(stored_as, match["module"], checkpoint.tensor(name))
            tensors |= {f"{match['module']}.{leaf}": tensor for leaf, tensor in stored.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, quantization_config=_config(stored_as, sorted(ignored)))
    return folder


def quantize_weight(stored_as: WeightFormat, module: str, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
    """The stored tensors of one linear by leaf name."""
    if isinstance(stored_as, Nvfp4Format) and stored_as.quantized_input:
        return stored_as.quantize(weight_OI, largest_input=_LARGEST_INPUT.get(module.rpartition(".")[2], 4.0))
    return stored_as.quantize(weight_OI)


def config_of(folder: pathlib.Path) -> dict:
    """The fields of ``config.json``."""
    return json.loads((folder / "config.json").read_text())


def change_config(folder: pathlib.Path, **fields) -> None:
    """Set fields of ``config.json``."""
    (folder / "config.json").write_text(json.dumps(config_of(folder) | fields))


def empty_model(folder: pathlib.Path, dtype: torch.dtype) -> PreTrainedModel:
    """Transformers' model of a checkpoint's configuration, with weights that mean nothing."""
    fields = config_of(folder)
    fields.pop("quantization_config", None)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=dtype).eval()


def stored_weights(folder: pathlib.Path) -> dict[str, StoredWeight]:
    """The quantised linears of a checkpoint by name."""
    checkpoint = HFCheckpoint(folder)
    scheme = read_base_scheme(config_of(folder))
    weights = {}
    for name, module in empty_model(folder, torch.float32).named_modules():
        weight_format = scheme.format_of(name)
        if isinstance(module, torch.nn.Linear) and weight_format.name != "bf16":
            shape = module.out_features, module.in_features
            weights[name] = StoredWeight(weight_format, *shape, checkpoint.stored_weight(name, weight_format, *shape))
    return weights


def difference_from_files(folder: pathlib.Path, served: BaseManifest) -> str | None:
    """The first difference between a served base and the files of its checkpoint."""
    checkpoint = HFCheckpoint(folder)
    scheme = read_base_scheme(config_of(folder))
    modules = {name.rsplit(".", 1)[0] for name in checkpoint.specs if "_proj." in name or "_proj_with_mqa." in name}
    formats = {module: scheme.format_of(module) for module in modules}
    files = BaseManifest.of(formats, ((name, checkpoint.tensor(name)) for name in checkpoint.specs), served.cuts)
    return first_difference(files, served, ("the files", "the server"))


def _config(stored_as: WeightFormat, ignored: list[str]) -> dict:
    if not (isinstance(stored_as, Nvfp4Format) and stored_as.style == "modelopt"):
        return quantization_config(stored_as, ignored)
    arguments = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    group = {"targets": ["Linear"], "weights": arguments, "input_activations": arguments}
    return {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {"group_0": group}, "ignore": ignored}
