"""This package has NVFP4: four-bit floats in groups of 16 with E4M3 scales and one fp32 scale for the whole weight."""

from orbit_kernels.formats.nvfp4.format import Nvfp4Format

__all__ = ["Nvfp4Format"]
