"""The models that a server or an engine is compared with: transformers and peft, on the weights that the files mean."""

import json
import pathlib
import tempfile

import safetensors.torch
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from orbit_kernels.checkpoint.files import HFCheckpoint
from orbit_kernels.contract.payload import Adapter
from orbit_kernels.contract.peft_folder import write_peft_folder
from orbit_kernels.formats import WeightFormat, read_base_scheme
from orbit_kernels.linears.fusing import fused_with
from tests.support.adapters import EXPERT, linears_of
from tests.support.quantized import config_of, empty_model, stored_weights


def transformers_model(folder: pathlib.Path, dtype: torch.dtype, *, deployed: bool = False) -> PreTrainedModel:
    """Transformers' model with the dequantised weights of a checkpoint.

    ``deployed`` puts in front of each linear what its kernel does to its input; a gradient passes straight through.
    """
    checkpoint, weights = HFCheckpoint(folder), stored_weights(folder)
    model = empty_model(folder, dtype)
    for name, parameter in model.named_parameters():
        weight = weights.get(name.removesuffix(".weight"))
        parameter.data.copy_(checkpoint.tensor(name) if weight is None else weight.dequantize(dtype))
    for name, weight in weights.items() if deployed else ():
        model.get_submodule(name).register_forward_pre_hook(_input_hook(weights, name, weight.format))
    return model


def merged_model(plain: pathlib.Path, folder: pathlib.Path, adapter: Adapter | None) -> PreTrainedModel:
    """Transformers' model with the weights that a checkpoint means, in fp32, each with its adapter multiplied into it.

    Args:
        plain: the unquantised checkpoint of the same shapes.
        folder: the checkpoint, perhaps quantised.
        adapter: merged in fp64; None for the base.
    """
    checkpoint, scheme = HFCheckpoint(folder), read_base_scheme(config_of(folder))
    shapes = linears_of(plain)
    others = [name for name in checkpoint.specs if name.rpartition(".")[0] not in shapes]
    tensors = {name: checkpoint.tensor(name) for name in others}
    for module, shape in shapes.items():
        weight_format = scheme.format_of(module)
        stored = checkpoint.stored_weight(module, weight_format, *shape)
        weight_OI = weight_format.dequantize(stored, torch.float32)
        own = adapter and (adapter.module_tensors(module) or adapter.module_tensors(EXPERT.sub(".experts.", module)))
        if own:
            exact = {leaf: tensor.double() for leaf, tensor in own.items()}
            weight_OI = adapter.config.method.merge(weight_OI.double(), exact).float()
        tensors[f"{module}.weight"] = weight_OI
    with tempfile.TemporaryDirectory() as scratch:
        merged = pathlib.Path(scratch)
        fields = config_of(folder)
        text = {**fields.get("text_config", fields), "model_type": "deepseek_v3", "dtype": "float32"}
        text.pop("quantization_config", None)
        (merged / "config.json").write_text(json.dumps(text))
        plain_names = {name.removeprefix("language_model."): tensor.float() for name, tensor in tensors.items()}
        safetensors.torch.save_file(plain_names, merged / "model.safetensors", metadata={"format": "pt"})
        return AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()


def save_adapter(adapter: Adapter, folder: pathlib.Path) -> pathlib.Path:
    """An adapter in peft's folder layout."""
    write_peft_folder(adapter, folder)
    return folder


def peft_model(model: PreTrainedModel, adapter: Adapter) -> PeftModel:
    """The model with an adapter, which goes through a folder as peft saves it."""
    with tempfile.TemporaryDirectory() as scratch:
        return PeftModel.from_pretrained(model, save_adapter(adapter, pathlib.Path(scratch) / "peft")).eval()


def logprobs(model: torch.nn.Module, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Log-probs of the whole vocabulary at each of ``tokens`` [tokens, V], teacher-forced."""
    with torch.no_grad():
        logits_TV = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return logits_TV.float().log_softmax(-1)


def token_logprobs(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """Log-probs of ``ids[1:]``."""
    return logprobs(model, ids[:1], ids[1:]).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


def peft_logprobs(checkpoint: pathlib.Path, adapter: Adapter | None, ids: list[int]) -> torch.Tensor:
    """Log-probs of ``ids[1:]`` in fp32, from an unquantised checkpoint with an adapter or without."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    return token_logprobs(model if adapter is None else peft_model(model, adapter), ids)


def assert_close(left: torch.Tensor, right: torch.Tensor, mean: float, largest: float) -> None:
    """Fail where two tensors of log-probs differ by more than that."""
    difference = (left - right).abs()
    assert difference.mean() <= mean and difference.max() <= largest


def _input_hook(weights, name: str, weight_format: WeightFormat):
    parts = [weights[part].tensors for part in fused_with(name)]

    def round_input(_module, inputs):
        (x,) = inputs
        rounded = weight_format.model_input(x.detach().flatten(0, -2), parts).view_as(x)
        return (x + (rounded - x).detach() if x.requires_grad else rounded,)

    return round_input
