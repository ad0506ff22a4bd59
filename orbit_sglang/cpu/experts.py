"""This module holds routed experts on a CPU as the checkpoint stores them; the trainer's function computes them.

SGLang 0.5.12 has no CPU kernel for packed experts, and keeps them in layouts that differ from family to family. So one
method takes the place of all of its methods for experts. Its parameters have the names that SGLang's models load, and
an expert and a part in front of each tensor's own shape, so that every expert's tensors are contiguous views.

Dimension suffixes: T tokens, K experts of a token, D hidden.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput, StandardDispatchOutput
from sglang.srt.layers.moe.topk import biased_grouped_topk_impl, fused_topk_torch_native
from sglang.srt.server_args import get_global_server_args

from orbit_kernels.experts import (
    DOWN,
    GATE,
    UP,
    ChunkBuffer,
    ExpertAdapter,
    FrozenExperts,
    StackedWeights,
    expert_mlp,
    expert_module,
)
from orbit_kernels.formats import BaseScheme, Bf16Format, WeightFormat
from orbit_kernels.formats.common.weight_format import as_dtype
from orbit_kernels.frozen.product import StoredWeight
from orbit_kernels.linears.share import Share
from orbit_sglang.model.stored_experts import StoredExperts
from orbit_sglang.startup.enabled import slots_enabled
from orbit_sglang.startup.options import FrozenBaseConfig
from orbit_sglang.startup.scheme import language_prefix, read_scheme

# SGLang's names of an expert's projections, by the group of parameters that holds them.
GROUPS: Mapping[str, tuple[str, ...]] = {"w13": (GATE, UP), "w2": (DOWN,)}
_GROUP_OF = {projections: group for group, projections in GROUPS.items()}
_PART_OF_SHARD = {"w1": 0, "w3": 1, "w2": 0}


class ReferenceExperts(StoredExperts):
    """A ``ReferenceExperts`` computes the experts of one layer.

    Args:
        prefix: Hugging Face name of the experts, e.g. ``model.layers.0.mlp.experts``.
        scheme: formats of the checkpoint.
        config: chunk of experts and modelled activations.
        buffer: memory for one chunk, shared by all layers.
    """

    def __init__(self, prefix: str, scheme: BaseScheme, config: FrozenBaseConfig, buffer: ChunkBuffer):
        self.adapter = ExpertAdapter()
        self._prefix, self._scheme, self._config, self._buffer = prefix, scheme, config, buffer

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **_sglang: Any,
    ) -> None:
        """Registers ``w13_<leaf>`` [E, 2, ...] and ``w2_<leaf>`` [E, 1, ...] for every leaf of the format."""
        self._num_experts = num_experts
        ffn, hidden = intermediate_size_per_partition, hidden_size
        self._shapes = {"w13": (ffn, hidden), "w2": (hidden, ffn)}
        self._formats = {group: self._format(group, params_dtype) for group in GROUPS}
        for group, projections in GROUPS.items():
            for leaf, spec in self._formats[group].specs(*self._shapes[group]).items():
                shape = (num_experts, len(projections), *spec.shape)
                parameter = torch.nn.Parameter(torch.empty(shape, dtype=spec.dtype), requires_grad=False)
                parameter.weight_loader = _load
                layer.register_parameter(f"{group}_{leaf}", parameter)

    def create_moe_runner(self, layer: torch.nn.Module, moe_runner_config: MoeRunnerConfig) -> None:
        """Refuses what the reference does not compute.

        Raises:
            ValueError: another activation, or routing weights on the input.
        """
        if moe_runner_config.activation != "silu" or not moe_runner_config.is_gated:
            raise ValueError(
                f"{self._prefix}: activation {moe_runner_config.activation!r}: only gated silu is computed"
            )
        if moe_runner_config.apply_router_weight_on_input:
            raise ValueError(f"{self._prefix}: routing weights on the experts' input are not implemented")

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Does nothing, as there is nothing to repack."""

    def apply(self, layer: torch.nn.Module, dispatch_output: StandardDispatchOutput) -> StandardCombineInput:
        """Returns the weighted sum of each token's experts [T, D]."""
        weights_TK, ids_TK, _ = dispatch_output.topk_output
        y_TD = expert_mlp(
            dispatch_output.hidden_states,
            ids_TK.long(),
            weights_TK,
            self.frozen_experts(layer),
            buffer=self._buffer,
            activations=self._config.activations,
            adapter=self.adapter,
        )
        return StandardCombineInput(hidden_states=y_TD)

    def linear(self, group: tuple[str, ...], expert: int | None) -> dict[str, Share]:
        """Returns fused projections by name, of one expert, or with None of what all share."""
        share = Share.whole(*self._shapes[_GROUP_OF[group]])
        return {expert_module(self._prefix, projection, expert): share for projection in group}

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Returns the projections that are multiplied as one."""
        return tuple(_GROUP_OF)

    def frozen_experts(self, layer: torch.nn.Module) -> FrozenExperts:
        """Returns the experts on views of the layer's parameters."""
        stacks = {
            projection: self._stack(layer, group, part)
            for group, projections in GROUPS.items()
            for part, projection in enumerate(projections)
        }
        return FrozenExperts(**stacks)

    def stored_by_name(self, layer: torch.nn.Module) -> Iterator[tuple[str, StoredWeight]]:
        """Yields every expert's projections by their names in the checkpoint."""
        experts = self.frozen_experts(layer)
        for expert in range(len(experts)):
            for projection in (GATE, UP, DOWN):
                (weight,) = experts.stored(expert, [projection])
                yield expert_module(self._prefix, projection, expert), weight

    def _stack(self, layer: torch.nn.Module, group: str, part: int) -> StackedWeights:
        rows, columns = self._shapes[group]
        weight_format = self._formats[group]
        tensors = {
            leaf: getattr(layer, f"{group}_{leaf}").detach()[:, part] for leaf in weight_format.specs(rows, columns)
        }
        return StackedWeights(format=weight_format, rows=rows, columns=columns, tensors=tensors)

    def _format(self, group: str, params_dtype: torch.dtype) -> WeightFormat:
        names = [
            expert_module(self._prefix, projection, expert)
            for expert in range(self._num_experts)
            for projection in GROUPS[group]
        ]
        weight_format = self._scheme.common_format(names)
        return Bf16Format(dtype=params_dtype) if isinstance(weight_format, Bf16Format) else weight_format


