"""This module reads dense Qwen3."""

from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from orbit_kernels.families.family import Family

FAMILY = Family(architecture="Qwen3ForCausalLM", model_types=("qwen3",), rotary=Qwen3RotaryEmbedding, qk_norm=True)
