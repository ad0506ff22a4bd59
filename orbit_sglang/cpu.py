"""What SGLang 0.5.12's CPU engine needs on a machine without a CUDA driver."""

import types

import torch

from orbit_sglang.hooks import CpuAttribute


class _TorchWithoutPinning(types.ModuleType):
    """``torch`` for one module, whose ``tensor`` does not pin memory."""

    def __getattr__(self, name: str):
        return getattr(torch, name)

    @staticmethod
    def tensor(data, *, pin_memory: bool = False, **kwargs) -> torch.Tensor:
        return torch.tensor(data, **kwargs)


def replacements() -> list[CpuAttribute]:
    """Let the CPU engine return log-probs of the prompt.

    ``layers/logits_processor.py:542,545,616`` of SGLang 0.5.12 pins memory without asking whether there is an
    accelerator to pin it for, and torch refuses. Can go when those lines use ``is_pin_memory_available``.
    """
    target = "sglang.srt.layers.logits_processor.torch"
    return [CpuAttribute(target, expected=torch, value=_TorchWithoutPinning("torch"))]
