"""The ranks of test_trainer_expert_parallel: one process imports everything and forks them.

Every rank writes ``<case>_<rank>.safetensors`` for each case, and the test compares them with one process.
"""

import json
import os
import shutil
import sys
import zlib
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from moe_support import LATENT_TARGETS
from safetensors.torch import save_file
from trainer_support import log_probs, make_batch, make_engine, nll, sequences

from orbit_kernels.experts import ChunkBuffer, FrozenExperts, PerExpert, StackedWeights, expert_mlp
from orbit_kernels.formats import Bf16Format
from orbit_verl import checkpoint
from orbit_verl.config import BaseSettings
from orbit_verl.model.expert_parallel import expert_parallel_mlp

PLAIN = BaseSettings(activations="none", experts_per_chunk=3)

ADAPTERS = {
    "oft": {},
    "oft_split": {"fused": "split"},
    "oft_shared": {"experts": "shared"},
    "lora": {"type": "lora", "rank": 4},
}
TRAINED = [
    *(("fp32", adapter) for adapter in ADAPTERS),
    *((base, adapter) for base in ("int4", "deepseek") for adapter in ("oft", "oft_shared")),
    ("bf16", "oft"),
]
"""Base and adapter of the cases that train."""

CRASHED = 3
"""Exit code of the rank that dies on purpose."""

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


def engine_of(folders: dict[str, str], base: str, adapter: str, size: int, **options):
    """An engine with a random adapter: the same whatever the ranks."""
    engine = make_engine(
        folders[base],
        base=PLAIN,
        optim={"clip_grad": 0.1},
        engine={"expert_model_parallel_size": size},
        **ADAPTERS[adapter],
        **({"target_modules": LATENT_TARGETS} if base == "deepseek" else {}),
        **options,
    )
    randomise_by_name(engine)
    return engine


@torch.no_grad()
def randomise_by_name(engine, scale: float = 0.05) -> None:
    """A random adapter whose tensors follow from their names, in the optimiser's masters too."""
    for name, parameter in engine.adapter.named_parameters().items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    engine.optimizer.reset()


def accumulate(engine, tokens, **batch) -> None:
    """Forward and backward of a batch; gradients stay."""
    with engine.train_mode(zero_grad_on_exit=False):
        engine.forward_backward_batch(make_batch(tokens, **batch), nll)


def train_step(engine, tokens) -> float:
    """One optimiser step in micro-batches of one sequence; the gradient norm."""
    with engine.train_mode():
        norm = engine.train_batch(make_batch(tokens, micro_batch=1), nll)["metrics"]["grad_norm"]
    engine.lr_scheduler_step()
    return norm


def state(engine) -> dict[str, torch.Tensor]:
    """Whole adapter and whole optimiser state."""
    return dict(engine.optimizer.whole_state()) | dict(engine.adapter.whole())


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
            shared_input=lambda x: (x * before_D).to(x.dtype),
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


def train(folders, rank: int, save, base: str, adapter: str, size: int) -> None:
    """Log-probs, gradients and two steps."""
    ranks = dist.get_world_size()
    engine, tokens = engine_of(folders, base, adapter, size), sequences()[rank::ranks]
    found = {f"log_probs/{index}": row for index, row in enumerate(log_probs(engine, tokens, micro_batch=1))}
    with engine.disable_adapter():
        found |= {f"base/{index}": row for index, row in enumerate(log_probs(engine, tokens, micro_batch=1))}
    accumulate(engine, tokens, micro_batch=1)
    engine.optimizer._reduce_over_data_parallel()
    found |= {f"gradient/{name}": gradient for name, gradient in engine.optimizer.gradients().items()}
    engine.optimizer_zero_grad()
    norms = []
    for step in (1, 2):
        norms.append(train_step(engine, sequences(step)[rank::ranks]))
        found |= {f"step {step}/{name}": tensor for name, tensor in state(engine).items()}
    found["norms"] = torch.tensor(norms, dtype=torch.float64)
    found["orthogonality"] = torch.tensor(list(engine.adapter.metrics().values()))
    save(f"train {base} {adapter} {size}", found)


