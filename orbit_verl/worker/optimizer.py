"""AdamW trains the adapter alone, with fp32 masters and fp32 gradient accumulation."""

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from megatron.core import parallel_state as mpu
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import nn
from verl.utils.megatron.optimizer import get_megatron_optimizer_param_scheduler
from verl.workers.config import McoreOptimizerConfig

from orbit_verl.model.layout import ParallelLayout
from orbit_verl.worker.gathering import gather_scalars, whole_tensors

logger = logging.getLogger(__name__)

_STATE_FIELDS = ("exp_avg", "exp_avg_sq", "step")


@dataclasses.dataclass(frozen=True)
class _Masters:
    """A `_Masters` has the masters that a rank holds as the whole, and those that it holds as its part.

    The whole ones are held by all ranks of its tensor-parallel group.
    """

    whole: list[nn.Parameter] = dataclasses.field(default_factory=list)
    parts: list[nn.Parameter] = dataclasses.field(default_factory=list)


class AdapterOptimizer:
    """An `AdapterOptimizer` trains fp32 masters of the adapter's tensors and rounds them into these after each step.

    Every micro-batch's gradient is added in fp32, whatever the dtype of the tensors. A step is that of the whole batch
    and of the whole adapter, however many ranks share either.

    Args:
        parameters: this rank's tensors of the adapter by name.
        config: learning rate, betas, weight decay and the norm that gradients are clipped to (0: not clipped).
        layout: what this rank holds.
        shapes: of the whole tensors of all ranks by name.

    Raises:
        ValueError: the configuration asks for another optimiser than Adam.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: McoreOptimizerConfig,
        layout: ParallelLayout,
        shapes: Mapping[str, Sequence[int]],
    ):
        if config.optimizer not in ("adam", "adamw"):
            raise ValueError(f"optim.optimizer={config.optimizer!r}: only 'adam' (AdamW) trains an adapter")
        if config.override_optimizer_config or config.use_precision_aware_optimizer:
            raise ValueError(
                "optim.override_optimizer_config and optim.use_precision_aware_optimizer are settings of Megatron's "
                "optimisers; leave them out, an adapter is trained by torch's AdamW"
            )
        self._parameters, self._layout = dict(parameters), layout
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._masters = {name: p.detach().float().clone().requires_grad_(True) for name, p in parameters.items()}
        self._max_norm = config.clip_grad
        self._adamw = torch.optim.AdamW(
            self._masters.values(), lr=config.lr, betas=tuple(config.betas), weight_decay=config.weight_decay
        )
        self.num_skipped_steps = self.num_skipped_in_a_row = 0
        for name, parameter in self._parameters.items():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: self._accumulate(name, p))

    @property
    def param_groups(self) -> list[dict]:
        """Returns torch's parameter groups, for the scheduler."""
        return self._adamw.param_groups

    def zero_grad(self) -> None:
        """Drops the accumulated gradients."""
        self._adamw.zero_grad()
        for parameter in self._parameters.values():
            parameter.grad = None

    def gradients(self) -> dict[str, torch.Tensor]:
        """Returns the accumulated fp32 gradients by tensor name; tensors that took part in no backward are left out."""
        return {name: master.grad for name, master in self._masters.items() if master.grad is not None}

    @torch.no_grad()
    def step(self) -> float:
        """Averages gradients over data-parallel ranks, clips them, updates, and rounds the masters into the adapter.

        A gradient that is not finite leaves adapter and moments as they are, on all ranks; ``num_skipped_steps`` and
        ``num_skipped_in_a_row`` count it. A tensor that took part in no rank's backward, as an expert's without tokens, stays as it is.

        Returns:
            The gradients' total L2 norm before clipping.
        """
        self._reduce_gradients()
        norm = self._total_norm()
        if not math.isfinite(norm):
            self.num_skipped_steps += 1
            self.num_skipped_in_a_row += 1
            logger.warning("gradient norm is %s: step skipped (%d so far)", norm, self.num_skipped_steps)
            return norm
        self.num_skipped_in_a_row = 0
        if self._max_norm > 0 and norm > self._max_norm:
            torch._foreach_mul_(list(self.gradients().values()), self._max_norm / norm)
        self._adamw.step()
        self._round_masters()
        return norm

    @torch.no_grad()
    def reset(self) -> None:
        """Starts afresh from the adapter's present tensors: new masters, no moments, no gradients."""
        for name, master in self._masters.items():
            master.copy_(self._parameters[name])
        self._adamw.state.clear()
        self.zero_grad()

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Returns copies of this rank's masters, moments and step counts as ``<field>/<tensor name>``, for safetensors."""
        return {key: tensor.clone() for name in self._masters for key, tensor in self._state_of(name).items()}

    @property
    def num_bytes(self) -> int:
        """Returns the size of this rank's masters, moments and step counts."""
        return sum(tensor.nbytes for name in self._masters for tensor in self._state_of(name).values())

    def whole_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields copies of all ranks' ``state_tensors``; all ranks iterate, before the next step."""
        return whole_tensors(self._masters, self._state_of, self._shapes, self._layout)

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restores a whole state, of which each rank takes its own; the adapter's tensors become the rounded masters.

        Raises:
            ValueError: a name or shape is not this optimiser's; nothing is changed then.
        """
        self.check_state(tensors)
        self._adamw.state.clear()
        for name, master in self._masters.items():
            own = partial(self._layout.tensor.own, shape=master.shape)
            master.copy_(own(tensors[f"master/{name}"]))
            state = {field: tensors.get(f"{field}/{name}") for field in _STATE_FIELDS}
            if state["step"] is not None:
                # AdamW keeps its step count on the CPU (torch/optim/adam.py::"_get_scalar_dtype").
                self._adamw.state[master] = {
                    field: tensor.clone() if field == "step" else own(tensor).to(master.device, copy=True)
                    for field, tensor in state.items()
                }
        self.zero_grad()
        self._round_masters()

    def check_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Holds a whole state against the adapter.

        Raises:
            ValueError: a name or shape is not this optimiser's, or something is missing; all are listed.
        """
        # All ranks look at the whole, so that they refuse alike.
        known = {f"{field}/{name}" for field in ("master", *_STATE_FIELDS) for name in self._shapes}
        problems = [f"{key}: unknown" for key in sorted(tensors.keys() - known)]
        for name, shape in self._shapes.items():
            fields = {field for field in _STATE_FIELDS if f"{field}/{name}" in tensors}
            if f"master/{name}" not in tensors or (fields and fields != set(_STATE_FIELDS)):
                problems.append(f"{name}: master, moments or step missing")
                continue
            for field in {"master", *fields} - {"step"}:
                found = tuple(tensors[f"{field}/{name}"].shape)
                if found != shape:
                    problems.append(f"{field}/{name}: shape {found}, expected {shape}")
        if problems:
            raise ValueError(f"optimiser state does not fit the adapter: {'; '.join(problems)}")

    def to(self, device: torch.device | str) -> None:
        """Moves masters, gradients and moments; the adapter's own tensors move with the model."""
        for master in self._masters.values():
            master.data = master.data.to(device)
            if master.grad is not None:
                master.grad.data = master.grad.data.to(device)
            for field in ("exp_avg", "exp_avg_sq"):
                state = self._adamw.state.get(master, {})
                if field in state:
                    state[field] = state[field].to(device)

    def _state_of(self, name: str) -> dict[str, torch.Tensor]:
        master = self._masters[name]
        state = self._adamw.state.get(master, {})
        moments = {f"{field}/{name}": state[field] for field in _STATE_FIELDS if field in state}
        return {f"master/{name}": master.detach(), **moments}

    def _accumulate(self, name: str, parameter: nn.Parameter) -> None:
        master = self._masters[name]
        gradient = parameter.grad.detach().float()
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None

    def _by_division(self) -> tuple[_Masters, _Masters]:
        """Returns the masters of every rank of a stage, and those of experts that some ranks hold."""
        of_all, of_experts = _Masters(), _Masters()
        for name, master in self._masters.items():
            masters = of_experts if self._layout.divides_experts(name) else of_all
            whole = tuple(master.shape) == self._shapes[name]
            (masters.whole if whole else masters.parts).append(master)
        return of_all, of_experts

    def _reduce_gradients(self) -> None:
        """Sums the gradients over the ranks that share a tensor, and averages over data-parallel ranks.

        What the ranks of a tensor-parallel group hold alike has a gradient of their tokens, or their rows, on each.
        """
        size = mpu.get_data_parallel_world_size(with_context_parallel=True)
        if size * self._layout.tensor.size == 1:
            return
        of_all, of_experts = self._by_division()
        _sum_over_ranks(of_all.whole, mpu.get_tensor_and_data_parallel_group(with_context_parallel=True), size)
        _sum_over_ranks(of_all.parts, mpu.get_data_parallel_group(with_context_parallel=True), size)
        # An expert's gradient is already the sum over the tokens of its expert group's ranks.
        _sum_over_ranks(of_experts.whole, mpu.get_expert_tensor_parallel_group(), 1)
        _sum_over_ranks(of_experts.whole + of_experts.parts, mpu.get_expert_data_parallel_group(), size)

    def _total_norm(self) -> float:
        """Returns the L2 norm over the whole adapter, which is the same number on all ranks."""
        of_all, of_experts = self._by_division()
        norms = [
            _norm(of_all.whole),
            *gather_scalars(_norm(of_all.parts), mpu.get_tensor_model_parallel_group()),
            *gather_scalars(_norm(of_experts.whole), mpu.get_expert_model_parallel_group()),
            *gather_scalars(_norm(of_experts.parts), mpu.get_expert_tensor_and_model_parallel_group()),
        ]
        return math.hypot(*gather_scalars(math.hypot(*norms), mpu.get_pipeline_model_parallel_group()))

    def _round_masters(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(self._masters[name])


def _sum_over_ranks(masters: Sequence[torch.Tensor], group: torch.distributed.ProcessGroup, divisor: int) -> None:
    """Sums the gradients over the group and divides; a tensor that has none on any rank keeps none."""
    if not masters:
        return
    gradients = [torch.zeros_like(master) if master.grad is None else master.grad for master in masters]
    holders = torch.tensor([float(master.grad is not None) for master in masters], device=masters[0].device)
    flat = torch.cat([*(gradient.flatten() for gradient in gradients), holders])
    torch.distributed.all_reduce(flat, group=group)
    *pieces, holders = flat.split([*(master.numel() for master in masters), len(masters)])
    for master, piece, num_holders in zip(masters, pieces, holders.tolist(), strict=True):
        master.grad = (piece / divisor).view_as(master) if num_holders else None


def _norm(masters: Sequence[torch.Tensor]) -> float:
    gradients = [master.grad for master in masters if master.grad is not None]
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))).item() if gradients else 0.0


def build_scheduler(optimizer: AdapterOptimizer, config: McoreOptimizerConfig) -> OptimizerParamScheduler:
    """Returns Megatron-Core's learning-rate and weight-decay schedule.

    Raises:
        ValueError: the number of training steps is not known.
    """
    if config.total_training_steps <= 0:
        raise ValueError(
            f"optim.total_training_steps={config.total_training_steps}: must be positive; set the run's steps"
        )
    return get_megatron_optimizer_param_scheduler(optimizer, config)
