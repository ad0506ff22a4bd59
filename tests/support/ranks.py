"""Ranks of a test: a module that is run in a process of its own, which forks them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist


def run_module(python: str, module: str, *arguments: Any) -> None:
    """Run a module whose arguments are JSON to its end; nothing of it is left when this returns."""
    process = subprocess.Popen(
        [python, "-W", "ignore", "-m", module, *map(json.dumps, arguments)],
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.wait(timeout=300) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def module_arguments() -> list[Any]:
    """In the module: what ``run_module`` was given."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    return [json.loads(argument) for argument in sys.argv[1:]]


def fork(ranks: int, cases: Callable, folders: dict[str, str], out: Path) -> list[int]:
    """Exit codes of the ranks, each of which calls ``cases(rank, folders, out, save)`` in one process group."""
    out.mkdir()
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            _run(rank, ranks, cases, folders, out)
            os._exit(0)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def read(out: Path, ranks: int, case: Any) -> list[dict[str, torch.Tensor]]:
    """What each rank saved as ``case``."""
    return [safetensors.torch.load_file(out / f"{case}_{rank}") for rank in range(ranks)]


def _run(rank: int, ranks: int, cases: Callable, folders: dict[str, str], out: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{out / 'store'}", rank=rank, world_size=ranks)

    def save(case: str, tensors: dict[str, torch.Tensor]) -> None:
        contiguous = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
        safetensors.torch.save_file(contiguous, out / f"{case}_{rank}")

    cases(rank, folders, out, save)
