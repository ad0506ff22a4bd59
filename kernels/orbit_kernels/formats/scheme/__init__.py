"""This package reads which linear of a checkpoint has which format, as its ``config.json`` says.

A configuration that asks for anything that is not implemented is refused by name: a base that is read differently in the
trainer and in the server is worse than none. One module reads each ``quant_method``.
"""

from orbit_kernels.formats.scheme.base_scheme import BaseScheme, read_base_scheme

__all__ = ["BaseScheme", "read_base_scheme"]
