"""This package puts an adapter in each slot of SGLang's linears, with one module for each adapter method."""

from orbit_sglang.model.slotted.batch import BatchSlots
from orbit_sglang.model.slotted.experts import AdaptedExpertsInput, CommonExpertAdapter, SlottedExperts
from orbit_sglang.model.slotted.latent import AdaptedLatent
from orbit_sglang.model.slotted.layer import AdaptedLayer
from orbit_sglang.model.slotted.lora import LoRALinear
from orbit_sglang.model.slotted.oft import OFTLinear
from orbit_sglang.model.slotted.slotted_linear import SlottedLinear

LINEARS: dict[str, type[SlottedLinear]] = {"oft": OFTLinear, "lora": LoRALinear}
"""This holds every slotted linear by its ``--orbit-adapter``."""

__all__ = [
    "LINEARS",
    "AdaptedExpertsInput",
    "AdaptedLatent",
    "AdaptedLayer",
    "BatchSlots",
    "LoRALinear",
    "OFTLinear",
    "CommonExpertAdapter",
    "SlottedExperts",
    "SlottedLinear",
]
