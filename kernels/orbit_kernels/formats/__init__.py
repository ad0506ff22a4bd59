"""This package has the weight formats: each says how a frozen weight is stored, and what it means.

Each format has a package with ``format.py`` (names, shapes, checks, sharding) and ``reference.py`` (plain torch, the
specification of every later kernel). ``scheme`` reads which linear of a checkpoint has which format.
"""

from orbit_kernels.formats.bf16 import Bf16Format
from orbit_kernels.formats.common.weight_format import Tensors, TensorSpec, WeightFormat
from orbit_kernels.formats.fp8 import Fp8Format
from orbit_kernels.formats.int4 import Int4Format
from orbit_kernels.formats.mxfp4 import Mxfp4Format
from orbit_kernels.formats.nvfp4 import Nvfp4Format
from orbit_kernels.formats.scheme import BaseScheme, read_base_scheme

__all__ = [
    "BaseScheme",
    "Bf16Format",
    "Fp8Format",
    "Int4Format",
    "Mxfp4Format",
    "Nvfp4Format",
    "TensorSpec",
    "Tensors",
    "WeightFormat",
    "read_base_scheme",
]
