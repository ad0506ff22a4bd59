"""This module puts a slotted rotation of the latent of keys and values in front of ``kv_b_proj``.

Dimension suffixes: T tokens of a batch, L width of the latent.
"""

from typing import Any

import torch
from sglang.srt.layers.layernorm import RMSNorm

from orbit_kernels.upstream.ledger import Method
from orbit_sglang.model.slotted.batch import BatchSlots
from orbit_sglang.model.slotted.oft import OFTLinear

FORWARD = Method("sglang.srt.layers.layernorm.RMSNorm.forward", ("self", "args", "kwargs"))


class AdaptedLatent:
    """An ``AdaptedLatent`` gives ``kv_a_layernorm`` the rotation that OFT puts in front of ``kv_b_proj``.

    It wraps ``forward``, on this instance. Absorbed attention never calls ``kv_b_proj``, and reads the latent from the
    cache of keys and values instead, which is divided by version. Where SGLang does call it, for prompts on CUDA, its
    input is the same output of the norm, new or from that cache. So the rotation is here alone, and ``kv_b_proj``
    itself has none.

    Args:
        linear: the adapter of ``kv_b_proj``.
        norm: the norm in front of it.
        batch: slots of the running forward pass.
    """

    def __init__(self, linear: OFTLinear, norm: RMSNorm, batch: BatchSlots):
        self._linear, self._batch = linear, batch
        self._base_forward = FORWARD.replace_on(norm, self.forward)

    def forward(self, x_TL: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns the norm's output, rotated, in the shape and dtype of ``x``."""
        latent_TL = self._base_forward(x_TL, *args, **kwargs)
        slots = self._batch.of_rows(latent_TL.shape[0])
        if self._linear.is_idle(slots):
            return latent_TL
        (rotated_TL,) = self._linear.inputs(latent_TL, slots)
        return rotated_TL
