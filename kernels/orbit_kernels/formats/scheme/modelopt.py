"""This module reads ``quant_method: modelopt`` with ``quant_algo: NVFP4``, as NVIDIA's ModelOpt writes it.

ModelOpt writes it to ``config.json``.
"""

from collections.abc import Mapping
from typing import Any

import torch

from orbit_kernels.formats.nvfp4 import Nvfp4Format
from orbit_kernels.formats.nvfp4.reference import GROUP
from orbit_kernels.formats.scheme.fields import Rules, path_pattern, refuse_unknown, require

_WHERE = "quantization_config (modelopt)"
_KNOWN = {"quant_method", "quant_algo", "group_size", "ignore", "config_groups", "producer"}
_KNOWN_ARGUMENTS = {"num_bits", "type", "group_size", "dynamic"}


def read(config: Mapping[str, Any], dense_dtype: torch.dtype) -> Rules:
    """Returns the rules of an NVFP4 configuration; every linear outside ``ignore`` is quantised.

    Raises:
        ValueError: another algorithm, a quantised KV cache, several groups, or an unknown field.
    """
    require(_WHERE, config, "kv_cache_scheme", None)
    refuse_unknown(_WHERE, config, _KNOWN)
    require(_WHERE, config, "quant_algo", "NVFP4")
    groups = config.get("config_groups") or {}
    if len(groups) > 1:
        raise ValueError(f"{_WHERE}: config_groups {sorted(groups)}; only one group is implemented")
    for name, group in groups.items():
        _check_group(f"{_WHERE} {name}", group)
    if "group_size" in config or not groups:
        require(_WHERE, config, "group_size", GROUP)
    return Rules(
        formats=((".*", Nvfp4Format(style="modelopt")),),
        ignored=tuple(path_pattern(name) for name in config.get("ignore") or ()),
    )


def _check_group(where: str, group: Mapping[str, Any]) -> None:
    refuse_unknown(where, group, {"targets", "weights", "input_activations"})
    require(where, group, "targets", ["Linear"])
    for role in ("weights", "input_activations"):
        arguments = group.get(role) or {}
        refuse_unknown(f"{where} {role}", arguments, _KNOWN_ARGUMENTS)
        require(f"{where} {role}", arguments, "num_bits", 4)
        require(f"{where} {role}", arguments, "type", "float")
        require(f"{where} {role}", arguments, "group_size", GROUP)
        require(f"{where} {role}", arguments, "dynamic", False, None)