class _ReferenceConfig:
    """A ``_ReferenceConfig`` answers what ``FusedMoE`` asks of a quantisation configuration."""

    def __init__(self, method: ReferenceExperts):
        self._method = method

    def get_name(self) -> str:
        return "orbit"

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> ReferenceExperts:
        return self._method


def around_layer(
    original: Callable, layer: FusedMoE, *args: Any, quant_config: Any = None, prefix: str = "", **kwargs: Any
) -> None:
    """Puts the reference in place of the family's method; runs around ``FusedMoE.__init__``."""
    if slots_enabled():
        server_args = get_global_server_args()
        if server_args.tp_size > 1:
            raise ValueError(
                f"--tp-size {server_args.tp_size}: on a CPU the routed experts of {prefix} are computed by one rank; use 1"
            )
        config = FrozenBaseConfig.from_server_args(server_args)
        scheme = read_scheme(server_args.model_path)
        buffer = _buffer(config.experts_per_chunk)
        name = language_prefix(server_args.model_path) + prefix
        quant_config = _ReferenceConfig(ReferenceExperts(name, scheme, config, buffer))
    original(layer, *args, quant_config=quant_config, prefix=prefix, **kwargs)


def around_block_check(original: Callable, runner: Any) -> None:
    """Lets ragged FP8 blocks pass, which the reference takes; runs around ``check_quantized_moe_compatibility``.

    That asks for whole ones.
    """
    if not slots_enabled():
        original(runner)


def around_topk(
    original: Callable,
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    correction_bias: torch.Tensor | None = None,
    scoring_func: str = "softmax",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses each token's experts in plain torch; runs around ``fused_topk``.

    Without AMX that is a CUDA kernel (``layers/moe/topk.py::"fused_topk = fused_topk_cpu"``).
    """
    return fused_topk_torch_native(hidden_states, gating_output, topk, renormalize, correction_bias, scoring_func)


def around_biased_topk(
    original: Callable, *, gating_output: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses experts with SGLang's plain code, uncompiled, on fp32 logits; runs around ``biased_grouped_topk``.

    SGLang's CUDA kernels take the logits so. Without AMX it is compiled
    (``layers/moe/topk.py::biased_grouped_topk_impl``) and its scores have the dtype of the logits.
    """
    return inspect.unwrap(biased_grouped_topk_impl)(gating_output=gating_output.float(), **kwargs)


@functools.cache
def _buffer(experts_per_chunk: int) -> ChunkBuffer:
    """Returns the process's one buffer."""
    return ChunkBuffer(experts_per_chunk)


def _load(parameter: torch.nn.Parameter, loaded: torch.Tensor, name: str, *, shard_id: str, expert_id: int) -> None:
    """Loads a tensor of one expert as SGLang's ``weight_loader`` of experts."""
    target = parameter.data[expert_id, _PART_OF_SHARD[shard_id]]
    if loaded.numel() != target.numel():
        raise ValueError(f"{name}, expert {expert_id}: {tuple(loaded.shape)}, must be {tuple(target.shape)}")
    target.copy_(as_dtype(loaded, target.dtype).reshape(target.shape))
