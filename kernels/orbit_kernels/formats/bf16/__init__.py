"""This package has weights that are stored as they are: BF16, or fp32 for tests."""

from orbit_kernels.formats.bf16.format import Bf16Format

__all__ = ["Bf16Format"]
