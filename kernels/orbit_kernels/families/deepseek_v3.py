"""This module reads DeepSeek-V3, and Kimi-K2 under its own model type.

Both have latent attention, experts in groups and a shared expert.
"""

from typing import Any

from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding, yarn_get_mscale

from orbit_kernels.families.architecture import LatentAttention, MixtureOfExperts
from orbit_kernels.families.family import Family


def _latent(hf_config: Any) -> LatentAttention:
    """Reads the latent attention; the scale of the scores is transformers' (DeepseekV3Attention)."""
    if hf_config.q_lora_rank is None:
        raise ValueError("q_lora_rank=None: queries without a latent are not implemented; use another checkpoint")
    scale, rope = hf_config.qk_head_dim**-0.5, hf_config.rope_parameters
    if rope["rope_type"] == "yarn":
        scale *= yarn_get_mscale(rope["factor"], rope.get("mscale_all_dim") or 0) ** 2
    return LatentAttention(
        q_lora_rank=hf_config.q_lora_rank,
        kv_lora_rank=hf_config.kv_lora_rank,
        qk_nope_head_dim=hf_config.qk_nope_head_dim,
        qk_rope_head_dim=hf_config.qk_rope_head_dim,
        v_head_dim=hf_config.v_head_dim,
        softmax_scale=scale,
    )


def _experts(hf_config: Any) -> MixtureOfExperts:
    groups, chosen = hf_config.n_group or 1, hf_config.topk_group or 1
    experts, top_k = hf_config.n_routed_experts, hf_config.num_experts_per_tok
    if experts % groups or chosen > groups or top_k > chosen * (experts // groups):
        raise ValueError(
            f"n_group={groups}, topk_group={chosen}, n_routed_experts={experts}, num_experts_per_tok={top_k}: groups must "
            "divide the experts, and the chosen ones must hold a token's experts; check config.json"
        )
    return MixtureOfExperts(
        layers=frozenset(range(hf_config.first_k_dense_replace, hf_config.num_hidden_layers)),
        num_experts=experts,
        top_k=top_k,
        ffn_size=hf_config.moe_intermediate_size,
        normalized=hf_config.norm_topk_prob,
        scoring="sigmoid",
        num_groups=groups,
        top_groups=chosen,
        scale=hf_config.routed_scaling_factor,
        shared_ffn_size=hf_config.moe_intermediate_size * (hf_config.n_shared_experts or 0),
    )


FAMILY = Family(
    architecture="DeepseekV3ForCausalLM",
    model_types=("deepseek_v3", "kimi_k2"),
    rotary=DeepseekV3RotaryEmbedding,
    rope_types=("default", "yarn"),
    latent=_latent,
    moe=_experts,
    # Read in srt/models/deepseek_v2.py::MoEGate.__init__ and srt/models/deepseek_v2.py::DeepseekV2DecoderLayer._is_layer_sparse.
    published={"topk_method": "noaux_tc", "moe_layer_freq": 1, "scoring_func": "sigmoid"},
)
