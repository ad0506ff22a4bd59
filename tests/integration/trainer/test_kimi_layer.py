"""One layer of Kimi-K2.6's sizes, but with few experts: what `benchmarks.kimi_layer` measures for all 384."""

import pytest
from megatron.core import parallel_state as mpu

from benchmarks.kimi_layer import TARGETS, measure
from orbit_verl.config.keys import AdapterSettings, BaseSettings
from orbit_verl.cpu import megatron as megatron_cpu

EXPERTS, HIDDEN, FFN = 16, 7168, 2048
PACKED, BF16 = 0.5 + 2 / 32, 2  # bytes a weight: INT4 with a BF16 scale for 32, and BF16


def test_the_layer_takes_the_bytes_of_its_stored_tensors_and_a_pass_that_of_a_chunk():
    megatron_cpu.install()
    mpu.initialize_model_parallel()
    settings = AdapterSettings(target_modules=TARGETS)
    report = measure(32, settings, BaseSettings(experts_per_chunk=2), EXPERTS)
    expert = 3 * HIDDEN * FFN
    latents, queries, keys_values = HIDDEN * (1536 + 512 + 64), 1536 * 64 * 192, 512 * 64 * 256
    others = latents + queries + keys_values + 64 * 128 * HIDDEN + expert + HIDDEN * EXPERTS + 2 * 512 * HIDDEN
    expected = EXPERTS * expert * PACKED + others * BF16
    assert report["base, GiB"] * 2**30 == pytest.approx(expected, rel=1e-3)
    assert report["experts with tokens"] > EXPERTS // 2
    # Two experts' gate and up in BF16 are 0.11 GiB; all sixteen would be 0.88.
    assert report["peak of the pass beyond that, GiB"] < 0.6
