"""This module reads ``quant_method: compressed-tensors``.

Its formats are pack-quantized, nvfp4-pack-quantized and mxfp4-pack-quantized.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from orbit_kernels.formats.common.weight_format import WeightFormat
from orbit_kernels.formats.int4 import Int4Format
from orbit_kernels.formats.mxfp4 import Mxfp4Format
from orbit_kernels.formats.mxfp4.reference import GROUP as MXFP4_GROUP
from orbit_kernels.formats.nvfp4 import Nvfp4Format
from orbit_kernels.formats.nvfp4.reference import GROUP as NVFP4_GROUP
from orbit_kernels.formats.scheme.fields import Rules, refuse_unknown, require

_WHERE = "quantization_config (compressed-tensors)"
_KNOWN = {"quant_method", "format", "config_groups", "ignore", "quantization_status", "version"}
# Says something about the file without changing how it is read.
_INFORMATIVE = {"global_compression_ratio", "run_compressed"}
_KNOWN_GROUP = {"targets", "weights", "input_activations", "format"}
_KNOWN_ARGUMENTS = {"num_bits", "type", "symmetric", "strategy", "group_size", "dynamic", "actorder", "scale_dtype"}
# How a quantiser chose the values, and the dtype of zero points, which are packed to four bits anyway.
_INFORMATIVE_ARGUMENTS = {"observer", "observer_kwargs", "zp_dtype"}
_MAJOR_VERSION = "0"


def read(config: Mapping[str, Any], dense_dtype: torch.dtype) -> Rules:
    """Returns the rules of a compressed-tensors configuration: a format for each target, exceptions in ``ignore``.

    Raises:
        ValueError: a format, version, strategy, activation order, target or field that is not implemented.
    """
    require(_WHERE, config, "kv_cache_scheme", None)
    refuse_unknown(_WHERE, config, _KNOWN | _INFORMATIVE)
    require(_WHERE, config, "quantization_status", "compressed", None)
    file_format = require(_WHERE, config, "format", *_FORMATS)
    version = str(config.get("version", _MAJOR_VERSION))
    if version.split(".")[0] != _MAJOR_VERSION:
        raise ValueError(f"{_WHERE}: version {version}; versions {_MAJOR_VERSION}.* are known")
    groups = config.get("config_groups") or {}
    if not groups:
        raise ValueError(f"{_WHERE}: no config_groups, so nothing says what is quantised")
    by_name, by_class = [], []
    for name, group in groups.items():
        where = f"{_WHERE} {name}"
        refuse_unknown(where, group, _KNOWN_GROUP)
        require(where, group, "format", file_format, None)
        weight_format = _FORMATS[file_format](where, group, dense_dtype)
        for target in group.get("targets") or ():
            rules = by_class if target == "Linear" else by_name
            rules.append((_target_pattern(where, target), weight_format))
    # A module's name counts before its class, as in SGLang's find_matched_target.
    return Rules(
        formats=tuple(by_name + by_class),
        ignored=tuple(_name_pattern(name) for name in config.get("ignore") or ()),
    )


def _int4(where: str, group: Mapping[str, Any], dense_dtype: torch.dtype) -> WeightFormat:
    weights = _weights(where, group, "int", "group")
    require(where, group, "input_activations", None)
    group_size = weights.get("group_size")
    if not isinstance(group_size, int):
        raise ValueError(f"{where} weights: group_size is {group_size!r}; a number of columns is needed")
    # compressed-tensors stores scales in the dtype of the weights that it quantised.
    scale_dtype = dense_dtype if weights.get("scale_dtype") is None else _dtype(where, weights["scale_dtype"])
    return Int4Format(group_size=group_size, symmetric=weights.get("symmetric", True), scale_dtype=scale_dtype)


def _nvfp4(where: str, group: Mapping[str, Any], dense_dtype: torch.dtype) -> WeightFormat:
    weights = _weights(where, group, "float", "tensor_group")
    _check_fp4(f"{where} weights", weights, NVFP4_GROUP, "torch.float8_e4m3fn")
    inputs = group.get("input_activations")
    if inputs is not None:
        place = f"{where} input_activations"
        _check_arguments(place, inputs, "float", "tensor_group")
        _check_fp4(place, inputs, NVFP4_GROUP, "torch.float8_e4m3fn")
        require(place, inputs, "dynamic", "local")
    return Nvfp4Format(style="compressed-tensors", quantized_input=inputs is not None)


def _mxfp4(where: str, group: Mapping[str, Any], dense_dtype: torch.dtype) -> WeightFormat:
    weights = _weights(where, group, "float", "group")
    _check_fp4(f"{where} weights", weights, MXFP4_GROUP, "torch.uint8")
    require(where, group, "input_activations", None)
    return Mxfp4Format()


_FORMATS: Mapping[str, Callable[[str, Mapping[str, Any], torch.dtype], WeightFormat]] = {
    "pack-quantized": _int4,
    "nvfp4-pack-quantized": _nvfp4,
    "mxfp4-pack-quantized": _mxfp4,
}


def _weights(where: str, group: Mapping[str, Any], kind: str, strategy: str) -> Mapping[str, Any]:
    weights = group.get("weights") or {}
    place = f"{where} weights"
    _check_arguments(place, weights, kind, strategy)
    require(place, weights, "dynamic", False, None)
    return weights


def _check_arguments(where: str, arguments: Mapping[str, Any], kind: str, strategy: str) -> None:
    refuse_unknown(where, arguments, _KNOWN_ARGUMENTS | _INFORMATIVE_ARGUMENTS)
    require(where, arguments, "num_bits", 4)
    require(where, arguments, "type", kind)
    require(where, arguments, "strategy", strategy, None)
    # "group" permutes columns by weight_g_idx; the others order the calibration and leave no trace in the file.
    require(where, arguments, "actorder", "weight", "static", False, None)


def _check_fp4(where: str, arguments: Mapping[str, Any], group_size: int, scale_dtype: str) -> None:
    require(where, arguments, "group_size", group_size)
    require(where, arguments, "symmetric", True, None)
    require(where, arguments, "scale_dtype", scale_dtype, None)


def _dtype(where: str, name: str) -> torch.dtype:
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{where} weights: scale_dtype is {name!r}, which torch does not know")
    return dtype


def _target_pattern(where: str, target: str) -> str:
    if target == "Linear":
        return ".*"
    if not target.startswith("re:") and "." not in target:
        raise ValueError(f"{where}: target {target!r}; implemented: 'Linear', module names, and 're:' expressions")
    return _name_pattern(target)


def _name_pattern(name: str) -> str:
    """Returns a pattern for an exact name, or after ``re:`` for an expression that a name's beginning must match."""
    return f"(?:{name.removeprefix('re:')}).*" if name.startswith("re:") else re.escape(name)
