"""One layer of experts, in one process and on two ranks."""

from functools import partial

import torch
import torch.distributed as dist

from orbit_kernels.experts import ChunkBuffer, FrozenExperts, PerExpert, StackedWeights, expert_mlp
from orbit_kernels.formats import Bf16Format
from orbit_verl.model.expert_parallel import expert_parallel_mlp

EXPERTS, WIDTH, FFN = 8, 64, 96
EXCHANGES = {
    "even": {"tokens": (20, 20)},
    "unequal": {"tokens": (3, 37)},
    "no tokens on one rank": {"tokens": (0, 24)},
    "no tokens at all": {"tokens": (0, 0)},
    "one rank's experts": {"tokens": (9, 15), "chosen": range(4, 8)},
    "two experts": {"tokens": (9, 15), "chosen": (1, 6), "top_k": 2},
    "more choices than experts on a rank": {"tokens": (11, 8), "top_k": 7},
}


class Layer:
    """Random experts, tokens and routing of both ranks, the same in every process."""

    def __init__(self, dtype: torch.dtype, *, tokens, chosen=range(EXPERTS), top_k=3):
        generator = torch.Generator().manual_seed(1)
        self.tokens, self.dtype = tokens, dtype
        randn = partial(torch.randn, generator=generator)
        self.weights = {
            name: (randn(EXPERTS, *shape) * 0.1).to(dtype)
            for name, shape in {"gate_proj": (FFN, WIDTH), "up_proj": (FFN, WIDTH), "down_proj": (WIDTH, FFN)}.items()
        }
        self.x_TD = randn(sum(tokens), WIDTH).to(dtype)
        order = torch.rand(sum(tokens), len(chosen), generator=generator).argsort(1)
        self.ids_TK = torch.tensor(list(chosen))[order[:, :top_k]]
        self.weights_TK = torch.rand(sum(tokens), top_k, generator=generator)
        self.grad_TD = randn(sum(tokens), WIDTH).to(dtype)
        self.scale_D, self.scale_EF = 1 + randn(WIDTH) * 0.1, 1 + randn(EXPERTS, FFN) * 0.1

    def experts(self, held: slice) -> FrozenExperts:
        stacked = {
            name: StackedWeights(
                format=Bf16Format(dtype=self.dtype),
                rows=tensor.shape[1],
                columns=tensor.shape[2],
                tensors={"weight": tensor[held]},
            )
            for name, tensor in self.weights.items()
        }
        return FrozenExperts(**stacked)

    def run(self, tokens: slice, held: slice, mlp) -> dict[str, torch.Tensor]:
        """Output of some tokens, and the gradients of input, routing weights and of an adapter's tensors."""
        x_TD = self.x_TD[tokens].clone().requires_grad_()
        weights_TK = self.weights_TK[tokens].clone().requires_grad_()
        before_D, down_EF = self.scale_D.clone().requires_grad_(), self.scale_EF[held].clone().requires_grad_()
        adapter = PerExpert(
            {("down_proj",): [Scale(scale_F) for scale_F in down_EF.unbind()]},
            common_input=lambda x: (x * before_D).to(x.dtype),
        )
        y_TD = mlp(
            x_TD,
            self.ids_TK[tokens],
            weights_TK,
            self.experts(held),
            buffer=ChunkBuffer(3),
            activations="none",
            adapter=adapter,
        )
        y_TD.backward(self.grad_TD[tokens])
        return {
            "y": y_TD.detach(),
            "x": x_TD.grad,
            "weights": weights_TK.grad,
            "before": before_D.grad,
            "down": torch.zeros_like(down_EF) if down_EF.grad is None else down_EF.grad,
        }

    def of_rank(self, rank: int) -> slice:
        """Its tokens."""
        start = sum(self.tokens[:rank])
        return slice(start, start + self.tokens[rank])


class Scale:
    """An adapter that scales the input of one expert."""

    def __init__(self, scale_I):
        self.scale_I = scale_I

    def inputs(self, x_RI):
        return [(x_RI * self.scale_I).to(x_RI.dtype)]

    def output(self, x_RI, y_RO):
        return y_RO


def whole_layer(layer: Layer) -> dict[str, torch.Tensor]:
    """The layer in one process."""
    return layer.run(slice(None), slice(None), expert_mlp)


def exchanges(rank: int, save) -> None:
    """One layer, both ranks."""
    mlp = partial(expert_parallel_mlp, group=dist.group.WORLD)
    for dtype in (torch.float32, torch.bfloat16):
        for name, options in EXCHANGES.items():
            layer = Layer(dtype, **options)
            held = slice(rank * EXPERTS // 2, (rank + 1) * EXPERTS // 2)
            save(f"exchange {name} {dtype}", layer.run(layer.of_rank(rank), held, mlp))
    experts_only(rank, save)


def experts_only(rank: int, save) -> None:
    """Nothing but one rank's expert has a gradient: the other rank takes part in backward nevertheless."""
    layer = Layer(torch.float32, tokens=(4, 6), chosen=(1,), top_k=1)
    held, tokens = slice(rank * EXPERTS // 2, (rank + 1) * EXPERTS // 2), layer.of_rank(rank)
    scale_F = layer.scale_EF[1].clone().requires_grad_()
    y_TD = expert_parallel_mlp(
        layer.x_TD[tokens],
        layer.ids_TK[tokens],
        layer.weights_TK[tokens],
        layer.experts(held),
        group=dist.group.WORLD,
        buffer=ChunkBuffer(3),
        activations="none",
        adapter=PerExpert({("down_proj",): [Scale(scale_F)] * 4} if rank == 0 else {}),
    )
    y_TD.backward(layer.grad_TD[tokens])
    save("experts only", {"scale": torch.zeros(FFN) if scale_F.grad is None else scale_F.grad})
