"""Which of a model's experts a rank holds, and what the tensors of the others are called. Names and numbers alone."""

import dataclasses

from orbit_kernels.names import EXPERT_NUMBER

SIZE_KEY = "actor_rollout_ref.actor.megatron.expert_model_parallel_size"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """Expert parallelism: each of ``size`` ranks holds as many consecutive experts of every layer.

    Args:
        num_experts: of one layer; 0 in a dense model.
        size: ranks that hold a layer's experts together; 1 when every rank holds all.
        rank: this one's number among them.

    Raises:
        ValueError: the model is dense, or its experts cannot be divided evenly.
    """

    num_experts: int = 0
    size: int = 1
    rank: int = 0

    def __post_init__(self):
        if self.size < 1:
            raise ValueError(f"{SIZE_KEY}={self.size}: must be at least 1, which keeps all experts on every rank")
        if self.size > 1 and not self.num_experts:
            raise ValueError(f"{SIZE_KEY}={self.size}: the model is dense, it has no experts to divide; set it to 1")
        if self.num_experts % self.size:
            raise ValueError(
                f"{SIZE_KEY}={self.size}: {self.num_experts} experts cannot be divided evenly; choose one of "
                f"{[size for size in range(1, self.num_experts + 1) if self.num_experts % size == 0]}"
            )

    @property
    def held(self) -> range:
        """The experts of this rank."""
        each = self.num_experts // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def is_divided(self, name: str) -> bool:
        """Whether a tensor or module is an expert's, so that only some ranks hold it."""
        return self.size > 1 and EXPERT_NUMBER.search(name) is not None

    def holds(self, name: str) -> bool:
        """Whether this rank holds a tensor or module of the checkpoint."""
        return not self.is_divided(name) or int(EXPERT_NUMBER.search(name)[0]) in self.held

    def of_every_rank(self, name: str) -> list[str]:
        """What stands in the place of a tensor or module of this rank, by rank; itself alone where all ranks hold it."""
        if not self.is_divided(name):
            return [name]
        each, number = len(self.held), int(EXPERT_NUMBER.search(name)[0])
        return [EXPERT_NUMBER.sub(str(number % each + rank * each), name, count=1) for rank in range(self.size)]

    @staticmethod
    def any_expert(name: str) -> str:
        """A tensor or module of an expert with ``*`` for its number; others as they are."""
        return EXPERT_NUMBER.sub("*", name, count=1)

    def experts_of(self, name: str) -> str | None:
        """The layer's experts to which a divided tensor belongs, e.g. ``model.layers.0.mlp.experts.``; None otherwise."""
        return name[: EXPERT_NUMBER.search(name).start()] if self.is_divided(name) else None


def check_layout(num_experts: int, size: int, num_ranks: int) -> None:
    """Hold a size of expert parallelism against a model and the trainer's ranks.

    Raises:
        ValueError: ``ExpertLayout`` refuses it, or the ranks cannot be divided into groups of that size.
    """
    ExpertLayout(num_experts=num_experts, size=size)
    if num_ranks % size:
        raise ValueError(
            f"{SIZE_KEY}={size}: the trainer's {num_ranks} ranks cannot be divided into groups of that size; choose one of "
            f"{[divisor for divisor in range(1, num_ranks + 1) if num_ranks % divisor == 0]}, or another "
            "trainer.n_gpus_per_node or trainer.nnodes"
        )
