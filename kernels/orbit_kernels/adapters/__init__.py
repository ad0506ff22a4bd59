"""The adapter methods are siblings that differ in how they change a linear, and in nothing else.

They can be imported without torch; the numerics of each method are in ``reference.py`` of its package.
"""

from orbit_kernels.adapters.common.method import AdapterMethod
from orbit_kernels.adapters.lora.method import LoRAMethod
from orbit_kernels.adapters.oft.method import OFTMethod

METHODS: dict[str, type[AdapterMethod]] = {method.type: method for method in (OFTMethod, LoRAMethod)}
"""The table holds every method by its ``orbit.adapter.type``."""

__all__ = ["METHODS", "AdapterMethod", "LoRAMethod", "OFTMethod"]
