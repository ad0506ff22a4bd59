"""A mixture-of-experts layer of the frozen base keeps router and experts as stored; adapters sit on the experts.

A rank holds all experts or, with expert parallelism, its share (`layout`), and routes the tokens that are its own.
Where ranks divide each expert, they gather their tokens and scatter the sum of the outputs. Megatron-Core's own MoE
layer is not used: its experts own trainable, unpacked weights.

Dimension suffixes: S sequence, B batch, T tokens (S * B), K experts of a token, E experts, D hidden.
"""

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import nn
from torch.nn import functional

from orbit_kernels.adapters.oft import reference as oft
from orbit_kernels.experts import DOWN, GATE, UP, ChunkBuffer, ExpertAdapter, FrozenExperts, PerExpert, expert_mlp
from orbit_kernels.frozen.product import StoredWeight
from orbit_verl.config.keys import BaseSettings
from orbit_verl.model.adapters import LinearAdapter
from orbit_verl.model.expert_parallel import expert_parallel_mlp
from orbit_verl.model.layout import ParallelLayout
from orbit_verl.model.linear import FrozenLinear
from orbit_verl.model.router import FrozenRouter


class FrozenExpert(nn.Module):
    """A `FrozenExpert` has the linears of one expert; they hold weights and adapters, and `FrozenMoE` multiplies."""

    def __init__(self, gate_up: FrozenLinear, down: FrozenLinear):
        super().__init__()
        self.gate_up, self.down = gate_up, down


