"""Engines whose experts are divided between ranks: what each rank finds when it trains and exports."""

import zlib

import pytest
import torch
import torch.distributed as dist

from orbit_verl.config.keys import BaseSettings
from tests.support.engines import log_probs, make_batch, make_engine, nll, sequences
from tests.support.mixtures import LATENT_TARGETS, random_record

PLAIN = BaseSettings(activations="none", experts_per_chunk=3)

ADAPTERS = {
    "oft": {},
    "oft_split": {"fused": "split"},
    "oft_common": {"experts": "common"},
    "lora": {"type": "lora", "rank": 4},
}
TRAINED = [
    *(("fp32", adapter) for adapter in ADAPTERS),
    *((base, adapter) for base in ("int4", "deepseek") for adapter in ("oft", "oft_common")),
    ("bf16", "oft"),
]
"""Base and adapter of the cases that train."""


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
    shapes = engine.adapter.whole_shapes()
    for name, parameter in engine.adapter.named_parameters().items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole = torch.randn(shapes[name], generator=generator) * scale
        parameter.copy_(engine._layout.tensor.own(whole, parameter.shape))
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


def train(folders, rank: int, save, base: str, adapter: str, size: int) -> None:
    """Log-probs, gradients and two steps."""
    ranks = dist.get_world_size()
    engine, tokens = engine_of(folders, base, adapter, size), sequences()[rank::ranks]
    found = {f"log_probs/{index}": row for index, row in enumerate(log_probs(engine, tokens, micro_batch=1))}
    with engine.disable_adapter():
        found |= {f"base/{index}": row for index, row in enumerate(log_probs(engine, tokens, micro_batch=1))}
    accumulate(engine, tokens, micro_batch=1)
    engine.optimizer._reduce_gradients()
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


def replayed(folders, rank: int, save) -> None:
    """Log-probs and gradients with recorded experts, each rank those of its own tokens."""
    for base in ("fp32", "deepseek"):
        engine, tokens = engine_of(folders, base, "oft", 2), sequences()[rank::2]
        batch = {"micro_batch": 1, "records": random_record(sequences())[rank::2]}
        found = {f"log_probs/{index}": row for index, row in enumerate(log_probs(engine, tokens, **batch))}
        accumulate(engine, tokens, **batch)
        engine.optimizer._reduce_gradients()
        found |= {f"gradient/{name}": gradient for name, gradient in engine.optimizer.gradients().items()}
        engine.optimizer_zero_grad()
        save(f"replayed {base}", found)


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
        exported, streamed = engine.export_adapter().tensors, dict(engine.get_per_tensor_param()[0])
        assert list(exported) == places[adapter]
        parts = engine.export_adapter().untied().tensors
        assert list(streamed) == list(parts)
        assert all(torch.equal(tensor, streamed[name]) for name, tensor in parts.items())
        assert bool(engine.export_adapter(everywhere=False).tensors) == (rank == 0)
        engine.adapter.load(engine.export_adapter())
        assert_gathered_when_taken(engine)
        save(f"marks {adapter}", exported | dict(engine.optimizer.whole_state()))


def assert_gathered_when_taken(engine) -> None:
    """The stream of the adapter holds a layer's experts and not the whole: what changes meanwhile is refused."""
    before, (tensors, _) = engine.adapter.snapshot(), engine.get_per_tensor_param()
    next(tensors)
    *_, last = engine.adapter.named_parameters().values()
    last.fill_(-1)
    with pytest.raises(RuntimeError, match="has changed since its copies were asked for"):
        list(tensors)
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
        assert engine.export_adapter().untied().digest() == engine._reference_digest
        assert engine.export_adapter().digest() != own
    assert engine.export_adapter().digest() == own
    save("reference", {f"log_probs/{index}": row for index, row in enumerate(rows)})
