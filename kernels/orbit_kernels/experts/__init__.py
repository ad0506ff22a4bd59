"""Frozen mixture-of-experts layers: the experts that a router chose, dequantised a chunk at a time.

`mlp.expert_mlp` is the one entry; trainer and server both call it.
"""

from orbit_kernels.experts.adapter import ExpertAdapter, LinearAdapter, PerExpert, adapted_product, expert_module
from orbit_kernels.experts.mlp import expert_mlp
from orbit_kernels.experts.weights import DOWN, GATE, GATE_UP, UP, ChunkBuffer, FrozenExperts, StackedWeights

__all__ = [
    "DOWN",
    "GATE",
    "GATE_UP",
    "UP",
    "ChunkBuffer",
    "ExpertAdapter",
    "FrozenExperts",
    "LinearAdapter",
    "PerExpert",
    "StackedWeights",
    "adapted_product",
    "expert_mlp",
    "expert_module",
]
