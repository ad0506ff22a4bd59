"""This package has FP8 E4M3 weights with a scale for each block of 128x128, as DeepSeek and Qwen3-FP8 store them."""

from orbit_kernels.formats.fp8.format import Fp8Format

__all__ = ["Fp8Format"]
