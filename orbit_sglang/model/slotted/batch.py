"""This module knows which slot each token of the running forward pass uses.

Dimension suffix: T tokens of a batch.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch

from orbit_sglang.control.slots import BASE_SLOT


class BatchSlots:
    """A ``BatchSlots`` holds the slot of every token in the forward pass that is running.

    ``uniform`` is the one slot of the whole batch, known on the host; it is None while tokens may differ, and outside a
    forward pass. ``slot_of_token_T`` holds the same per token at a fixed address, so that a captured CUDA graph replays
    with the slots of the day; outside a pass it is the base slot for all.

    Args:
        capacity_tokens: most tokens of one forward pass.
        device: where the model runs.
    """

    def __init__(self, capacity_tokens: int, device: torch.device):
        self.uniform: int | None = None
        self.slot_of_token_T = torch.full((capacity_tokens,), BASE_SLOT, dtype=torch.int32, device=device)

    @contextlib.contextmanager
    def running(self, slots: Sequence[int], tokens_per_request: Sequence[int] | None) -> Iterator[None]:
        """Describes a batch for the length of its forward pass.

        Args:
            slots: slot of each request.
            tokens_per_request: tokens that each contributes, None for one each.
        """
        per_request = torch.tensor(slots, dtype=torch.int32)
        if tokens_per_request is not None:
            per_request = per_request.repeat_interleave(torch.tensor(tokens_per_request))
        num_tokens = per_request.numel()
        self.slot_of_token_T[:num_tokens].copy_(per_request)
        self.uniform = slots[0] if len(set(slots)) == 1 else None
        try:
            yield
        finally:
            self.uniform = None
            self.slot_of_token_T[:num_tokens].fill_(BASE_SLOT)

    def of_rows(self, num_rows: int) -> int | torch.Tensor:
        """Returns the slot of the first rows of the batch: one for all, or the slot of each [rows, 1]."""
        return self.uniform if self.uniform is not None else self.slot_of_token_T[:num_rows, None]

    def of_tokens(self, token_R: torch.Tensor) -> int | torch.Tensor:
        """Returns the slot of rows that stand for these tokens of the batch: one for all, or each row's [R, 1]."""
        return self.uniform if self.uniform is not None else self.slot_of_token_T[token_R, None]