def padded(folders, rank: int, save) -> None:
    """Log-probs of a padded batch."""
    engine, tokens = engine_of(folders, "fp32", "oft", 2, packed=False), sequences()[rank::2]
    found = {f"log_probs/{index}": row for index, row in enumerate(log_probs(engine, tokens))}
    with engine.disable_adapter():
        found |= {f"base/{index}": row for index, row in enumerate(log_probs(engine, tokens))}
    save("padded", found)


def base(folders, rank: int, save) -> None:
    """What a rank holds, and what the ranks say of the base together."""
    for kind in ("fp32", "int4"):
        engine = engine_of(folders, kind, "oft", 2)
        held = {name: tensor for name, tensor in engine.module[0].named_buffers() if ".experts." in name}
        manifest = engine.base_manifest()
        save(
            f"base {kind}",
            {
                "expert_bytes": torch.tensor(sum(tensor.nbytes for tensor in held.values())),
                "manifest": torch.frombuffer(bytearray(manifest.to_json().encode()), dtype=torch.uint8),
            },
        )


@torch.no_grad()
def marks(folders, rank: int, save, places: dict[str, list[str]]) -> None:
    """Every tensor is filled with the number of its name; what leaves the ranks must have it there."""
    for adapter in ADAPTERS:
        engine = engine_of(folders, "fp32", adapter, 2)
        for name, parameter in engine.adapter.named_parameters().items():
            parameter.fill_(places[adapter].index(name))
        engine.optimizer.reset()
        exported = engine.export_adapter().tensors
        streamed = dict(engine.get_per_tensor_param()[0])
        assert list(exported) == list(streamed) == places[adapter]
        assert all(torch.equal(tensor, streamed[name]) for name, tensor in exported.items())
        assert bool(engine.export_adapter(everywhere=False).tensors) == (rank == 0)
        engine.adapter.load(engine.export_adapter())
        assert_gathered_when_taken(engine)
        save(f"marks {adapter}", exported | dict(engine.optimizer.whole_state()))


def assert_gathered_when_taken(engine) -> None:
    """The stream of the adapter holds a layer's experts and not the whole."""
    before, (tensors, _) = engine.adapter.snapshot(), engine.get_per_tensor_param()
    next(tensors)
    *_, last = engine.adapter.named_parameters().values()
    last.fill_(-1)
    *_, (_, taken) = tensors
    assert (taken == -1).all()
    engine.adapter.restore(before)


def skip(folders, rank: int, save) -> None:
    """A gradient of one expert of the second rank is not finite: both ranks skip, and go on alike."""
    engine = engine_of(folders, "fp32", "oft", 2)
    before = state(engine)
    accumulate(engine, sequences()[rank::2])
    name = next(name for name in reversed(engine.optimizer.gradients()) if ".experts." in name)
    if rank == 1:
        engine.optimizer.gradients()[name][0] = float("nan")
    norm = engine.optimizer_step()
    same = all(torch.equal(tensor, before[key]) for key, tensor in state(engine).items())
    engine.optimizer_zero_grad()
    next_norm = train_step(engine, sequences()[rank::2])
    found = [norm, engine.optimizer.num_skipped_steps, same, next_norm]
    save("skip", {"found": torch.tensor(found, dtype=torch.float64)})


def orthogonality(folders, rank: int, save) -> None:
    """The largest error is that of an expert of the second rank."""
    engine = engine_of(folders, "fp32", "oft", 2)
    if rank == 1:
        with torch.no_grad():
            next(p for name, p in engine.adapter.named_parameters().items() if ".experts.5." in name).mul_(5)
    save("orthogonality", {"found": torch.tensor(list(engine.adapter.metrics().values()))})


def reference(folders, rank: int, save) -> None:
    """The reference is the adapter that the run starts from."""
    engine = engine_of(folders, "fp32", "oft", 2, init_path=folders["adapter"], reference="init")
    own = engine.export_adapter().digest()
    with engine.disable_adapter():
        rows = log_probs(engine, sequences()[rank::2])
        assert engine.export_adapter().digest() == engine._reference_digest != own
    assert engine.export_adapter().digest() == own
    save("reference", {f"log_probs/{index}": row for index, row in enumerate(rows)})


