"""This module applies the masks of structured output on a CPU."""

from typing import Any

import torch
from sglang.srt.constrained.torch_ops.bitmask_ops import apply_token_bitmask_inplace_torch


def apply_vocab_mask(grammar: Any, logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
    """Gives the tokens that a grammar forbids the logit minus infinity, in place.

    On a CPU it replaces ``XGrammarGrammar.apply_vocab_mask``, which raises there and ends the server
    (``constrained/xgrammar_backend.py::XGrammarGrammar.apply_vocab_mask``).

    Args:
        grammar: the grammar of one of the requests.
        logits: of the batch, [requests, vocabulary].
        vocab_mask: a bit for each token, int32 [requests, vocabulary / 32].
    """
    apply_token_bitmask_inplace_torch(logits, vocab_mask)
