"""The slots on SGLang's own linears, in this process."""

import pytest
import torch
from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from orbit_kernels.adapters import AdapterMethod, LoRAMethod, OFTMethod
from orbit_kernels.adapters.config import AdapterConfig, tensor_name
from orbit_kernels.contract.payload import Adapter, AdapterError
from orbit_sglang.model.sharding import shares
from orbit_sglang.model.slots import BatchSlots, SlotBank
from orbit_sglang.model.slotted import oft
from orbit_sglang.startup.options import SlotsConfig

WIDTH, BLOCK = 64, 16
PARTS = ("q_proj", "k_proj", "v_proj")
SIZES = (64, 32, 32)
METHODS = {"oft": OFTMethod(block_size=BLOCK), "lora": LoRAMethod(rank=4, alpha=6)}


@pytest.fixture(params=METHODS)
def method(request):
    return METHODS[request.param]


class Attention(torch.nn.Module):
    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.qkv_proj = QKVParallelLinear(WIDTH, 16, 4, 2, bias=False, params_dtype=dtype, tp_rank=0, tp_size=1)
        torch.manual_seed(0)
        torch.nn.init.normal_(self.qkv_proj.weight)
        self.qkv_proj.weight.requires_grad_(False)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.qkv_proj(x_TD)[0]


@pytest.fixture(autouse=True, scope="module")
def global_server_args(checkpoints):
    model = str(checkpoints.plain("qwen3"))
    set_global_server_args_for_scheduler(ServerArgs(model_path=model, device="cpu", attention_backend="torch_native"))


def adapter(method: AdapterMethod, seed: int, tied: bool, parts: tuple[str, ...] = PARTS) -> Adapter:
    """A random adapter; the parts of a tied one share what acts on the input."""
    generator, config = torch.Generator().manual_seed(seed), AdapterConfig(method=method, target_modules=parts)
    tensors = {}
    for part in parts:
        for leaf, shape in method.shapes(dict(zip(PARTS, SIZES, strict=True))[part], WIDTH).items():
            name = tensor_name(part, leaf)
            tensor = 0.1 * torch.randn(shape, generator=generator)
            tensors.setdefault(config.tied_names(name)[0] if tied else name, tensor)
    return Adapter(tensors, config, tied)


def slots_config(method: AdapterMethod, **fields) -> SlotsConfig:
    return SlotsConfig(type=method.type, **{method.size_field: getattr(method, method.size_field)}, **fields)


def served(method: AdapterMethod, fused: str, dtype: torch.dtype) -> tuple[Attention, SlotBank]:
    model = Attention(dtype)
    config = slots_config(method, fused=fused)
    return model, SlotBank(model, config, dtype, BatchSlots(100, torch.device("cpu")))


def by_hand(model: Attention, adapter: Adapter, x_TD: torch.Tensor) -> torch.Tensor:
    outputs = []
    for part, weight in zip(PARTS, model.qkv_proj.weight.split(SIZES), strict=True):
        tensors = adapter.module_tensors(part)
        outputs.append(adapter.config.method.linear(x_TD, weight, tensors) if tensors else x_TD @ weight.T)
    return torch.cat(outputs, -1)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 0.125)])
@pytest.mark.parametrize("fused", ["tied", "split"])
def test_every_slot_of_a_mixed_batch_equals_the_specification(method, fused, dtype, tolerance):
    """The tolerance is that of one GEMM against three, a rounding of outputs of about 20."""
    model, bank = served(method, fused, dtype)
    adapters = {slot: adapter(method, slot, tied=fused == "tied") for slot in (1, 2)}
    for slot, one in adapters.items():
        bank.prepare(one.encode()).write(slot)
    x_TD = torch.randn(9, WIDTH).to(dtype)
    with bank.batch.running([0, 2, 1], [2, 3, 4]):
        mixed_TO = model(x_TD)
    rows = {0: slice(0, 2), 2: slice(2, 5), 1: slice(5, 9)}
    for slot, row in rows.items():
        with bank.batch.running([slot], [row.stop - row.start]):
            alone_TO = model(x_TD[row])
        base_TO = x_TD[row] @ model.qkv_proj.weight.T
        expected_TO = by_hand(model, adapters[slot], x_TD[row]) if slot else base_TO
        assert (alone_TO - expected_TO).abs().max() <= tolerance
        assert (mixed_TO[row] - expected_TO).abs().max() <= tolerance
        if slot:
            assert (expected_TO - base_TO).abs().max() > 4 * tolerance


