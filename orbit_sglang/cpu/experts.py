"""Routed experts on a CPU: held as the checkpoint stores them and computed by the trainer's own function.

SGLang 0.5.12 has no CPU kernel for packed experts, and keeps them in layouts that differ from family to family. So one
method takes the place of all of its methods for experts. Its parameters have the names that SGLang's models load, and an
expert and a part in front of each tensor's own shape, so that every expert's tensors are contiguous views.

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
from sglang.srt.plugins.hook_registry import HookType
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
from orbit_sglang.upstream.hooks import Hook

_LAYER = "sglang.srt.layers.moe.fused_moe_triton.layer."
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner."
_TOPK = "sglang.srt.layers.moe.topk."
# SGLang's names of an expert's projections, by the group of parameters that holds them.
GROUPS: Mapping[str, tuple[str, ...]] = {"w13": (GATE, UP), "w2": (DOWN,)}
_GROUP_OF = {projections: group for group, projections in GROUPS.items()}
_PART_OF_SHARD = {"w1": 0, "w3": 1, "w2": 0}


def hook_table() -> list[Hook]:
    """The hooks of this family."""
    around = HookType.AROUND
    return [
        Hook(_LAYER + "FusedMoE.__init__", around, around_layer, ("self", "num_experts"), cpu_only=True),
        Hook(_RUNNER + "check_quantized_moe_compatibility", around, around_block_check, ("self",), cpu_only=True),
        Hook(_TOPK + "fused_topk", around, around_topk, ("hidden_states", "gating_output", "topk"), cpu_only=True),
        Hook(
            _TOPK + "biased_grouped_topk",
            around,
            around_biased_topk,
            ("hidden_states", "gating_output", "correction_bias", "topk"),
            cpu_only=True,
        ),
    ]


class ReferenceExperts(StoredExperts):
    """The experts of one layer.

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
        """Register ``w13_<leaf>`` [E, 2, ...] and ``w2_<leaf>`` [E, 1, ...] for every leaf of the format."""
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
        """Refuse what the reference does not compute.

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
        """Nothing to repack."""

    def apply(self, layer: torch.nn.Module, dispatch_output: StandardDispatchOutput) -> StandardCombineInput:
        """The weighted sum of each token's experts [T, D]."""
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
        """Fused projections by name, of one expert, or with None of what all share."""
        share = Share.whole(*self._shapes[_GROUP_OF[group]])
        return {expert_module(self._prefix, projection, expert): share for projection in group}

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Projections that are multiplied as one."""
        return tuple(_GROUP_OF)

    def frozen_experts(self, layer: torch.nn.Module) -> FrozenExperts:
        """The experts on views of the layer's parameters."""
        stacks = {
            projection: self._stack(layer, group, part)
            for group, projections in GROUPS.items()
            for part, projection in enumerate(projections)
        }
        return FrozenExperts(**stacks)

    def stored_by_name(self, layer: torch.nn.Module) -> Iterator[tuple[str, StoredWeight]]:
        """Every expert's projections by their names in the checkpoint."""
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
    """What ``FusedMoE`` asks of a quantisation configuration."""

    def __init__(self, method: ReferenceExperts):
        self._method = method

    def get_name(self) -> str:
        return "orbit"

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> ReferenceExperts:
        return self._method


def around_layer(
    original: Callable, layer: FusedMoE, *args: Any, quant_config: Any = None, prefix: str = "", **kwargs: Any
) -> None:
    """Around ``FusedMoE.__init__``: the reference in place of the family's method."""
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
    """Around ``check_quantized_moe_compatibility``, which asks for whole FP8 blocks: the reference takes ragged ones."""
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
    """Around ``fused_topk``, which without AMX is a CUDA kernel (``layers/moe/topk.py:1209`` of SGLang 0.5.12)."""
    return fused_topk_torch_native(hidden_states, gating_output, topk, renormalize, correction_bias, scoring_func)


def around_biased_topk(
    original: Callable, *, gating_output: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Around ``biased_grouped_topk``: SGLang's plain code, uncompiled, on fp32 logits as its CUDA kernels take them.

    Without AMX it is compiled (``layers/moe/topk.py:901`` of SGLang 0.5.12) and its scores have the dtype of the logits.
    """
    return inspect.unwrap(biased_grouped_topk_impl)(gating_output=gating_output.float(), **kwargs)


@functools.cache
def _buffer(experts_per_chunk: int) -> ChunkBuffer:
    """The process's one buffer."""
    return ChunkBuffer(experts_per_chunk)


def _load(parameter: torch.nn.Parameter, loaded: torch.Tensor, name: str, *, shard_id: str, expert_id: int) -> None:
    """SGLang's ``weight_loader`` of experts."""
    target = parameter.data[expert_id, _PART_OF_SHARD[shard_id]]
    if loaded.numel() != target.numel():
        raise ValueError(f"{name}, expert {expert_id}: {tuple(loaded.shape)}, must be {tuple(target.shape)}")
    target.copy_(as_dtype(loaded, target.dtype).reshape(target.shape))
