"""What SGLang 0.5.12's CPU engine needs on a machine without a CUDA driver."""

import os
import types
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.state_capturer.base import TopkCaptureOutput
from sglang.srt.utils import get_cpu_ids_by_node

from orbit_sglang.upstream.hooks import CpuAttribute, Hook

THREADS_VARIABLE = "SGLANG_CPU_OMP_THREADS_BIND"


class _TorchWithoutPinning(types.ModuleType):
    """``torch`` for one module, whose ``tensor`` and ``zeros`` do not pin memory."""

    def __getattr__(self, name: str):
        return getattr(torch, name)

    @staticmethod
    def tensor(data, *, pin_memory: bool = False, **kwargs) -> torch.Tensor:
        return torch.tensor(data, **kwargs)

    @staticmethod
    def zeros(*size, pin_memory: bool = False, **kwargs) -> torch.Tensor:
        return torch.zeros(*size, **kwargs)


def place_ranks(num_ranks: int) -> None:
    """Give each rank its cores where there are fewer NUMA nodes than ranks, which SGLang 0.5.12 refuses to do by itself.

    Its own variable says where ranks run (``model_executor/model_runner.py:3096``); a user's value stays.
    """
    if THREADS_VARIABLE in os.environ or num_ranks <= len(get_cpu_ids_by_node()):
        return
    cores = sorted(os.sched_getaffinity(0))
    of_rank = [cores[rank::num_ranks] or [cores[rank % len(cores)]] for rank in range(num_ranks)]
    os.environ[THREADS_VARIABLE] = "|".join(",".join(map(str, own)) for own in of_rank)


def around_launch(original: Callable, cls: type, server_args: Any, *args: Any, **kwargs: Any) -> tuple:
    """Around ``Engine._launch_subprocesses``."""
    if server_args.enable_orbit_slots:
        place_ranks(server_args.tp_size)
    return original(cls, server_args, *args, **kwargs)


def around_group(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Around ``init_model_parallel_group``: ranks on CPUs have gloo, and neither NCCL nor a custom all-reduce."""
    return original(*args, **kwargs | {"use_pynccl": False, "use_custom_allreduce": False})


def after_copy_to_cpu(result: None, output: TopkCaptureOutput) -> None:
    """After ``TopkCaptureOutput.copy_to_cpu``: a copy indeed, as the next forward pass writes over the buffer.

    On a CPU torch's ``to("cpu")`` is the same memory, and the overlap schedule reads it after that pass.
    """
    output.topk = output.topk.clone()


def hook_table() -> list[Hook | CpuAttribute]:
    """Let the CPU engine return log-probs of the prompt and routed experts, and have several ranks.

    ``layers/logits_processor.py:542,545,616`` and ``state_capturer/base.py:46`` of SGLang 0.5.12 pin memory without asking
    whether there is an accelerator to pin it for, and torch refuses. Can go when those lines use ``is_pin_memory_available``.
    """
    pinning = ("sglang.srt.layers.logits_processor.torch", "sglang.srt.state_capturer.base.torch")
    without = _TorchWithoutPinning("torch")
    group = "sglang.srt.distributed.parallel_state.init_model_parallel_group"
    return [
        *(CpuAttribute(target, expected=torch, value=without) for target in pinning),
        Hook(
            "sglang.srt.entrypoints.engine.Engine._launch_subprocesses",
            HookType.AROUND,
            around_launch,
            ("cls", "server_args"),
            cpu_only=True,
        ),
        Hook(
            "sglang.srt.state_capturer.base.TopkCaptureOutput.copy_to_cpu",
            HookType.AFTER,
            after_copy_to_cpu,
            ("self",),
            cpu_only=True,
        ),
        Hook(group, HookType.AROUND, around_group, ("group_ranks", "local_rank", "backend"), cpu_only=True),
    ]
