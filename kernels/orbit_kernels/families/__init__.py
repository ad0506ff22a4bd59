"""This package has the families of decoders: one module a family says what its Hugging Face configuration means.

A family whose attention and MLP exist already is a module here and a line in ``FAMILIES``. New mathematics are a field of
``DecoderArchitecture``, which the trainer's model (``orbit_verl/model``) reads; SGLang has models of its own. What else a
family may need, such as linears that SGLang fuses differently, stands under "To add" in ``docs/architecture.md``.
"""

from typing import Any

from orbit_kernels.families import deepseek_v3, kimi_k2, llama, qwen3, qwen3_moe
from orbit_kernels.families.architecture import DecoderArchitecture, LatentAttention, MixtureOfExperts
from orbit_kernels.families.family import Family

FAMILIES = (llama.FAMILY, qwen3.FAMILY, qwen3_moe.FAMILY, deepseek_v3.FAMILY, kimi_k2.FAMILY)

__all__ = [
    "FAMILIES",
    "DecoderArchitecture",
    "Family",
    "LatentAttention",
    "MixtureOfExperts",
    "family_of",
    "read_architecture",
]


def read_architecture(hf_config: Any) -> DecoderArchitecture:
    """Returns the decoder that a transformers configuration describes.

    Raises:
        ValueError: the architecture, a quantisation, or a field that changes the mathematics is not supported.
    """
    known = {family.architecture: family for family in FAMILIES}
    names = list(hf_config.architectures or [])
    if len(names) != 1 or names[0] not in known:
        raise ValueError(f"architectures={names}: must be one of {sorted(known)}; other families are not implemented")
    return known[names[0]].read(hf_config)


def family_of(model_type: str | None) -> Family | None:
    """Returns the family of a ``model_type`` in ``config.json``; None for one that is not known."""
    return next((family for family in FAMILIES if model_type in family.model_types), None)
