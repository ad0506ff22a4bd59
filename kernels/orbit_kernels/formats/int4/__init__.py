"""This package has INT4 weights with 16-bit activations (W4A16), as ``pack-quantized`` of compressed-tensors."""

from orbit_kernels.formats.int4.format import SHAPE_LEAF, Int4Format

__all__ = ["SHAPE_LEAF", "Int4Format"]
