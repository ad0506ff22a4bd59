"""INT4 weights, 16-bit activations (W4A16), as compressed-tensors' ``pack-quantized`` stores them."""

from orbit_kernels.formats.int4.format import SHAPE_LEAF, Int4Format

__all__ = ["SHAPE_LEAF", "Int4Format"]
