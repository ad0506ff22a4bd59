"""The slots on SGLang's own linears, in this process."""

import pytest
import torch
from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, ReplicatedLinear
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from orbit_kernels import oft
from orbit_kernels.adapter import AdapterConfig, tensor_name
from orbit_kernels.wire import Adapter, AdapterError
from orbit_sglang.config import SlotsConfig
from orbit_sglang.slots import BatchSlots, SlotBank

WIDTH, BLOCK = 64, 16
PARTS = ("q_proj", "k_proj", "v_proj")
SIZES = (64, 32, 32)


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
def global_server_args(servers):
    model = str(servers.checkpoint("qwen3"))
    set_global_server_args_for_scheduler(ServerArgs(model_path=model, device="cpu", attention_backend="torch_native"))


def adapter(seed: int, tied: bool, parts: tuple[str, ...] = PARTS) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    entries = {part: 0.1 * torch.randn(WIDTH // BLOCK, 120, generator=generator) for part in parts}
    tensors = {tensor_name(part): entries[parts[0]] if tied else entries[part] for part in parts}
    return Adapter(tensors, AdapterConfig(block_size=BLOCK, target_modules=parts))


def served(fused: str, dtype: torch.dtype) -> tuple[Attention, SlotBank]:
    model = Attention(dtype)
    config = SlotsConfig(block_size=BLOCK, fused=fused)
    return model, SlotBank(model, config, dtype, BatchSlots(100, torch.device("cpu")))


def by_hand(model: Attention, adapter: Adapter, x_TD: torch.Tensor) -> torch.Tensor:
    outputs = []
    for part, weight in zip(PARTS, model.qkv_proj.weight.split(SIZES), strict=True):
        entries = adapter.tensors.get(tensor_name(part))
        rotated_TD = x_TD if entries is None else oft.rotate(x_TD, oft.rotation(entries, BLOCK, 5))
        outputs.append(rotated_TD @ weight.T)
    return torch.cat(outputs, -1)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 0.125)])
@pytest.mark.parametrize("fused", ["tied", "split"])
def test_every_slot_of_a_mixed_batch_equals_the_specification(fused, dtype, tolerance):
    """The tolerance is that of one GEMM against three, a rounding of outputs of about 20."""
    model, bank = served(fused, dtype)
    adapters = {slot: adapter(slot, tied=fused == "tied") for slot in (1, 2)}
    for slot, one in adapters.items():
        bank.prepare(one.encode()).write(slot)
    x_TD = torch.randn(9, WIDTH).to(dtype)
    with bank.batch.running([0, 2, 1], [2, 3, 4]):
        mixed_TO = model(x_TD)
    rows = {0: slice(0, 2), 2: slice(2, 5), 1: slice(5, 9)}
    for slot, row in rows.items():
        with bank.batch.running([slot], [row.stop - row.start]):
            alone_TO = model(x_TD[row])
        expected_TO = x_TD[row] @ model.qkv_proj.weight.T if slot == 0 else by_hand(model, adapters[slot], x_TD[row])
        assert (alone_TO - expected_TO).abs().max() <= tolerance
        assert (mixed_TO[row] - expected_TO).abs().max() <= tolerance
        if slot:
            assert (expected_TO - x_TD[row] @ model.qkv_proj.weight.T).abs().max() > 10 * tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rotation_is_bitwise_that_of_the_specification(dtype):
    model, bank = served("tied", dtype)
    one = adapter(1, tied=True)
    bank.prepare(one.encode()).write(2)
    x_TD = torch.randn(9, WIDTH).to(dtype)
    rotation_NBB = oft.rotation(one.tensors[tensor_name("q_proj")], BLOCK, 5)
    expected_TO = torch.nn.functional.linear(oft.rotate(x_TD, rotation_NBB), model.qkv_proj.weight)
    with bank.batch.running([2, 2], [4, 5]):
        assert torch.equal(model(x_TD), expected_TO)


def test_the_base_slot_is_bitwise_the_linear_without_slots():
    model, bank = served("tied", torch.float32)
    x_TD = torch.randn(9, WIDTH)
    plain_TO = Attention(torch.float32)(x_TD)
    bank.prepare(adapter(1, tied=True).encode()).write(1)
    with bank.batch.running([0, 0], [4, 5]):
        assert torch.equal(model(x_TD), plain_TO)
    with bank.batch.running([1, 1], [4, 5]):
        assert not torch.equal(model(x_TD), plain_TO)
    assert torch.equal(model(x_TD), plain_TO), "outside a batch every token is on the base"


def test_a_part_that_the_next_version_leaves_out_is_the_base_again():
    """field-cases #10, within one fused projection: up to the rounding of a GEMM with three times the rows."""
    model, bank = served("split", torch.float32)
    x_TD = torch.randn(9, WIDTH)
    bank.prepare(adapter(1, tied=False).encode()).write(1)
    bank.prepare(adapter(2, tied=False, parts=("q_proj",)).encode()).write(1)
    with bank.batch.running([1], [9]):
        y_TO = model(x_TD)
    with bank.batch.running([0], [9]):
        base_TO = model(x_TD)
    assert (y_TO[:, SIZES[0] :] - base_TO[:, SIZES[0] :]).abs().max() <= 2e-5
    assert (y_TO[:, : SIZES[0]] - base_TO[:, : SIZES[0]]).abs().max() > 1


def test_a_tied_server_refuses_parts_that_differ_and_names_them():
    _, bank = served("tied", torch.float32)
    with pytest.raises(AdapterError, match="k_proj, v_proj: differs from q_proj"):
        bank.prepare(adapter(1, tied=False).encode())
    with pytest.raises(AdapterError, match="k_proj, v_proj: differs from q_proj"):
        bank.prepare(adapter(1, tied=False, parts=("q_proj",)).encode())


def test_a_model_without_known_linears_is_refused():
    class Other(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.wqkv = ReplicatedLinear(WIDTH, WIDTH)

    with pytest.raises(ValueError, match="Other has no linear named qkv_proj"):
        SlotBank(Other(), SlotsConfig(), torch.float32, BatchSlots(10, torch.device("cpu")))


def test_a_width_that_the_block_does_not_divide_has_no_slot_and_refuses_the_adapter():
    """field-cases #38: 96 and a block of 64."""

    class Mlp(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up_proj = MergedColumnParallelLinear(WIDTH, [96, 96], bias=False, tp_rank=0, tp_size=1)
            self.down_proj = ReplicatedLinear(96, WIDTH, bias=False)

    bank = SlotBank(Mlp(), SlotsConfig(block_size=64), torch.float32, BatchSlots(10, torch.device("cpu")))
    config = AdapterConfig(block_size=64, target_modules=("down_proj",))
    refused = Adapter({tensor_name("down_proj"): torch.zeros(1, 2016)}, config)
    with pytest.raises(AdapterError, match="block size 64 does not divide the input width 96"):
        bank.prepare(refused.encode())
