"""The tiny checkpoints in every low-precision format, and transformers' model on their dequantised weights."""

import json
import pathlib
import re
import shutil
import tempfile

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from orbit_kernels.adapters import AdapterMethod
from orbit_kernels.adapters.config import AdapterConfig, split_name, tensor_name
from orbit_kernels.checkpoint.files import HFCheckpoint
from orbit_kernels.checkpoint.manifest import BaseManifest, first_difference
from orbit_kernels.contract.payload import Adapter
from orbit_kernels.formats import Fp8Format, Int4Format, Mxfp4Format, Nvfp4Format, WeightFormat, read_base_scheme
from orbit_kernels.formats.scheme.write import quantization_config
from orbit_kernels.frozen.product import StoredWeight
from orbit_kernels.linears.fusing import fused_with

STYLES: dict[str, WeightFormat] = {
    "fp8": Fp8Format(),
    "fp8_ue8m0": Fp8Format(scale_dtype="ue8m0"),
    "int4": Int4Format(),
    "int4_asymmetric": Int4Format(symmetric=False),
    "nvfp4": Nvfp4Format(),
    "nvfp4_weight_only": Nvfp4Format(quantized_input=False),
    "nvfp4_modelopt": Nvfp4Format(style="modelopt"),
    "mxfp4": Mxfp4Format(),
}
_LINEAR = re.compile(r"(?P<module>(language_model\.)?model\.layers\.\d+\..*_proj(_with_mqa)?)\.weight")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_LARGEST_INPUT = {
    **{"q_proj": 6.0, "k_proj": 7.0, "v_proj": 8.0, "gate_proj": 5.0, "up_proj": 6.0},
    **{"q_a_proj": 6.0, "kv_a_proj_with_mqa": 7.0},
}


def save(
    source: pathlib.Path, folder: pathlib.Path, style: str, plain: str = "lm_head", only: str = ""
) -> pathlib.Path:
    """A BF16 checkpoint with its linears quantised that have ``only`` in their name and not ``plain``.

    The parts of a fused linear have NVFP4 scales of their own.
    """
    shutil.copytree(source, folder)
    checkpoint = HFCheckpoint(source)
    tensors, ignored = {}, {"lm_head"}
    for name in checkpoint.specs:
        match = _LINEAR.fullmatch(name)
        if match is None or plain in name or only not in name:
            tensors[name] = checkpoint.tensor(name)
            ignored |= {match["module"]} if match else set()
            continue
        module = match["module"]
        stored = _quantize(STYLES[style], module, checkpoint.tensor(name))
        tensors |= {f"{module}.{leaf}": tensor for leaf, tensor in stored.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, quantization_config=_config(style, sorted(ignored)))
    return folder


def change_config(folder: pathlib.Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(_config_fields(folder) | fields))


def stored_weights(folder: pathlib.Path) -> dict[str, StoredWeight]:
    """The quantised linears of a checkpoint by name, read without SGLang."""
    checkpoint = HFCheckpoint(folder)
    scheme = read_base_scheme(_config_fields(folder))
    weights = {}
    for name, module in _empty_model(folder, torch.float32).named_modules():
        weight_format = scheme.format_of(name)
        if isinstance(module, torch.nn.Linear) and weight_format.name != "bf16":
            shape = module.out_features, module.in_features
            weights[name] = StoredWeight(weight_format, *shape, checkpoint.stored_weight(name, weight_format, *shape))
    return weights


def difference_from_files(folder: pathlib.Path, served: BaseManifest) -> str | None:
    """The first difference between a served base and the files of its checkpoint, read without SGLang."""
    checkpoint = HFCheckpoint(folder)
    scheme = read_base_scheme(_config_fields(folder))
    modules = {name.rsplit(".", 1)[0] for name in checkpoint.specs if "_proj." in name or "_proj_with_mqa." in name}
    formats = {module: scheme.format_of(module) for module in modules}
    files = BaseManifest.of(formats, ((name, checkpoint.tensor(name)) for name in checkpoint.specs), served.cuts)
    return first_difference(files, served, ("the files", "the server"))


def linear_shapes(folder: pathlib.Path) -> dict[str, tuple[int, int]]:
    """Rows and columns of every linear of an unquantised checkpoint, experts among them, by name."""
    matches = {_LINEAR.fullmatch(name): spec for name, spec in HFCheckpoint(folder).specs.items()}
    return {match["module"]: tuple(spec.shape) for match, spec in matches.items() if match}


