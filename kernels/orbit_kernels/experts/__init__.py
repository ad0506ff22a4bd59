"""This package computes frozen mixture-of-experts layers: it dequantises the experts that a router chose by chunks.

`mlp.expert_mlp` is the one entry; trainer and server both call it. Where the experts are spread over ranks, the trainer
puts an exchange of rows between its steps: `routing.gather`, `mlp.expert_outputs` and `routing.combine`.
"""

from orbit_kernels.experts.adapter import ExpertAdapter, PerExpert, RowAdapter, adapted_product, expert_module
from orbit_kernels.experts.mlp import expert_mlp, expert_outputs
from orbit_kernels.experts.routing import Dispatch, combine, gather
from orbit_kernels.experts.weights import DOWN, GATE, GATE_UP, UP, ChunkBuffer, FrozenExperts, StackedWeights

__all__ = [
    "DOWN",
    "GATE",
    "GATE_UP",
    "UP",
    "ChunkBuffer",
    "Dispatch",
    "ExpertAdapter",
    "FrozenExperts",
    "RowAdapter",
    "PerExpert",
    "StackedWeights",
    "adapted_product",
    "combine",
    "expert_mlp",
    "expert_module",
    "expert_outputs",
    "gather",
]
