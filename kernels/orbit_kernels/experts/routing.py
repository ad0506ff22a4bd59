"""This module goes from a router's choice to rows that stand grouped by expert, and back to tokens.

Every sum over the experts of a token runs in fp32, by ascending expert, and is rounded once: its result depends neither on
the order in which the router lists them nor on how the experts are cut into chunks.

The dimension suffixes are: T tokens, K experts of a token, R rows (T * K pairs of token and expert, by expert, then by
token), D width.
"""

import dataclasses
from collections.abc import Iterator

import torch


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ExpertChunk:
    """An ``ExpertChunk`` has experts that are computed together, and their rows.

    Attributes:
        experts: ascending; each has at least one row.
        counts: rows of each.
        token_R: token of each row of the chunk.
    """

    experts: tuple[int, ...]
    counts: tuple[int, ...]
    token_R: torch.Tensor


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Dispatch:
    """A ``Dispatch`` says where the rows of each expert come from.

    Attributes:
        experts: those with at least one token, ascending.
        counts: rows of each.
        choice_R: index into the router's flattened choice [T * K] of each row.
        row_TK: rows of each token, by ascending expert.
        num_choices: K.
    """

    experts: tuple[int, ...]
    counts: tuple[int, ...]
    choice_R: torch.Tensor
    row_TK: torch.Tensor
    num_choices: int

    @classmethod
    def of(cls, ids_TK: torch.Tensor, num_experts: int) -> "Dispatch":
        """Groups the router's choices by expert.

        Raises:
            ValueError: an id is not one of an expert.
        """
        choices = ids_TK.flatten()
        if choices.numel() and not 0 <= int(choices.min()) <= int(choices.max()) < num_experts:
            raise ValueError(
                f"expert ids from {int(choices.min())} to {int(choices.max())}: must be 0 to {num_experts - 1}; "
                "leave padding and the experts of other ranks out"
            )
        choice_R = torch.argsort(choices, stable=True)
        row_of_choice = torch.empty_like(choice_R)
        row_of_choice[choice_R] = torch.arange(choices.numel(), device=choices.device)
        counts = torch.bincount(choices, minlength=num_experts).tolist()
        experts = tuple(expert for expert, count in enumerate(counts) if count)
        return cls(
            experts=experts,
            counts=tuple(counts[expert] for expert in experts),
            choice_R=choice_R,
            row_TK=row_of_choice.view(ids_TK.shape).sort(dim=1).values,
            num_choices=ids_TK.shape[1],
        )

    @property
    def token_R(self) -> torch.Tensor:
        """Returns the token of each row."""
        return self.choice_R // self.num_choices

    def chunks(self, num_experts: int) -> Iterator[ExpertChunk]:
        """Yields the experts that have tokens, ``num_experts`` at a time."""
        tokens = self.token_R.split(self.counts)
        for start in range(0, len(self.experts), num_experts):
            chunk = slice(start, start + num_experts)
            yield ExpertChunk(experts=self.experts[chunk], counts=self.counts[chunk], token_R=torch.cat(tokens[chunk]))


def gather(x_TD: torch.Tensor, dispatch: Dispatch) -> torch.Tensor:
    """Copies each token to its experts: returns [R, D]."""
    return _Gather.apply(x_TD, dispatch)


def combine(rows_RD: torch.Tensor, weights_TK: torch.Tensor, dispatch: Dispatch) -> torch.Tensor:
    """Sums the experts of each token by the router's weights [T, K]: returns [T, D] in the dtype of ``rows``."""
    return _Combine.apply(rows_RD, weights_TK, dispatch)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, dispatch: Dispatch):
        ctx.dispatch = dispatch
        return x_TD.index_select(0, dispatch.token_R)

    @staticmethod
    def backward(ctx, grad_RD):
        return _sum_of_experts(grad_RD, ctx.dispatch, None), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_RD, weights_TK, dispatch: Dispatch):
        ctx.save_for_backward(rows_RD if weights_TK.requires_grad else None, weights_TK)
        ctx.dispatch = dispatch
        weight_R = weights_TK.flatten()[dispatch.choice_R]
        return _sum_of_experts(rows_RD, dispatch, weight_R)

    @staticmethod
    def backward(ctx, grad_TD):
        rows_RD, weights_TK = ctx.saved_tensors
        choice_R = ctx.dispatch.choice_R
        grad_RD = grad_TD.index_select(0, ctx.dispatch.token_R).float()
        grad_weights = None
        if rows_RD is not None:
            grad_weights = torch.empty_like(weights_TK, memory_format=torch.contiguous_format)
            grad_weights.view(-1)[choice_R] = (grad_RD * rows_RD).sum(-1).to(weights_TK.dtype)
        grad_RD *= weights_TK.flatten()[choice_R, None]
        return grad_RD.to(grad_TD.dtype), grad_weights, None


def _sum_of_experts(rows_RD: torch.Tensor, dispatch: Dispatch, weight_R: torch.Tensor | None) -> torch.Tensor:
    sum_TD = rows_RD.new_zeros(dispatch.row_TK.shape[0], rows_RD.shape[1], dtype=torch.float32)
    for row_T in dispatch.row_TK.unbind(1):
        picked_TD = rows_RD.index_select(0, row_T)
        if weight_R is None:
            sum_TD += picked_TD
        else:
            sum_TD.addcmul_(picked_TD.float(), weight_R[row_T, None].float())
    return sum_TD.to(rows_RD.dtype)
