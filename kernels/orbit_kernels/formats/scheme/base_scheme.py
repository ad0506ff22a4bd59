"""This module has the scheme of a base model, and the reader that chooses among the configuration styles."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from orbit_kernels.formats.bf16 import Bf16Format
from orbit_kernels.formats.common.weight_format import WeightFormat
from orbit_kernels.formats.scheme import compressed_tensors, fp8, modelopt
from orbit_kernels.formats.scheme.fields import Rules

_READERS: Mapping[str, Callable[[Mapping[str, Any], torch.dtype], Rules]] = {
    "fp8": fp8.read,
    "compressed-tensors": compressed_tensors.read,
    "modelopt": modelopt.read,
}
# SGLang quantises linears only, and its head is none, whatever the configuration says; nor does it quantise routers.
_NEVER_QUANTIZED = (r"(.*\.)?lm_head", r".*\.mlp\.gate")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseScheme:
    """A ``BaseScheme`` gives the format of every linear of a base model.

    Attributes:
        dense: format of what is not quantised.
        rules: formats and exceptions by module name.
    """

    dense: Bf16Format
    rules: Rules = Rules()

    def format_of(self, module: str) -> WeightFormat:
        """Returns the format of a linear by its Hugging Face name, e.g. ``model.layers.0.mlp.up_proj``."""
        if any(re.fullmatch(pattern, module) for pattern in (*_NEVER_QUANTIZED, *self.rules.ignored)):
            return self.dense
        matching = (found for pattern, found in self.rules.formats if re.fullmatch(pattern, module))
        return next(matching, self.dense)

    def common_format(self, modules: Sequence[str]) -> WeightFormat:
        """Returns the format of linears that are multiplied as one.

        Args:
            modules: their Hugging Face names.

        Raises:
            ValueError: they have different ones.
        """
        first, *others = modules
        common = self.format_of(first)
        for module in others:
            found = self.format_of(module)
            if found != common:
                raise ValueError(
                    f"{first} is {common.describe()}; {module} is {found.describe()}: they are computed as one, by "
                    "trainer and server; quantise them alike"
                )
        return common


def read_base_scheme(hf_config: Mapping[str, Any]) -> BaseScheme:
    """Returns the scheme that a checkpoint's ``config.json`` describes.

    Args:
        hf_config: the file's content; ``quantization_config`` may be absent, or inside the ``text_config`` of a model
            that has more than text (Kimi-K2.5).

    Raises:
        ValueError: a quantisation, or any setting of one, that is not implemented; it is named.
    """
    stated = {key: value for key, value in hf_config.items() if value is not None}
    hf_config = {**stated.get("text_config", {}), **stated}
    dense = Bf16Format(dtype=_dtype(hf_config))
    config = hf_config.get("quantization_config")
    if config is None:
        return BaseScheme(dense=dense)
    method = config.get("quant_method")
    if method not in _READERS:
        raise ValueError(f"quantization_config: quant_method is {method!r}; implemented: {', '.join(_READERS)}")
    if hf_config.get("expert_dtype") is not None:
        raise ValueError(
            f"config.json: expert_dtype {hf_config['expert_dtype']!r}: experts of another format than the linears are "
            "not read yet"
        )
    return BaseScheme(dense=dense, rules=_READERS[method](config, dense.dtype))


@functools.cache
def _dtypes() -> dict[str, torch.dtype]:
    return {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}


def _dtype(hf_config: Mapping[str, Any]) -> torch.dtype:
    """Returns the dtype of unquantised weights; files written by transformers before 5 name it ``torch_dtype``."""
    name = hf_config.get("dtype", hf_config.get("torch_dtype"))
    if name not in _dtypes():
        raise ValueError(f"config.json: dtype is {name!r}; one of {', '.join(_dtypes())} is needed")
    return _dtypes()[name]
