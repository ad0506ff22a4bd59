"""The same models through peft on transformers."""

import pathlib

import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from orbit_kernels.contract.payload import Adapter


def logprobs(checkpoint: pathlib.Path, adapter: Adapter | None, ids: list[int], folder: pathlib.Path) -> torch.Tensor:
    """Log-probs of ``ids[1:]`` in fp32; the adapter goes through a folder as peft saves it."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    if adapter is not None:
        folder.mkdir()
        (folder / "adapter_config.json").write_text(adapter.config.to_peft_json())
        save_file(
            {name: tensor.clone() for name, tensor in adapter.tensors.items()}, folder / "adapter_model.safetensors"
        )
        model = PeftModel.from_pretrained(model, folder).eval()
    with torch.no_grad():
        logits_TV = model(torch.tensor([ids])).logits[0, :-1].float()
    return logits_TV.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
