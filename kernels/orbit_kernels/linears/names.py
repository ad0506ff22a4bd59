"""This module has what both plugins read from the names of a Hugging Face checkpoint.

It can be imported without torch.
"""

import re
from collections.abc import Collection

EXPERTS, SHARED_EXPERT, ROUTER = ".mlp.experts.", ".mlp.shared_experts", ".mlp.gate"
ROUTER_BIAS = f"{ROUTER}.e_score_correction_bias"
EXPERT_NUMBER = re.compile(rf"(?<={re.escape(EXPERTS)})\d+(?=\.)")
"""The pattern finds the number of a routed expert in the name of its module or tensor."""

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_OTHER_INPUTS = ("vision_tower.", "mm_projector.")


def layer_number(name: str) -> int | None:
    """Returns the decoder layer of a module or tensor; None outside of the layers."""
    found = _LAYER.search(name)
    return found and int(found[1])


def without_expert(name: str) -> str:
    """Returns the name of what all routed experts of a layer share, from that of one expert's; others stay."""
    return name.replace(f"{EXPERTS}{found[0]}.", EXPERTS) if (found := EXPERT_NUMBER.search(name)) else name


def is_language(name: str) -> bool:
    """Returns whether a module or tensor belongs to the language model, and not to what sees images."""
    return not name.startswith(_OTHER_INPUTS)


def unused_tensors(names: Collection[str], *, prefix: str, num_layers: int | None, tied_head: bool) -> frozenset[str]:
    """Returns those of a checkpoint's tensors that may be there although no language model needs them.

    Args:
        names: of all tensors.
        prefix: of the language model's.
        num_layers: layers from that number on predict further tokens (DeepSeek-V3's MTP); None where there are no such.
        tied_head: whether the head is the embedding matrix, and may be stored a second time.
    """
    beyond = {name for name in names if num_layers is not None and (layer_number(name) or 0) >= num_layers}
    other_inputs = {name for name in names if prefix and not is_language(name)}
    return frozenset(beyond | other_inputs | ({f"{prefix}lm_head.weight"} if tied_head else set()))
