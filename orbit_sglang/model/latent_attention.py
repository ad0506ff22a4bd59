"""Multi-head latent attention of DeepSeek-V3 and Kimi-K2 (SGLang's ``DeepseekV2AttentionMLA``), on every device."""

from typing import Any

from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

from orbit_sglang.startup.enabled import slots_enabled


def after_init(result: None, attention: DeepseekV2AttentionMLA, *args: Any, **kwargs: Any) -> None:
    """After ``__init__``: both latents' projections are known as parts of the one linear that SGLang makes of them."""
    if not (attention.has_fused_proj and slots_enabled()):
        return
    layer = attention.fused_qkv_a_proj_with_mqa
    layer.output_sizes = [attention.q_lora_rank, attention.kv_lora_rank + attention.qk_rope_head_dim]
    attention.use_min_latency_fused_a_gemm = False  # it reads the weight past quant_method.apply
