"""The ranks of test_trainer_expert_parallel: one process imports everything and forks them.

Every rank writes ``<case>_<rank>`` for each case, and the test compares them with one process.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from expert_parallel_checkpoint import CRASHED, checkpoints, crash, refusals
from expert_parallel_engine import TRAINED, base, marks, orthogonality, padded, reference, replayed, skip, train
from expert_parallel_layer import exchanges
from megatron.core import parallel_state as mpu
from safetensors.torch import save_file


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


def run(rank: int, ranks: int, cases, folders: dict, out: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{out / 'store'}", rank=rank, world_size=ranks)

    def save(case: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, out / f"{case}_{rank}")

    cases(rank, folders, out, save)


def fork(ranks: int, cases, folders: dict, out: Path) -> list[int]:
    """Exit codes of the ranks."""
    out.mkdir()
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            run(rank, ranks, cases, folders, out)
            os._exit(0)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main() -> None:
    folders, places, out = (json.loads(argument) for argument in sys.argv[1:])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    assert fork(2, partial(two_ranks, places=places), folders, Path(out) / "2") == [0, CRASHED]
    assert fork(4, four_ranks, folders, Path(out) / "4") == [0] * 4


if __name__ == "__main__":
    main()
