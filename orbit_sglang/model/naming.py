"""SGLang's names of linears and Hugging Face's."""

import re
from collections.abc import Iterable, Iterator, Mapping

import torch

from orbit_kernels.linears import fusing
from orbit_kernels.linears.names import is_language

FUSED_PARTS = dict(zip(("qkv_proj", "gate_up_proj", "fused_qkv_a_proj_with_mqa"), fusing.FUSED_PARTS, strict=True))
"""Leaf names of the parts, in the order of their rows, by the leaf name of SGLang's fused linear."""


def language_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules of the language model, by name."""
    return ((name, module) for name, module in model.named_modules() if is_language(name))


def without_language_prefix(patterns: Iterable[str]) -> list[str]:
    """Names of modules, or ``re:`` patterns of names, as SGLang calls those of a language model while it builds it."""
    return [re.sub(r"^(re:)?language_model\\?\.", r"\1", pattern) for pattern in patterns]


def packed_modules_mapping(known: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """What SGLang calls the parts of fused linears, completed; its own entries are kept.

    It matches the names of unquantised linears through that. Its Qwen3, Llama and Kimi-K2.5 models do not define it: a
    linear is then quantised although the checkpoint's is not, and stays uninitialised.
    """
    return {**{name: list(parts) for name, parts in FUSED_PARTS.items()}, **known}


def part_names(module: str) -> tuple[str, ...]:
    """Hugging Face names of the linears behind one of SGLang's; the name itself where nothing is fused."""
    leaf = module.rsplit(".", 1)[-1]
    return tuple(module.removesuffix(leaf) + part for part in FUSED_PARTS.get(leaf, (leaf,)))
