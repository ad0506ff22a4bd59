"""This module computes RMSNorm, residual sum and logits with the served numerics.

SGLang 0.5.12 sums the residual in fp32, normalises the unrounded sum and rounds the residual to the model's dtype for
the next sum (srt/layers/layernorm.py::RMSNorm.forward_native; its fused GPU kernels do the same). Here the
hidden state between modules is that unrounded fp32 sum. With an fp32 base every rounding is the identity.

Dimension suffixes: S sequence, B batch, D hidden, V vocabulary.
"""

from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import nn

from orbit_verl.model.linear import FrozenHead


class RMSNorm(nn.Module):
    """An `RMSNorm` is the root-mean-square norm (arXiv:1910.07467), computed in fp32.

    It takes any float input; its output is in the model's dtype.
    """

    def __init__(self, *, config: Any, hidden_size: int, eps: float):
        super().__init__()
        self._eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype), requires_grad=False)

    def forward(self, x_SBD: torch.Tensor) -> torch.Tensor:
        """Normalises over the last dimension."""
        x_SBD = x_SBD.float()
        x_SBD = x_SBD * torch.rsqrt(x_SBD.pow(2).mean(-1, keepdim=True) + self._eps)
        return (x_SBD * self.weight).to(self.weight.dtype)


def residual_sum(training: bool, fused: bool):
    """Returns Megatron-Core's bias-dropout-add without bias and dropout: branch plus rounded residual, in fp32."""

    def add(branch_with_bias: tuple[torch.Tensor, None], residual_SBD: torch.Tensor, dropout: float) -> torch.Tensor:
        branch_SBD, _ = branch_with_bias
        return branch_SBD.float() + residual_SBD.to(branch_SBD.dtype).float()

    return add


class FrozenGPTModel(GPTModel):
    """A `FrozenGPTModel` is a GPTModel with a frozen head and fp32 logits, as the server samples from them.

    Attributes:
        checkpoint_prefix: of every tensor's name in the checkpoint, empty or ending in a dot.
    """

    def __init__(self, *args: Any, checkpoint_prefix: str = "", **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.checkpoint_prefix = checkpoint_prefix
        if self.post_process:
            divided = self.config.tensor_model_parallel_size > 1
            self.output_layer = FrozenHead(self.output_layer.weight, divided=divided)

    def forward(self, *args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        """Returns fp32 logits [B, S, V] of the rank's range of the vocabulary; an inner stage returns hidden states.

        Raises:
            ValueError: the mask [B, S] (True for tokens) has padding before a token.
        """
        if attention_mask is not None and (attention_mask[:, 1:] > attention_mask[:, :-1]).any():
            raise ValueError("attention_mask has padding before a token: pad on the right, or use remove_padding")
        return super().forward(*args, attention_mask=attention_mask, **kwargs).float()

    def _preprocess(self, *args: Any, **kwargs: Any) -> tuple:
        """Does what Megatron-Core does, and lets frozen embeddings require a gradient where layers are recomputed.

        Megatron-Core's recomputed layers have gradients only where their input has one.
        """
        embedded_SBD, *others = super()._preprocess(*args, **kwargs)
        if self.config.recompute_granularity is not None and embedded_SBD is not None and torch.is_grad_enabled():
            embedded_SBD.requires_grad_()
        return embedded_SBD, *others
