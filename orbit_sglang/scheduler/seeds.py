"""This module samples with a seed per request, so that a rollout can be repeated token by token.

The option ``--orbit-seeded-sampling`` asks for it. SGLang 0.5.12 honours ``sampling_seed`` only under
``--enable-deterministic-inference``, which refuses every attention backend that a CPU has. Its seeded sampler is used
as it is.
"""

import functools
import random

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.server_args import get_global_server_args


def after_from_schedule_batch(result: SamplingBatchInfo, cls: type, batch: ScheduleBatch, vocab_size: int) -> None:
    """Gives each request a seed, drawn if it brings none; runs after ``SamplingBatchInfo.from_schedule_batch``."""
    if not get_global_server_args().orbit_seeded_sampling:
        return
    seeds = []
    for req in batch.reqs:
        if req.sampling_params.sampling_seed is None:
            req.sampling_params.sampling_seed = _drawing().getrandbits(31)
        seeds.append(req.sampling_params.sampling_seed)
    result.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=result.temperatures.device)


@functools.cache
def _drawing() -> random.Random:
    # Of its own: the ranks of a server must draw the same seeds, whatever else each of them draws.
    return random.Random(get_global_server_args().random_seed)