def checkpoints(folders, rank: int, save, out: Path) -> None:
    """Resume what one process saved; save for one process; experts of one rank have no optimiser state."""
    for base in ("fp32", "lopsided"):
        resumed = engine_of(folders, base, "oft", 2)
        resumed.load_checkpoint(folders[f"{base}_checkpoint"])
        save(f"resumed {base}", state(resumed))
        train_step(resumed, sequences(2)[rank::2])
        save(f"resumed {base} and trained", state(resumed))
        engine = engine_of(folders, base, "oft", 2)
        train_step(engine, sequences(1)[rank::2])
        engine.save_checkpoint(str(out / f"{base}_of_two"), global_step=1)
        save(f"saved {base}", state(engine))
        train_step(engine, sequences(2)[rank::2])
        save(f"saved {base} and trained", state(engine))
        again = engine_of(folders, base, "oft", 2)
        again.load_checkpoint(str(out / f"{base}_of_two"))
        train_step(again, sequences(2)[rank::2])
        assert all(torch.equal(tensor, state(engine)[name]) for name, tensor in state(again).items())


def refusals(folders, rank: int, save, out: Path) -> None:
    """Broken checkpoints and layouts; every rank refuses."""
    messages = []
    engine = engine_of(folders, "fp32", "oft", 2)
    before = engine.export_adapter().digest()
    if rank == 0:
        shutil.copytree(out / "fp32_of_two", out / "no_rng")
        (out / "no_rng" / "rng_rank_1.safetensors").unlink()
    dist.barrier()
    for broken in (folders["no_tensor"], folders["no_state"], folders["foreign"], str(out / "no_rng")):
        messages.append(refusal(partial(engine.load_checkpoint, broken)))
    assert engine.export_adapter().digest() == before
    for base, size in (("fp32", 3), ("fp32", 4), ("dense", 2), ("odd", 2), ("fp32", 1)):
        messages.append(refusal(partial(engine_of, folders, base, "oft", size)))
    save("refusals", {"text": torch.frombuffer(bytearray(json.dumps(messages).encode()), dtype=torch.uint8)})


def refusal(call) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def crash(folders, rank: int, save, out: Path) -> None:
    """The second rank dies while a second checkpoint is written to the same folder."""
    engine = engine_of(folders, "fp32", "oft", 2)
    engine.save_checkpoint(str(out / "crashed"), global_step=1)
    save("before the crash", state(engine))
    train_step(engine, sequences(1)[rank::2])
    if rank == 1:
        checkpoint._write_tensors = lambda path, tensors: os._exit(CRASHED)
    try:
        engine.save_checkpoint(str(out / "crashed"), global_step=2)
    except RuntimeError as error:
        save("crash", {"noticed": torch.tensor([len(str(error))])})


def two_ranks(rank: int, folders: dict, places: dict, out: Path, save) -> None:
    """All experts on two ranks. The last case ends the second rank."""
    for base_name, adapter in TRAINED:
        train(folders, rank, save, base_name, adapter, 2)
    padded(folders, rank, save)
    exchanges(rank, save)
    base(folders, rank, save)
    marks(folders, rank, save, places)
    skip(folders, rank, save)
    orthogonality(folders, rank, save)
    reference(folders, rank, save)
    checkpoints(folders, rank, save, out)
    refusals(folders, rank, save, out)
    crash(folders, rank, save, out)


def four_ranks(rank: int, folders: dict, places: dict, out: Path, save) -> None:
    """Two groups of two ranks, one of four, and all experts on every rank."""
    for size in (2, 4, 1):
        for base_name in ("fp32", "lopsided"):
            train(folders, rank, save, base_name, "oft", size)
        mpu.destroy_model_parallel()


def run(rank: int, ranks: int, cases, folders: dict, places: dict, out: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{out / 'store'}", rank=rank, world_size=ranks)

    def save(case: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, out / f"{case}_{rank}")

    cases(rank, folders, places, out, save)


def fork(ranks: int, cases, folders: dict, places: dict, out: Path) -> list[int]:
    """Exit codes of the ranks."""
    out.mkdir()
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            run(rank, ranks, cases, folders, places, out)
            os._exit(0)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main() -> None:
    folders, places, out = (json.loads(argument) for argument in sys.argv[1:])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    assert fork(2, two_ranks, folders, places, Path(out) / "2") == [0, CRASHED]
    assert fork(4, four_ranks, folders, places, Path(out) / "4") == [0] * 4


if __name__ == "__main__":
    main()