def test_rotations_computed_together_are_bitwise_those_computed_alone(monkeypatch):
    model, bank = served(METHODS["oft"], "split", torch.float32)
    one = adapter(METHODS["oft"], 1, tied=False)
    bank.prepare(one.encode()).write(1)
    monkeypatch.setattr(oft, "ENTRIES_TOGETHER", 1)
    bank.prepare(one.encode()).write(2)
    (linear,) = bank.slotted_linears
    alone = torch.stack([METHODS["oft"].rotation(one.module_tensors(part)) for part in PARTS])
    assert torch.equal(linear.slots[1][0], alone) and torch.equal(linear.slots[2][0], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_slot_is_bitwise_the_specification_on_the_stacked_weight(method, dtype):
    model, bank = served(method, "tied", dtype)
    one = adapter(method, 1, tied=True)
    bank.prepare(one.encode()).write(2)
    x_TD = torch.randn(9, WIDTH).to(dtype)
    stacked = {
        leaf: one.module_tensors(PARTS[0])[leaf]
        if leaf == method.input_leaf
        else torch.cat([one.module_tensors(part)[leaf] for part in PARTS])
        for leaf in method.leaves
    }
    expected_TO = method.linear(x_TD, model.qkv_proj.weight, stacked)
    with bank.batch.running([2, 2], [4, 5]):
        assert torch.equal(model(x_TD), expected_TO)


@pytest.mark.parametrize("fused", ["tied", "split"])
def test_the_slots_stay_where_they_are(method, fused):
    """What a captured CUDA graph needs: a new version changes contents, never addresses."""
    model, bank = served(method, fused, torch.float32)
    addresses = slot_addresses(bank)
    assert len(addresses) >= 2
    for seed in (1, 2, 3):
        bank.prepare(adapter(method, seed, tied=fused == "tied").encode()).write(1)
        with bank.batch.running([1], [9]):
            model(torch.randn(9, WIDTH))
    assert slot_addresses(bank) == addresses


def slot_addresses(bank: SlotBank) -> list[int]:
    return [t.data_ptr() for linear in bank.slotted_linears for slot in linear.slots.values() for t in slot]


def test_the_base_slot_is_bitwise_the_linear_without_slots(method):
    model, bank = served(method, "tied", torch.float32)
    x_TD = torch.randn(9, WIDTH)
    plain_TO = Attention(torch.float32)(x_TD)
    bank.prepare(adapter(method, 1, tied=True).encode()).write(1)
    with bank.batch.running([0, 0], [4, 5]):
        assert torch.equal(model(x_TD), plain_TO)
    with bank.batch.running([1, 1], [4, 5]):
        assert not torch.equal(model(x_TD), plain_TO)
    assert torch.equal(model(x_TD), plain_TO), "outside a batch every token is on the base"


def test_a_part_that_the_next_version_leaves_out_is_the_base_again(method):
    """Within one fused projection: up to the rounding of a GEMM with three times the rows.

    docs/field-cases.md: what the version before left.
    """
    model, bank = served(method, "split", torch.float32)
    x_TD = torch.randn(9, WIDTH)
    bank.prepare(adapter(method, 1, tied=False).encode()).write(1)
    bank.prepare(adapter(method, 2, tied=False, parts=("q_proj",)).encode()).write(1)
    with bank.batch.running([1], [9]):
        y_TO = model(x_TD)
    with bank.batch.running([0], [9]):
        base_TO = model(x_TD)
    assert (y_TO[:, SIZES[0] :] - base_TO[:, SIZES[0] :]).abs().max() <= 2e-5
    assert (y_TO[:, : SIZES[0]] - base_TO[:, : SIZES[0]]).abs().max() > 0.1


@pytest.mark.parametrize("fused", ["tied", "split"])
def test_what_a_payload_ties_is_one_tensor_for_every_part_and_never_compared(method, fused, monkeypatch):
    """In the slots it is what the same adapter is as a file of peft's, whose equal copies a tied server compares."""
    model, bank = served(method, fused, torch.float32)
    one = adapter(method, 1, tied=True)
    bank.prepare(one.to_peft_file()).write(1)
    monkeypatch.delattr(torch, "equal")
    prepared = bank.prepare(one.encode())
    prepared.write(2)
    monkeypatch.undo()
    assert prepared.adapter.digest() == one.digest() and prepared.module_counts() == dict.fromkeys(sorted(PARTS), 1)
    (linear,) = bank.slotted_linears
    assert all(map(torch.equal, linear.slots[1], linear.slots[2]))


def test_a_tied_server_refuses_parts_that_differ_and_names_them(method):
    _, bank = served(method, "tied", torch.float32)
    with pytest.raises(AdapterError, match=f"k_proj, v_proj: {method.input_leaf} differs from q_proj's"):
        bank.prepare(adapter(method, 1, tied=False).encode())


def test_some_parts_of_a_tied_projection():
    """One rotation turns the input of all parts, so some alone are refused; LoRA's B is per part, so they are served."""
    _, bank = served(METHODS["oft"], "tied", torch.float32)
    with pytest.raises(AdapterError, match="k_proj, v_proj: oft_R differs from q_proj's"):
        bank.prepare(adapter(METHODS["oft"], 1, tied=False, parts=("q_proj",)).encode())
    model, bank = served(METHODS["lora"], "tied", torch.float32)
    one = adapter(METHODS["lora"], 1, tied=True, parts=("k_proj", "v_proj"))
    bank.prepare(one.encode()).write(1)
    x_TD = torch.randn(9, WIDTH)
    with bank.batch.running([1], [9]):
        y_TO = model(x_TD)
    assert (y_TO - by_hand(model, one, x_TD)).abs().max() <= 2e-5
    assert torch.equal(y_TO[:, : SIZES[0]], (x_TD @ model.qkv_proj.weight.T)[:, : SIZES[0]])


@pytest.mark.parametrize(
    "slots, staged, message",
    [
        ("oft", LoRAMethod(rank=4), "adapter type 'lora': the slots hold 'oft'.*--orbit-adapter lora"),
        ("lora", OFTMethod(block_size=BLOCK), "adapter type 'oft': the slots hold 'lora'.*orbit.adapter.type=lora"),
        ("oft", OFTMethod(block_size=32), "block_size 32: .* of block_size 16; .*--orbit-block-size 32"),
        ("lora", LoRAMethod(rank=8), "rank 8: .* of rank 4; train with orbit.adapter.rank=4 .*--orbit-rank 8"),
    ],
)
def test_another_type_or_size_is_refused_with_the_fix(slots, staged, message):
    _, bank = served(METHODS[slots], "tied", torch.float32)
    with pytest.raises(AdapterError, match=message):
        bank.prepare(adapter(staged, 1, tied=True).encode())


def test_alpha_may_change_from_version_to_version():
    model, bank = served(METHODS["lora"], "tied", torch.float32)
    x_TD, outputs = torch.randn(9, WIDTH), []
    for alpha in (4, 8):
        bank.prepare(adapter(LoRAMethod(rank=4, alpha=alpha), 1, tied=True).encode()).write(1)
        with bank.batch.running([1], [9]):
            outputs.append(model(x_TD))
    base_TO = x_TD @ model.qkv_proj.weight.T
    assert (outputs[1] - base_TO - 2 * (outputs[0] - base_TO)).abs().max() <= 4e-5


def test_a_model_without_known_linears_is_refused():
    class Other(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.wqkv = ReplicatedLinear(WIDTH, WIDTH)

    with pytest.raises(ValueError, match="Other has no linear named qkv_proj"):
        SlotBank(Other(), SlotsConfig(), torch.float32, BatchSlots(10, torch.device("cpu")))


def test_a_width_that_the_block_does_not_divide_has_no_slot_and_refuses_the_adapter():
    """96 and a block of 64. docs/field-cases.md: width and block size."""

    class Mlp(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up_proj = MergedColumnParallelLinear(WIDTH, [96, 96], bias=False, tp_rank=0, tp_size=1)
            self.down_proj = ReplicatedLinear(96, WIDTH, bias=False)

    method = OFTMethod(block_size=64)
    bank = SlotBank(Mlp(), slots_config(method), torch.float32, BatchSlots(10, torch.device("cpu")))
    config = AdapterConfig(method=method, target_modules=("down_proj",))
    refused = Adapter({tensor_name("down_proj"): torch.zeros(1, 2016)}, config)
    with pytest.raises(AdapterError, match="width 96 is not a multiple of the OFT block size 64"):
        bank.prepare(refused.encode())


def on_rank(rank: int, ranks: int, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """One rank's share of an attention block with two key and value heads, as SGLang builds it; weights are not set."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            tensor_parallel = {"params_dtype": dtype, "tp_rank": rank, "tp_size": ranks}
            self.qkv_proj = QKVParallelLinear(WIDTH, 16, 4, 2, bias=False, **tensor_parallel)
            self.o_proj = RowParallelLinear(64, WIDTH, bias=False, reduce_results=False, **tensor_parallel)

    return Block()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_ranks_hold_a_linear_between_them(ranks):
    """Four ranks and two key heads: each head is held twice."""
    held = [shares("qkv_proj", on_rank(rank, ranks).qkv_proj) for rank in range(ranks)]
    for part, rows in zip(PARTS, SIZES, strict=True):
        found = [one[part] for one in held]
        assert {share.shape for share in found} == {(rows, WIDTH)} and all(len(s.columns) == WIDTH for s in found)
        copies = max(1, ranks // 2) if part != "q_proj" else 1
        assert [share.rows for share in found[::copies]] == [
            range(start, start + rows * copies // ranks) for start in range(0, rows, rows * copies // ranks)
        ]
        assert all(share.rows == found[index - index % copies].rows for index, share in enumerate(found))
    columns = [shares("o_proj", on_rank(rank, ranks).o_proj)["o_proj"].columns for rank in range(ranks)]
    assert [column for share in columns for column in share] == list(range(64))


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_shares_of_an_adapted_linear_make_up_the_whole(method, ranks):
    """Rows of the ranks side by side, and the sum of what each makes of its columns."""
    shapes = {"q_proj": 64, "k_proj": 32, "v_proj": 32, "o_proj": WIDTH}
    generator = torch.Generator().manual_seed(0)
    weights = {part: torch.randn(rows, WIDTH, generator=generator) for part, rows in shapes.items()}
    tensors = {
        tensor_name(part, leaf): 0.1 * torch.randn(shape, generator=generator)
        for part, rows in shapes.items()
        for leaf, shape in method.shapes(rows, WIDTH).items()
    }
    one = Adapter(tensors, AdapterConfig(method=method, target_modules=tuple(shapes)))
    x_TI = torch.randn(5, WIDTH, generator=generator)
    found = {part: [] for part in shapes}
    for rank in range(ranks):
        block = on_rank(rank, ranks)
        held = shares("qkv_proj", block.qkv_proj) | shares("o_proj", block.o_proj)
        block.qkv_proj.weight.data = torch.cat([weights[part][held[part].rows] for part in PARTS])
        block.o_proj.weight.data = weights["o_proj"][:, held["o_proj"].columns]
        bank = SlotBank(block, slots_config(method, fused="split"), torch.float32, BatchSlots(10, torch.device("cpu")))
        bank.prepare(one.encode()).write(1)
        with bank.batch.running([1], [5]):
            outputs = block.qkv_proj(x_TI)[0].split([len(held[part].rows) for part in PARTS], dim=-1)
            o_input_TI = x_TI[:, held["o_proj"].columns]
            found["o_proj"].append(block.o_proj.quant_method.apply(block.o_proj, o_input_TI))  # before the all-reduce
        for part, output_TO in zip(PARTS, outputs, strict=True):
            found[part].append(output_TO)
    for part, weight_OI in weights.items():
        expected_TO = method.linear(x_TI, weight_OI, one.module_tensors(part))
        copies = max(1, ranks // 2) if part in ("k_proj", "v_proj") else 1
        actual_TO = sum(found[part]) if part == "o_proj" else torch.cat(found[part][::copies], dim=-1)
        assert (actual_TO - expected_TO).abs().max() <= 2e-5
        assert (expected_TO - x_TI @ weight_OI.T).abs().max() > 0.1


def test_a_share_that_cuts_a_block_stops_the_start():
    """A whole linear that the block divides, and a rank's share of it that it does not: 64 columns on four ranks."""
    config = slots_config(OFTMethod(block_size=32))
    with pytest.raises(
        ValueError, match="a rank's share of o_proj: width 16 is not a multiple of the OFT block size 32"
    ):
        SlotBank(on_rank(1, 4), config, torch.float32, BatchSlots(10, torch.device("cpu")))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fused", ["tied", "split"])
def test_a_captured_graph_replays_with_the_slots_of_the_day(method, fused):
    """Captured outside a pass, as SGLang does it; then slots, and what they hold, change."""
    model = Attention(torch.bfloat16).cuda()
    bank = SlotBank(model, slots_config(method, fused=fused), torch.bfloat16, BatchSlots(9, torch.device("cuda")))
    x_TD = torch.randn(9, WIDTH, device="cuda", dtype=torch.bfloat16)
    model(x_TD)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured_TO = model(x_TD)
    for seed in (1, 2):
        for slot in (1, 2):
            bank.prepare(adapter(method, 10 * seed + slot, tied=fused == "tied").encode()).write(slot)
        for slots in ([0, 2, 1], [1, 1, 1], [0, 0, 0]):
            with bank.batch.running(slots, [2, 3, 4]):
                graph.replay()
                replayed_TO = captured_TO.clone()
                eager_TO = model(x_TD)
            assert (replayed_TO - eager_TO).abs().max() <= 0.125
