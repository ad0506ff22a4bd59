"""This module measures the trainer's memory: what is resident, in exact sizes, and the peak that one update adds."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

PREFIX = "orbit/memory"

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


def resident_bytes(engine) -> dict[str, int]:
    """Returns the bytes of the base, the adapter, its gradients and its optimiser state on this rank, as metrics.

    Gradients are counted at their size while an update runs: one fp32 tensor for each trained one.
    """
    trained = engine.adapter.named_parameters()
    trained_ids = {id(parameter) for parameter in trained.values()}
    frozen = [
        tensor
        for chunk in engine.module
        for tensor in (*chunk.parameters(), *chunk.buffers())
        if id(tensor) not in trained_ids
    ]
    return {
        f"{PREFIX}/base_bytes": sum(tensor.nbytes for tensor in frozen),
        f"{PREFIX}/adapter_bytes": engine.adapter.num_bytes,
        f"{PREFIX}/gradient_bytes": sum(4 * parameter.numel() for parameter in trained.values()),
        f"{PREFIX}/optimizer_bytes": 0 if engine.optimizer is None else engine.optimizer.num_bytes,
    }


class PeakMeter:
    """A `PeakMeter` measures the memory that a piece of work needs beyond what was resident when it began.

    On CUDA it reads the allocator's peak. On a CPU it reads the process's peak resident set, which Linux resets on
    request.
    """

    def __init__(self):
        self.peak_bytes = 0

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        """Measures the body; the result is in ``peak_bytes``."""
        before = self._reset()
        yield
        self.peak_bytes = max(0, self._peak() - before)

    def metrics(self) -> dict[str, int]:
        """Returns the last measurement."""
        return {f"{PREFIX}/activation_peak_bytes": self.peak_bytes}

    @staticmethod
    def _reset() -> int:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        _CLEAR_REFS.write_text("5")  # resets VmHWM (proc(5))
        return _status_bytes("VmRSS")

    @staticmethod
    def _peak() -> int:
        return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024
