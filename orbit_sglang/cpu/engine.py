"""This module does what SGLang 0.5.12's CPU engine needs on a machine without a CUDA driver."""

import os
import types
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.state_capturer.base import TopkCaptureOutput
from sglang.srt.utils import get_cpu_ids_by_node

THREADS_VARIABLE = "SGLANG_CPU_OMP_THREADS_BIND"


class TorchWithoutPinning(types.ModuleType):
    """``TorchWithoutPinning`` is ``torch`` for one module; its ``tensor`` and ``zeros`` do not pin memory."""

    def __getattr__(self, name: str):
        return getattr(torch, name)

    @staticmethod
    def tensor(data, *, pin_memory: bool = False, **kwargs) -> torch.Tensor:
        """Returns what ``torch.tensor`` does, never pinned."""
        return torch.tensor(data, **kwargs)

    @staticmethod
    def zeros(*size, pin_memory: bool = False, **kwargs) -> torch.Tensor:
        """Returns what ``torch.zeros`` does, never pinned."""
        return torch.zeros(*size, **kwargs)


def place_ranks(num_ranks: int) -> None:
    """Gives each rank its cores where there are fewer NUMA nodes than ranks.

    SGLang 0.5.12 refuses to do that by itself. Its own variable says where ranks run
    (``model_executor/model_runner.py::ModelRunner.init_threads_binding``); a user's value stays.
    """
    if THREADS_VARIABLE in os.environ or num_ranks <= len(get_cpu_ids_by_node()):
        return
    cores = sorted(os.sched_getaffinity(0))
    of_rank = [cores[rank::num_ranks] or [cores[rank % len(cores)]] for rank in range(num_ranks)]
    os.environ[THREADS_VARIABLE] = "|".join(",".join(map(str, own)) for own in of_rank)


def around_launch(original: Callable, cls: type, server_args: Any, *args: Any, **kwargs: Any) -> tuple:
    """Places the ranks of a server with slots on their cores; runs around ``Engine._launch_subprocesses``."""
    if server_args.enable_orbit_slots:
        place_ranks(server_args.tp_size)
    return original(cls, server_args, *args, **kwargs)


def around_group(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Leaves out NCCL and a custom all-reduce; runs around ``init_model_parallel_group``.

    Ranks on CPUs have gloo, and neither of these.
    """
    return original(*args, **kwargs | {"use_pynccl": False, "use_custom_allreduce": False})


def after_copy_to_cpu(result: None, output: TopkCaptureOutput) -> None:
    """Copies the output indeed; runs after ``TopkCaptureOutput.copy_to_cpu``.

    The next forward pass writes over the buffer. On a CPU torch's ``to("cpu")`` is the same memory, and the overlap
    schedule reads it after that pass.
    """
    output.topk = output.topk.clone()
