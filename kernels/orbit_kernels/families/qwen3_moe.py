"""This module reads Qwen3 with experts in its layers."""

from typing import Any

from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

from orbit_kernels.families.architecture import MixtureOfExperts
from orbit_kernels.families.family import Family


def _experts(hf_config: Any) -> MixtureOfExperts:
    """Reads the experts; layers have them by transformers' rule (Qwen3MoeDecoderLayer)."""
    dense, step = hf_config.mlp_only_layers or (), hf_config.decoder_sparse_step
    return MixtureOfExperts(
        layers=frozenset(
            layer for layer in range(hf_config.num_hidden_layers) if layer not in dense and (layer + 1) % step == 0
        ),
        num_experts=hf_config.num_experts,
        top_k=hf_config.num_experts_per_tok,
        ffn_size=hf_config.moe_intermediate_size,
        normalized=hf_config.norm_topk_prob,
    )


FAMILY = Family(
    architecture="Qwen3MoeForCausalLM",
    model_types=("qwen3_moe",),
    rotary=Qwen3MoeRotaryEmbedding,
    qk_norm=True,
    moe=_experts,
)
