"""This module makes the base's record of routed experts that SGLang's own kernels compute.

On CUDA SGLang keeps experts in its kernels' layouts, rounds of repacking away from the checkpoint's. So they are
recorded as SGLang's loader hands them over: what was read is known, what the kernel holds of it is not.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

from orbit_kernels.checkpoint.manifest import BaseManifest
from orbit_kernels.experts import DOWN, GATE, UP
from orbit_kernels.formats import BaseScheme, Bf16Format
from orbit_kernels.formats.common.weight_format import as_dtype
from orbit_kernels.linears.names import EXPERT_NUMBER, layer_number
from orbit_sglang.model.stored_experts import StoredExperts


def has_own_kernels(model: torch.nn.Module) -> bool:
    """Returns whether SGLang computes experts of the model itself."""
    layers = (module for module in model.modules() if isinstance(module, FusedMoE))
    return any(not isinstance(layer.quant_method, StoredExperts) for layer in layers)


class StreamedExperts:
    """A ``StreamedExperts`` digests every expert's tensors while they are loaded.

    Each rank of a server digests its part of them.

    Args:
        scheme: formats of the checkpoint.
        config: the language model's ``config.json``. Layers beyond its number are not loaded, and not digested.
        dtype: of the activations, in which SGLang holds unquantised weights.
        rank: of this process.
        num_ranks: of the server.

    Attributes:
        manifest: of what has passed by.
    """

    def __init__(self, scheme: BaseScheme, config: Mapping[str, Any], dtype: torch.dtype, *, rank: int, num_ranks: int):
        self._scheme, self._dtype, self._num_layers = scheme, dtype, config["num_hidden_layers"]
        hidden, ffn = config["hidden_size"], config["moe_intermediate_size"]
        self._shapes = {GATE: (ffn, hidden), UP: (ffn, hidden), DOWN: (hidden, ffn)}
        self._rank, self._num_ranks = rank, num_ranks
        self.manifest = BaseManifest(formats={}, tensors={})

    def watch(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors by their names in the checkpoint, unchanged; experts' are digested on the way."""
        for name, tensor in weights:
            number = EXPERT_NUMBER.search(name)
            if number and int(number[0]) % self._num_ranks == self._rank and layer_number(name) < self._num_layers:
                self._digest(name, tensor)
            yield name, tensor

    def _digest(self, name: str, tensor: torch.Tensor) -> None:
        module, _, leaf = name.rpartition(".")
        found = self._scheme.format_of(module)
        weight_format = Bf16Format(dtype=self._dtype) if isinstance(found, Bf16Format) else found
        spec = weight_format.specs(*self._shapes[module.rpartition(".")[2]])[leaf]
        passed = BaseManifest.of({module: weight_format}, [(name, as_dtype(tensor, spec.dtype).reshape(spec.shape))])
        self.manifest.formats.update(passed.formats)
        self.manifest.tensors.update(passed.tensors)
