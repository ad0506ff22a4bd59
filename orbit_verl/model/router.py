"""Routers of the frozen base say which experts a token takes, with the served rounding.

Dimension suffixes: T tokens, K experts of a token, E experts, G groups, D hidden.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional

from orbit_kernels.families import MixtureOfExperts

Override = Callable[[torch.Tensor], torch.Tensor]
"""An `Override` makes of a router's own ids [T, K] those that are used."""


class FrozenRouter(nn.Module):
    """A `FrozenRouter` scores all experts and takes the best K (Qwen3-MoE).

    SGLang 0.5.12 keeps the weights in fp32 (layers/moe/topk.py::fused_topk_torch_native); transformers rounds them.

    Args:
        moe: the mixture.
        hidden_size: D.
        dtype: of the weight.
    """

    def __init__(self, *, moe: MixtureOfExperts, hidden_size: int, dtype: torch.dtype):
        super().__init__()
        self._moe = moe
        self.weight = nn.Parameter(torch.empty(moe.num_experts, hidden_size, dtype=dtype), requires_grad=False)
        self._override: Override | None = None

    def forward(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ids [T, K] int64 and weights [T, K] fp32 of each token's experts."""
        scores_TE = self._scores(functional.linear(x_TD, self.weight).float())
        ids_TK = self._choose(scores_TE)
        if self._override is not None:
            ids_TK = self._override(ids_TK)
        weights_TK = scores_TE.gather(1, ids_TK)
        if self._moe.normalized:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return ids_TK, weights_TK

    @contextlib.contextmanager
    def overridden_by(self, override: Override) -> Iterator[None]:
        """Makes the router use the ids that ``override`` says in the body."""
        before, self._override = self._override, override
        try:
            yield
        finally:
            self._override = before

    def _scores(self, logits_TE: torch.Tensor) -> torch.Tensor:
        return logits_TE.softmax(dim=-1)

    def _choose(self, scores_TE: torch.Tensor) -> torch.Tensor:
        return scores_TE.topk(self._moe.top_k, dim=-1).indices


class FrozenBiasedRouter(FrozenRouter):
    """A `FrozenBiasedRouter` chooses, in the best groups, by scores with a bias that only balances load.

    It is DeepSeek-V3's ``noaux_tc``. A group counts by its two best experts (arXiv:2412.19437, section 2.1.2).
    """

    def __init__(self, *, moe: MixtureOfExperts, hidden_size: int, dtype: torch.dtype):
        super().__init__(moe=moe, hidden_size=hidden_size, dtype=dtype)
        bias = torch.empty(moe.num_experts, dtype=torch.float32)
        self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)

    def _scores(self, logits_TE: torch.Tensor) -> torch.Tensor:
        return logits_TE.sigmoid()

    def _choose(self, scores_TE: torch.Tensor) -> torch.Tensor:
        biased_TGE = (scores_TE + self.e_score_correction_bias).unflatten(1, (self._moe.num_groups, -1))
        of_group_TG = biased_TGE.topk(min(2, biased_TGE.shape[-1]), dim=-1).values.sum(dim=-1)
        groups_TG = of_group_TG.topk(self._moe.top_groups, dim=-1).indices
        left_out_TG = torch.ones_like(of_group_TG, dtype=torch.bool).scatter_(1, groups_TG, False)
        allowed_TE = biased_TGE.masked_fill(left_out_TG.unsqueeze(-1), float("-inf")).flatten(1)
        return allowed_TE.topk(self._moe.top_k, dim=-1).indices
