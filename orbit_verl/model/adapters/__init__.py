"""The trained part of each frozen linear: one module for each adapter method."""

from orbit_verl.model.adapters.linear_adapter import LinearAdapter
from orbit_verl.model.adapters.lora import LoRAAdapter
from orbit_verl.model.adapters.oft import OFTAdapter

ADAPTERS: dict[str, type[LinearAdapter]] = {"oft": OFTAdapter, "lora": LoRAAdapter}
"""Every linear's adapter by its ``orbit.adapter.type``."""

__all__ = ["ADAPTERS", "LinearAdapter", "LoRAAdapter", "OFTAdapter"]