def random_adapter(
    plain: pathlib.Path,
    seed: int,
    method: AdapterMethod,
    *,
    tied: bool = True,
    shared_experts: bool = False,
    without: tuple[str, ...] = (),
    scale: float = 0.05,
) -> Adapter:
    """An adapter of every linear of an unquantised checkpoint, but for those whose leaf name is in ``without``.

    The parts of a fused projection share what acts on the input in a tied one, and all experts of a layer all of it where
    they are shared.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    tied_tensors: dict[tuple[str, ...], torch.Tensor] = {}
    for module, shape in linear_shapes(plain).items():
        name = _EXPERT.sub(".experts.", module) if shared_experts else module
        if name.rsplit(".", 1)[-1] in without:
            continue
        for leaf, size in method.shapes(*shape).items():
            tensor = scale * torch.randn(size, generator=generator)
            if tied and leaf == method.shared_leaf:
                tensor = tied_tensors.setdefault(fused_with(name), tensor).clone()
            tensors.setdefault(tensor_name(name, leaf), tensor)
    targets = {split_name(name)[0].rsplit(".", 1)[-1] for name in tensors}
    return Adapter(tensors, AdapterConfig(method=method, target_modules=tuple(targets)))


def merged_model(plain: pathlib.Path, folder: pathlib.Path, adapter: Adapter | None) -> PreTrainedModel:
    """Transformers' model with the weights that a checkpoint means, in fp32, each with its adapter multiplied into it.

    Args:
        plain: the unquantised checkpoint of the same shapes.
        folder: the checkpoint, perhaps quantised.
        adapter: merged in fp64; None for the base.
    """
    checkpoint, scheme = HFCheckpoint(folder), read_base_scheme(_config_fields(folder))
    shapes = linear_shapes(plain)
    others = [name for name in checkpoint.specs if name.rpartition(".")[0] not in shapes]
    tensors = {name: checkpoint.tensor(name) for name in others}
    for module, shape in shapes.items():
        weight_format = scheme.format_of(module)
        stored = checkpoint.stored_weight(module, weight_format, *shape)
        weight_OI = weight_format.dequantize(stored, torch.float32)
        own = adapter and (adapter.module_tensors(module) or adapter.module_tensors(_EXPERT.sub(".experts.", module)))
        if own:
            exact = {leaf: tensor.double() for leaf, tensor in own.items()}
            weight_OI = adapter.config.method.merge(weight_OI.double(), exact).float()
        tensors[f"{module}.weight"] = weight_OI
    with tempfile.TemporaryDirectory() as scratch:
        merged = pathlib.Path(scratch)
        fields = _config_fields(folder)
        text = {**fields.get("text_config", fields), "model_type": "deepseek_v3", "dtype": "float32"}
        text.pop("quantization_config", None)
        (merged / "config.json").write_text(json.dumps(text))
        plain_names = {name.removeprefix("language_model."): tensor.float() for name, tensor in tensors.items()}
        save_file(plain_names, merged / "model.safetensors", metadata={"format": "pt"})
        return AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()


def transformers_model(folder: pathlib.Path, dtype: torch.dtype, *, deployed: bool = False) -> PreTrainedModel:
    """Transformers' model with the dequantised weights of a checkpoint.

    ``deployed`` puts in front of each linear what its kernel does to its input.
    """
    checkpoint, weights = HFCheckpoint(folder), stored_weights(folder)
    model = _empty_model(folder, dtype)
    for name, parameter in model.named_parameters():
        weight = weights.get(name.removesuffix(".weight"))
        parameter.data.copy_(checkpoint.tensor(name) if weight is None else weight.dequantize(dtype))
    for name, weight in weights.items() if deployed else ():
        model.get_submodule(name).register_forward_pre_hook(_input_hook(weights, name, weight.format))
    return model


def logprobs(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Log-probs of the whole vocabulary at each of ``tokens`` [tokens, V], teacher-forced."""
    with torch.no_grad():
        logits_TV = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return logits_TV.float().log_softmax(-1)


def save_adapter(adapter: Adapter, folder: pathlib.Path) -> pathlib.Path:
    """An adapter in peft's folder layout."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(adapter.config.to_peft_json())
    save_file({name: tensor.clone() for name, tensor in adapter.tensors.items()}, folder / "adapter_model.safetensors")
    return folder


def _config_fields(folder: pathlib.Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def _empty_model(folder: pathlib.Path, dtype: torch.dtype) -> PreTrainedModel:
    fields = _config_fields(folder)
    fields.pop("quantization_config", None)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=dtype).eval()


def _input_hook(weights, name: str, weight_format: WeightFormat):
    parts = [weights[part].tensors for part in fused_with(name)]
    return lambda _module, inputs: (weight_format.model_input(inputs[0].flatten(0, -2), parts).view_as(inputs[0]),)


def _quantize(weight_format: WeightFormat, module: str, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
    if isinstance(weight_format, Nvfp4Format) and weight_format.quantized_input:
        largest_input = _LARGEST_INPUT.get(module.rsplit(".", 1)[-1], 4.0)
        return weight_format.quantize(weight_OI, largest_input=largest_input)
    return weight_format.quantize(weight_OI)


def _config(style: str, ignored: list[str]) -> dict:
    if style != "nvfp4_modelopt":
        return quantization_config(STYLES[style], ignored)
    arguments = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    group = {"targets": ["Linear"], "weights": arguments, "input_activations": arguments}
    return {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {"group_0": group}, "ignore": ignored}
