"""This module maps SGLang's names of linears to Hugging Face's."""

import re
from collections.abc import Iterable, Iterator, Mapping

import torch

from orbit_kernels.linears import fusing
from orbit_kernels.linears.names import is_language

FUSED_PARTS = dict(zip(("qkv_proj", "gate_up_proj", "fused_qkv_a_proj_with_mqa"), fusing.FUSED_PARTS, strict=True))
"""This has leaf names of the parts, in the order of their rows, by the leaf name of SGLang's fused linear."""


def language_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yields the modules of the language model, by name."""
    return ((name, module) for name, module in model.named_modules() if is_language(name))


def without_language_prefix(patterns: Iterable[str]) -> list[str]:
    """Returns names of modules, or ``re:`` patterns of names, as SGLang has them while it builds a language model."""
    return [re.sub(r"^(re:)?language_model\\?\.", r"\1", pattern) for pattern in patterns]


def packed_modules_mapping(known: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Returns what SGLang calls the parts of fused linears, completed; its own entries are kept.

    It matches the names of unquantised linears through that. Its Qwen3, Llama and Kimi-K2.5 models do not define it: a
    linear is then quantised although the checkpoint's is not, and stays uninitialised.
    """
    return {**{name: list(parts) for name, parts in FUSED_PARTS.items()}, **known}


def part_names(module: str) -> tuple[str, ...]:
    """Returns the Hugging Face names of the linears behind one of SGLang's.

    Where nothing is fused that is the name itself.
    """
    leaf = module.rsplit(".", 1)[-1]
    return tuple(module.removesuffix(leaf) + part for part in FUSED_PARTS.get(leaf, (leaf,)))
