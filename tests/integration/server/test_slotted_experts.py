"""Adapters of routed experts in the slots: batches of one slot, of several, and of none."""

import pytest
import torch

from orbit_kernels.adapters import AdapterMethod, LoRAMethod, OFTMethod
from orbit_kernels.adapters.config import AdapterConfig, tensor_name
from orbit_kernels.contract.payload import Adapter
from orbit_kernels.experts import (
    DOWN,
    GATE,
    GATE_UP,
    UP,
    ChunkBuffer,
    ExpertAdapter,
    FrozenExperts,
    StackedWeights,
    expert_mlp,
    expert_module,
)
from orbit_kernels.formats import Int4Format
from orbit_kernels.linears.share import Share
from orbit_sglang.control.slots import BASE_SLOT, SLOTS
from orbit_sglang.model.slotted import LINEARS, BatchSlots, CommonExpertAdapter, SlottedExperts, SlottedLinear

EXPERTS, HIDDEN, FFN, TOKENS, TOP_K = 6, 32, 64, 24, 2
SHAPES = {GATE: (FFN, HIDDEN), UP: (FFN, HIDDEN), DOWN: (HIDDEN, FFN)}
METHODS = {"oft": OFTMethod(block_size=16), "lora": LoRAMethod(rank=4)}
PREFIX = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def experts() -> FrozenExperts:
    generator = torch.Generator().manual_seed(0)

    def stack(shape: tuple[int, int]) -> StackedWeights:
        stored = [Int4Format().quantize(torch.randn(shape, generator=generator) * 0.2) for _ in range(EXPERTS)]
        tensors = {leaf: torch.stack([one[leaf] for one in stored]) for leaf in stored[0]}
        return StackedWeights(format=Int4Format(), rows=shape[0], columns=shape[1], tensors=tensors)

    return FrozenExperts(**{projection: stack(shape) for projection, shape in SHAPES.items()})


def slotted(method: AdapterMethod, split: bool, projections: tuple[str, ...], expert: int | None) -> SlottedLinear:
    parts = {expert_module(PREFIX, projection, expert): Share.whole(*SHAPES[projection]) for projection in projections}
    device = torch.device("cpu")
    return LINEARS[method.type](parts, method, split=split, dtype=torch.float32, device=device)


def adapter(method: AdapterMethod, seed: int, owners: list[int | None], tied: bool) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        tensor_name(expert_module(PREFIX, projection, owner), leaf): torch.randn(size, generator=generator) * 0.2
        for owner in owners
        for projection, shape in SHAPES.items()
        for leaf, size in method.shapes(*shape).items()
    }
    if tied:
        for name in [name for name in tensors if f".{UP}.{method.input_leaf}." in name]:
            tensors[name] = tensors[name.replace(UP, GATE)]
    return Adapter(tensors, AdapterConfig(method=method))


def run(experts: FrozenExperts, own: ExpertAdapter) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    x_TD = torch.randn(TOKENS, HIDDEN, generator=generator)
    ids_TK = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K).indices
    weights_TK = torch.rand(TOKENS, TOP_K, generator=generator)
    with torch.no_grad():
        return expert_mlp(x_TD, ids_TK, weights_TK, experts, buffer=ChunkBuffer(4), adapter=own)


def make(method: AdapterMethod, kind: str, batch: BatchSlots) -> tuple[ExpertAdapter, list[SlottedLinear]]:
    """The experts' adapter with two versions in its slots, and what it is made of."""
    groups = (GATE_UP, (DOWN,))
    if kind == "common":
        shared = {group: slotted(method, False, group, None) for group in groups}
        own, linears = CommonExpertAdapter(shared, EXPERTS, batch), list(shared.values())
    else:
        each = {group: [slotted(method, kind == "split", group, e) for e in range(EXPERTS)] for group in groups}
        own, linears = SlottedExperts(each, batch), [linear for row in each.values() for linear in row]
    for slot in SLOTS:
        version = adapter(method, slot, [None] if kind == "common" else list(range(EXPERTS)), kind != "split")
        assert [problem for linear in linears for problem in linear.problems(version)] == []
        SlottedLinear.write(slot, linears, type(linears[0]).prepare(linears, version))
    return own, linears


@pytest.mark.parametrize(
    "name, kind", [("oft", "tied"), ("oft", "split"), ("oft", "common"), ("lora", "tied"), ("lora", "split")]
)
def test_each_token_of_a_mixed_batch_has_its_own_slot(experts, name, kind):
    batch = BatchSlots(100, torch.device("cpu"))
    own, _ = make(METHODS[name], kind, batch)
    slots = (BASE_SLOT, *SLOTS)
    alone = {}
    for slot in slots:
        with batch.running([slot], [TOKENS]):
            alone[slot] = run(experts, own)
    assert torch.equal(alone[BASE_SLOT], run(experts, ExpertAdapter()))
    for left, right in ((BASE_SLOT, SLOTS[0]), SLOTS, (BASE_SLOT, SLOTS[1])):
        assert (alone[left] - alone[right]).abs().mean() > 0.01
    tokens = [7, 9, 8]
    with batch.running(slots, tokens):
        mixed = run(experts, own)
    expected = torch.cat([alone[slot].split(tokens)[index] for index, slot in enumerate(slots)])
    torch.testing.assert_close(mixed, expected, rtol=1e-5, atol=1e-5)


def test_parts_that_differ_are_refused_where_they_are_tied(experts):
    _, linears = make(METHODS["oft"], "tied", BatchSlots(100, torch.device("cpu")))
    version = adapter(METHODS["oft"], 3, list(range(EXPERTS)), tied=False)
    problems = [problem for linear in linears for problem in linear.problems(version)]
    assert len(problems) == EXPERTS
    assert "experts.0.up_proj: oft_R differs from model.layers.0.mlp.experts.0.gate_proj" in problems[0]