class SharedExpert(FrozenExpert):
    """A `SharedExpert` is the expert that every token takes, beside those that its router chooses."""

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Returns ``W2 (silu(W1 x) * W3 x)``, [T, D].

        With tensor parallelism it returns what this rank adds to that, for all ranks' tokens.
        """
        gate_up_T1F, _ = self.gate_up(x_TD.unsqueeze(1))
        gate_T1F, up_T1F = gate_up_T1F.chunk(2, dim=-1)
        return self.down.of_rank(functional.silu(gate_T1F) * up_T1F).squeeze(1)


class CommonLinear(nn.Module):
    """A `CommonLinear` is the place of an adapter that all experts of a layer share; it holds no weight.

    Args:
        like: that linear of any expert.
    """

    def __init__(self, like: FrozenLinear):
        super().__init__()
        self.shares, self.parts, self.input_size = dict(like.shares), dict(like.parts), like.input_size
        self._like = (like,)  # not a submodule: its weights are its expert's
        self.adapter: LinearAdapter | None = None
        self.adapter_enabled = True

    @property
    def device(self) -> torch.device:
        """Returns the device on which the experts are."""
        return self._like[0].device


class FrozenMoE(nn.Module):
    """A `FrozenMoE` is router and experts in Megatron-Core's calling convention of a layer's MLP.

    Args:
        router: makes the router.
        expert: makes one expert's linears.
        layout: which experts this rank holds.
        shared_expert: makes the expert that every token takes, None where there is none.
        scale: of the routed experts' sum.
        base: how experts are computed with.
        buffer: memory for one chunk of dequantised experts, shared by all layers.
    """

    def __init__(
        self,
        *,
        router: Callable[[], FrozenRouter],
        expert: Callable[[int], FrozenExpert],
        layout: ParallelLayout,
        shared_expert: Callable[[], SharedExpert] | None,
        scale: float,
        base: BaseSettings,
        buffer: ChunkBuffer,
        **_megatron: Any,
    ):
        super().__init__()
        self.router = router()
        self.layout = layout
        self.experts = nn.ModuleList(expert(index) for index in layout.experts)
        self.common = nn.ModuleList(CommonLinear(linear) for linear in (self.experts[0].gate_up, self.experts[0].down))
        self.shared_expert = None if shared_expert is None else shared_expert()
        self._scale, self._base, self._buffer = scale, base, buffer

    def forward(self, x_SBD: torch.Tensor, **_megatron: Any) -> tuple[torch.Tensor, None]:
        """Returns the weighted sum of each token's experts [S, B, D], and Megatron-Core's absent bias.

        It is scaled and added up in the model's dtype, as in the server; where ranks divide each expert, that comes
        before the sum over ranks.
        """
        tokens_TD = x_TD = x_SBD.flatten(0, 1)
        ids_TK, weights_TK = self.router(x_TD)
        if self.layout.divides_each_expert:
            x_TD, ids_TK, weights_TK = map(gather_from_sequence_parallel_region, (x_TD, ids_TK, weights_TK))
        mlp = expert_mlp
        if self.layout.expert.size > 1:
            mlp = partial(expert_parallel_mlp, group=mpu.get_expert_model_parallel_group())
        y_TD = mlp(
            x_TD,
            ids_TK,
            weights_TK,
            self._frozen_experts(),
            buffer=self._buffer,
            activations=self._base.activations,
            adapter=self._adapter(),
        )
        if self._scale != 1:
            y_TD = y_TD * self._scale
        if self.shared_expert is not None:
            shared_TD = self.shared_expert(tokens_TD)
            if self.layout.tensor.size > 1 and not self.layout.divides_each_expert:
                shared_TD = reduce_scatter_to_sequence_parallel_region(shared_TD)
            y_TD = y_TD + shared_TD
        if self.layout.divides_each_expert:
            y_TD = reduce_scatter_to_sequence_parallel_region(y_TD)
        return y_TD.unflatten(0, x_SBD.shape[:2]), None

    def _frozen_experts(self) -> FrozenExperts:
        def of_linear(name: str, part: str) -> Sequence[StoredWeight]:
            linears = [getattr(expert, name) for expert in self.experts]
            return _OnDemand(len(linears), lambda index: linears[index].stored_parts()[part])

        return FrozenExperts(
            gate_proj=of_linear("gate_up", GATE), up_proj=of_linear("gate_up", UP), down_proj=of_linear("down", DOWN)
        )

    def _adapter(self) -> ExpertAdapter:
        """Returns the experts' adapters, as they are attached now; experts of a layer carry the same kind."""
        adapters = {}
        for name in ("gate_up", "down"):
            linears = [getattr(expert, name) for expert in self.experts]
            if linears[0].adapter is not None and linears[0].adapter_enabled:
                adapters[tuple(linears[0].parts)] = [_OnRows(linear.adapter) for linear in linears]
        before_dispatch, down = (
            _Rotated(*linear.adapter.rotations()) if linear.adapter is not None and linear.adapter_enabled else None
            for linear in self.common
        )
        if down is not None:
            adapters[(DOWN,)] = [down] * len(self.experts)
        return PerExpert(adapters, common_input=before_dispatch)


class _OnRows:
    """An `_OnRows` is a linear's adapter on rows [R, I] in place of sequences."""

    def __init__(self, adapter: LinearAdapter):
        self._adapter = adapter

    def inputs(self, x_RI: torch.Tensor) -> list[torch.Tensor]:
        return [x_R1I.squeeze(1) for x_R1I in self._adapter.inputs(x_RI.unsqueeze(1))]

    def output(self, x_RI: torch.Tensor, y_RO: torch.Tensor) -> torch.Tensor:
        return self._adapter.output(x_RI.unsqueeze(1), y_RO.unsqueeze(1)).squeeze(1)


class _Rotated:
    """A `_Rotated` is a rotation whose blocks are made once for all experts."""

    def __init__(self, rotation_NKK: torch.Tensor):
        self._rotation_NKK = rotation_NKK

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return oft.rotate(x, self._rotation_NKK)

    def inputs(self, x_RI: torch.Tensor) -> list[torch.Tensor]:
        return [self(x_RI)]

    def output(self, x_RI: torch.Tensor, y_RO: torch.Tensor) -> torch.Tensor:
        return y_RO


class _OnDemand(Sequence):
    """An `_OnDemand` is a sequence whose items are made when they are asked for."""

    def __init__(self, length: int, make: Callable[[int], Any]):
        self._length, self._make = length, make

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._make(operator.index(index))
