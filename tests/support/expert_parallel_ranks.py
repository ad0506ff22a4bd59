"""The ranks that divide a mixture's experts.

Every rank writes ``<case>_<rank>`` for each case, and the test compares them with one process.
"""

from functools import partial
from pathlib import Path

from megatron.core import parallel_state as mpu

from tests.support.expert_parallel_checkpoint import CRASHED, checkpoints, crash, refusals
from tests.support.expert_parallel_engine import (
    TRAINED,
    base,
    marks,
    orthogonality,
    padded,
    reference,
    replayed,
    skip,
    train,
)
from tests.support.expert_parallel_layer import exchanges
from tests.support.ranks import fork, module_arguments


def two_ranks(rank: int, folders: dict, out: Path, save, *, places: dict) -> None:
    """All experts on two ranks. The last case ends the second rank."""
    for base_name, adapter in TRAINED:
        train(folders, rank, save, base_name, adapter, 2)
    padded(folders, rank, save)
    replayed(folders, rank, save)
    exchanges(rank, save)
    base(folders, rank, save)
    marks(folders, rank, save, places)
    skip(folders, rank, save)
    orthogonality(folders, rank, save)
    reference(folders, rank, save)
    checkpoints(folders, rank, save, out)
    refusals(folders, rank, save, out)
    crash(folders, rank, save, out)


def four_ranks(rank: int, folders: dict, out: Path, save) -> None:
    """Two groups of two ranks, one of four, and all experts on every rank."""
    for size in (2, 4, 1):
        for base_name in ("fp32", "lopsided"):
            train(folders, rank, save, base_name, "oft", size)
        mpu.destroy_model_parallel()


def main() -> None:
    folders, places, out = module_arguments()
    assert fork(2, partial(two_ranks, places=places), folders, Path(out) / "2") == [0, CRASHED]
    assert fork(4, four_ranks, folders, Path(out) / "4") == [0] * 4


if __name__ == "__main__":
    main()
