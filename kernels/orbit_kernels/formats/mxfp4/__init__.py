"""This package has MXFP4: four-bit floats in groups of 32 with power-of-two scales (OCP Microscaling Formats 1.0)."""

from orbit_kernels.formats.mxfp4.format import Mxfp4Format

__all__ = ["Mxfp4Format"]
