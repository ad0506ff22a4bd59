"""SGLang's linears with an adapter in each slot: one module for each adapter method."""

from orbit_sglang.slotted.base import SlottedLinear
from orbit_sglang.slotted.batch import BatchSlots
from orbit_sglang.slotted.experts import AdaptedExpertsInput, SharedExperts, SlottedExperts
from orbit_sglang.slotted.latent import AdaptedLatent
from orbit_sglang.slotted.layer import AdaptedLayer
from orbit_sglang.slotted.lora import LoRALinear
from orbit_sglang.slotted.oft import OFTLinear

LINEARS: dict[str, type[SlottedLinear]] = {"oft": OFTLinear, "lora": LoRALinear}
"""Every slotted linear by its ``--orbit-adapter``."""

__all__ = [
    "LINEARS",
    "AdaptedExpertsInput",
    "AdaptedLatent",
    "AdaptedLayer",
    "BatchSlots",
    "LoRALinear",
    "OFTLinear",
    "SharedExperts",
    "SlottedExperts",
    "SlottedLinear",
]
