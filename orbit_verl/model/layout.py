"""A layout says which layers, experts and ranges of linears a rank holds, and what the others' tensors are called.

It knows names and numbers alone. Three ways to divide a model are combined: layers over stages (pipeline), a layer's
experts over ranks (expert), and every other linear over ranks (tensor). Ranks in no other group repeat one another
(data). The ranks that divide the other linears may divide each expert's too (expert tensor parallelism), instead of its
tokens.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from orbit_kernels.linears.names import EXPERT_NUMBER, layer_number
from orbit_kernels.linears.share import divided_dim

if TYPE_CHECKING:
    from torch import Tensor

MEGATRON = "actor_rollout_ref.actor.megatron"
TENSOR, PIPELINE, EXPERT = (f"{MEGATRON}.{key}_model_parallel_size" for key in ("tensor", "pipeline", "expert"))
EXPERT_TENSOR = f"{MEGATRON}.expert_tensor_parallel_size"
STAGE = f"{MEGATRON}.override_transformer_config.num_layers_in_{{}}_pipeline_stage"


@dataclasses.dataclass(frozen=True)
class GroupRank:
    """A `GroupRank` is this rank among those that divide something between them."""

    size: int = 1
    rank: int = 0

    def part(self, whole: int) -> range:
        """Returns the rank's range of ``whole`` things that are divided evenly."""
        each = whole // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def own(self, whole: "Tensor", shape: Sequence[int]) -> "Tensor":
        """Returns the rank's part of a tensor, of that shape, as a view; it is the whole where the rank holds that."""
        dim = divided_dim(shape, whole.shape)
        return whole if dim is None else whole.narrow(dim, self.rank * shape[dim], shape[dim])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """A `ParallelLayout` says what a rank holds.

    Args:
        num_experts: of one layer; 0 in a dense model.
        expert: of the ranks that hold a layer's experts together, each as many consecutive ones.
        tensor: of the ranks that hold the linears together.
        divides_each_expert: whether these hold the linears of each expert together, too.
        pipeline: of the stages.
        layers: those of this rank's stage; None for all.
    """

    num_experts: int = 0
    expert: GroupRank = GroupRank()
    tensor: GroupRank = GroupRank()
    divides_each_expert: bool = False
    pipeline: GroupRank = GroupRank()
    layers: range | None = None

    @property
    def experts(self) -> range:
        """Returns the experts of this rank."""
        return self.expert.part(self.num_experts)

    def layers_of(self, num_layers: int) -> range:
        """Returns those of the model's layers that this rank holds."""
        return range(num_layers) if self.layers is None else self.layers

    def divides_experts(self, name: str) -> bool:
        """Says whether a tensor or module is an expert's, so that only some ranks of a stage hold it."""
        return self.expert.size > 1 and EXPERT_NUMBER.search(name) is not None

    def holds(self, name: str) -> bool:
        """Says whether this rank holds a tensor or module of a layer, or a part of it."""
        if self.layers is not None and layer_number(name) not in self.layers:
            return False
        return not self.divides_experts(name) or int(EXPERT_NUMBER.search(name)[0]) in self.experts

    def experts_of(self, name: str) -> str | None:
        """Names the layer's experts to which a divided tensor belongs; returns None for others.

        Such a name is, for example, ``model.layers.0.mlp.experts.``.
        """
        return name[: EXPERT_NUMBER.search(name).start()] if self.divides_experts(name) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    """A `ParallelSizes` says how many ways a run divides its model, as verl's configuration has it.

    Args:
        tensor, pipeline, expert, expert_tensor: the sizes.
        first_stage, last_stage: layers of these stages; None where they have as many as the stages between them.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1
    first_stage: int | None = None
    last_stage: int | None = None

    def check(self, num_layers: int, num_experts: int, num_ranks: int) -> None:
        """Holds the sizes against a model and the trainer's ranks.

        Raises:
            ValueError: something cannot be divided evenly.
        """
        sizes = {TENSOR: self.tensor, PIPELINE: self.pipeline, EXPERT: self.expert}
        for key, size in sizes.items():
            if size < 1:
                raise ValueError(f"{key}={size}: must be at least 1, which divides nothing")
        if self.expert > 1 and not num_experts:
            raise ValueError(f"{EXPERT}={self.expert}: the model is dense, it has no experts to divide; set it to 1")
        if num_experts % self.expert:
            raise ValueError(
                f"{EXPERT}={self.expert}: {num_experts} experts cannot be divided evenly; choose one of "
                f"{_divisors(num_experts)}"
            )
        if self.expert_tensor not in (1, self.tensor):
            raise ValueError(
                f"{EXPERT_TENSOR}={self.expert_tensor}: must be 1, which keeps each expert whole, or {self.tensor} as "
                "tensor_model_parallel_size, whose ranks then divide each"
            )
        self._check_stages(num_layers)
        for key, size, others in (TENSOR, self.tensor, 1), (EXPERT, self.expert, self.expert_tensor):
            together = size * others * self.pipeline
            if num_ranks % together:
                raise ValueError(
                    f"{key}={size}, expert_tensor_parallel_size={others}, pipeline_model_parallel_size={self.pipeline}: the "
                    f"trainer's {num_ranks} ranks cannot be divided into groups of {together}, the product; choose sizes whose "
                    f"product is one of {_divisors(num_ranks)}, or another trainer.n_gpus_per_node or trainer.nnodes"
                )

    def stages(self, num_layers: int) -> list[range]:
        """Returns the layers of each stage; ``check`` has been passed."""
        if self.pipeline == 1:
            return [range(num_layers)]
        between = [None] * (self.pipeline - 2)
        sizes = [self.first_stage, *between, self.last_stage]
        given = [size for size in sizes if size is not None]
        each = (num_layers - sum(given)) // max(self.pipeline - len(given), 1)
        ends = itertools.accumulate((each if size is None else size for size in sizes), initial=0)
        return list(itertools.starmap(range, itertools.pairwise(ends)))

    def _check_stages(self, num_layers: int) -> None:
        ends = {STAGE.format(end): size for end, size in (("first", self.first_stage), ("last", self.last_stage))}
        chosen = {key: size for key, size in ends.items() if size is not None}
        if not chosen:
            if num_layers % self.pipeline:
                raise ValueError(
                    f"{PIPELINE}={self.pipeline}: {num_layers} layers cannot be divided evenly; choose one of "
                    f"{_divisors(num_layers)}, or set {STAGE.format('last')}"
                )
            return
        others, layers = self.pipeline - len(chosen), num_layers - sum(chosen.values())
        fits = others >= 0 and (layers >= others and layers % others == 0 if others else layers == 0)
        if min(chosen.values()) < 1 or not fits:
            raise ValueError(
                f"{', '.join(f'{key}={size}' for key, size in chosen.items())}: of {num_layers} layers in "
                f"{PIPELINE}={self.pipeline} stages, {layers} are left for the other {others}; each stage must have at least one, "
                "and the others equally many"
            )


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
