"""This package holds the trained part of each frozen linear, in one module for each adapter method."""

from orbit_verl.model.adapters.linear_adapter import LinearAdapter
from orbit_verl.model.adapters.lora import LoRAAdapter
from orbit_verl.model.adapters.oft import OFTAdapter

ADAPTERS: dict[str, type[LinearAdapter]] = {"oft": OFTAdapter, "lora": LoRAAdapter}
"""This maps each ``orbit.adapter.type`` to the class of every linear's adapter."""

__all__ = ["ADAPTERS", "LinearAdapter", "LoRAAdapter", "OFTAdapter"]
