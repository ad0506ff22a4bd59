"""This module says which linears read the same input and are one matrix in a server.

What acts on that input may be tied to one tensor. The module can be imported without torch.
"""

QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")
# Multi-head latent attention: the down-projections of queries and of keys and values (arXiv:2405.04434, section 2.1).
LATENTS = ("q_a_proj", "kv_a_proj_with_mqa")
FUSED_PARTS = (QKV, GATE_UP, LATENTS)


def fused_with(module: str) -> tuple[str, ...]:
    """Returns the Hugging Face names of the linears that are fused with this one, in the order of their rows.

    The linear itself is among them.
    """
    leaf = module.rsplit(".", 1)[-1]
    parts = next((parts for parts in FUSED_PARTS if leaf in parts), (leaf,))
    return tuple(module.removesuffix(leaf) + part for part in parts)
