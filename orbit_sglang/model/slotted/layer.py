"""This module puts a slotted adapter around one of SGLang's linears.

Dimension suffixes: T tokens of a batch, I input width, O output width of all parts, P parts.
"""

import torch
from sglang.srt.layers.linear import LinearBase

from orbit_kernels.upstream.ledger import Method
from orbit_sglang.model.slotted.batch import BatchSlots
from orbit_sglang.model.slotted.slotted_linear import SlottedLinear

APPLY = Method("sglang.srt.layers.quantization.base_config.LinearMethodBase.apply", ("self", "layer", "x", "bias"))


class AdaptedLayer:
    """An ``AdaptedLayer`` wraps ``quant_method.apply`` of one linear, on this instance.

    The linear, its weight and its quantisation stay SGLang's.

    Args:
        linear: the adapter.
        layer: SGLang's linear.
        batch: slots of the running forward pass.
    """

    def __init__(self, linear: SlottedLinear, layer: LinearBase, batch: BatchSlots):
        self._linear, self._batch = linear, batch
        self._base_apply = APPLY.replace_on(layer.quant_method, self.apply)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Applies ``quant_method.apply`` with the adapter: it maps x [..., I] to [..., O], of the same dtype."""
        x_TI = x.reshape(-1, x.shape[-1])
        slots = self._batch.of_rows(x_TI.shape[0])
        if self._linear.is_idle(slots):
            return self._base_apply(layer, x, bias)
        y_TO = self._product(layer, self._linear.inputs(x_TI, slots), bias)
        return self._linear.output(x_TI, y_TO, slots).unflatten(0, x.shape[:-1])

    def _product(self, layer: torch.nn.Module, inputs: list[torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
        """Returns the frozen linear of one input, or of each part's own."""
        if len(inputs) == 1:
            return self._base_apply(layer, inputs[0], bias)
        y_PTO = self._base_apply(layer, torch.cat(inputs), bias).unflatten(0, (len(inputs), inputs[0].shape[0]))
        sizes = list(self._linear.parts.values())
        return torch.cat([y_TO.split(sizes, dim=-1)[index] for index, y_TO in enumerate(y_PTO)], dim=-1)
