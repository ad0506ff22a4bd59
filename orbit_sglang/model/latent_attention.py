"""This module adapts the latent attention of DeepSeek-V3 and Kimi-K2, on every device.

It is SGLang's ``DeepseekV2AttentionMLA``, multi-head latent attention.
"""

from typing import Any

from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

from orbit_sglang.startup.enabled import slots_enabled


def after_init(result: None, attention: DeepseekV2AttentionMLA, *args: Any, **kwargs: Any) -> None:
    """Names both latents' projections as parts of the one linear that SGLang makes of them; runs after ``__init__``."""
    if not (attention.has_fused_proj and slots_enabled()):
        return
    layer = attention.fused_qkv_a_proj_with_mqa
    layer.output_sizes = [attention.q_lora_rank, attention.kv_lora_rank + attention.qk_rope_head_dim]
    attention.use_min_latency_fused_a_gemm = False  # it reads the weight past quant_method.apply
