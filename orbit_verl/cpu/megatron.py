"""Lets megatron-core 0.18.0 run on a machine without CUDA, over gloo. Does nothing where CUDA is present."""

import contextlib
import logging
from typing import Any

import torch

logger = logging.getLogger(__name__)


class _CpuTorch:
    """The ``torch`` of one module, with ``zeros(device="cuda")`` landing on the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*size: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*size, device="cpu" if device == "cuda" else device, **kwargs)


class _NoGenerators:
    """In the place of CUDA's random states: nothing draws from them."""

    @staticmethod
    def fork() -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def install() -> None:
    """Apply the patches once; safe to call again.

    Needed until Megatron-Core asks its configuration for the device instead of CUDA.
    """
    if torch.cuda.is_available():
        return
    import megatron.core.pipeline_parallel.schedules as schedules
    from megatron.core import tensor_parallel

    if isinstance(schedules.torch, _CpuTorch):
        return
    # models/common/embeddings/rotary_pos_embedding.py:162, tensor_parallel/mappings.py:91, p2p_communication.py:211
    torch.cuda.current_device = lambda: torch.device("cpu")
    # pipeline_parallel/p2p_communication.py:263 and :419
    torch.cuda.synchronize = lambda device=None: None
    # tensor_parallel/random.py:290 reads CUDA's generators; dropout is 0, so nothing draws from its seeds
    tensor_parallel.model_parallel_cuda_manual_seed = lambda seed, **kwargs: None
    # transformer_block.py:593 and language_model_embedding.py:149 fork CUDA's generators for the dropout of a sequence's part
    tensor_parallel.get_cuda_rng_tracker = lambda **kwargs: _NoGenerators()
    # tensor_parallel/random.py:499 and :509 save and restore CUDA's generators around recomputed activations
    tensor_parallel.random._get_all_rng_states = lambda: (torch.get_rng_state(),)
    tensor_parallel.random._set_all_rng_states = torch.set_rng_state
    # pipeline_parallel/schedules.py:669, :1056 and :2242
    schedules.torch = _CpuTorch()
    logger.info("no CUDA device: Megatron-Core runs on the CPU")
