"""This module reads Llama."""

from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from orbit_kernels.families.family import Family

FAMILY = Family(architecture="LlamaForCausalLM", model_types=("llama",), rotary=LlamaRotaryEmbedding)
