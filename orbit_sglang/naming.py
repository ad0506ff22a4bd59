"""SGLang's names of linears and Hugging Face's."""

from orbit_kernels import fusing

FUSED_PARTS = dict(zip(("qkv_proj", "gate_up_proj"), fusing.FUSED_PARTS, strict=True))
"""Leaf names of the parts, in the order of their rows, by the leaf name of SGLang's fused linear."""


def part_names(module: str) -> tuple[str, ...]:
    """Hugging Face names of the linears behind one of SGLang's; the name itself where nothing is fused."""
    leaf = module.rsplit(".", 1)[-1]
    return tuple(module.removesuffix(leaf) + part for part in FUSED_PARTS.get(leaf, (leaf,)))
