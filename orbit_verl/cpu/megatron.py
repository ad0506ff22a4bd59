"""This module lets megatron-core 0.18.0 run without CUDA, over gloo. It does nothing where CUDA is present."""

import contextlib
import logging
import pkgutil
from typing import Any

import torch

from orbit_kernels.upstream.ledger import NotInPlaceError, resolve_problem

logger = logging.getLogger(__name__)


class CpuTorch:
    """A `CpuTorch` is the ``torch`` of one module, whose ``zeros(device="cuda")`` lands on the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*size: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        """Does what ``torch.zeros`` does, on the CPU where CUDA is asked for."""
        return torch.zeros(*size, device="cpu" if device == "cuda" else device, **kwargs)


class NoGenerators:
    """A `NoGenerators` takes the place of CUDA's random states, from which nothing draws."""

    @staticmethod
    def fork() -> contextlib.AbstractContextManager[None]:
        """Takes no state."""
        return contextlib.nullcontext()


def current_device() -> torch.device:
    """Returns the device on which Megatron-Core allocates."""
    return torch.device("cpu")


def synchronize(device: Any = None) -> None:
    """Waits for nothing, since nothing runs asynchronously."""


def seed_generators(seed: int, **kwargs: Any) -> None:
    """Seeds nothing: dropout is 0, so nothing draws from CUDA's generators."""


def rng_tracker(**kwargs: Any) -> NoGenerators:
    """Returns a tracker without generators."""
    return NoGenerators()


def rng_states() -> tuple[torch.Tensor]:
    """Returns the state of the CPU's generator alone."""
    return (torch.get_rng_state(),)


def set_rng_states(state: torch.Tensor) -> None:
    """Restores the CPU's generator alone."""
    torch.set_rng_state(state)


REPLACED = {
    "torch.cuda.current_device": current_device,
    "torch.cuda.synchronize": synchronize,
    "megatron.core.tensor_parallel.model_parallel_cuda_manual_seed": seed_generators,
    "megatron.core.tensor_parallel.get_cuda_rng_tracker": rng_tracker,
    "megatron.core.tensor_parallel.random._get_all_rng_states": rng_states,
    "megatron.core.tensor_parallel.random._set_all_rng_states": set_rng_states,
    "megatron.core.pipeline_parallel.schedules.torch": CpuTorch(),
}
"""This maps each attribute to what takes its place; ``orbit_verl.changes`` says why."""


def install() -> None:
    """Replaces the attributes; it is safe to call again.

    Raises:
        NotInPlaceError: Megatron-Core or torch has one of them no longer.
    """
    if torch.cuda.is_available():
        return
    if problems := [f"{target}: {problem}" for target in REPLACED if (problem := resolve_problem(target))]:
        raise NotInPlaceError(f"{'; '.join(problems)}. Install the pinned stack (make setup)")
    for target, value in REPLACED.items():
        holder, _, name = target.rpartition(".")
        setattr(pkgutil.resolve_name(holder), name, value)
    logger.info("no CUDA device: Megatron-Core runs on the CPU")
