"""The payload: exact, tamper-evident, as small as the adapter, and refused with every problem named."""

import hashlib
import json

import pytest
import safetensors.torch
import torch

from orbit_kernels.adapters import AdapterMethod, LoRAMethod, OFTMethod
from orbit_kernels.adapters.config import AdapterConfig, tensor_name
from orbit_kernels.adapters.oft.method import num_entries
from orbit_kernels.contract.payload import METADATA_KEY, SHARED_KEY, Adapter, AdapterError

BLOCK = 16
METHODS = {"oft": OFTMethod(block_size=BLOCK), "lora": LoRAMethod(rank=4, alpha=8)}
PARTS = {"self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64)}
PARTS |= {"self_attn.o_proj": (64, 64), "mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64), "mlp.down_proj": (64, 96)}
LINEARS = {f"model.layers.{layer}.{part}": shape for layer in range(3) for part, shape in PARTS.items()}
FIRST_PARTS = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}


@pytest.fixture(params=METHODS)
def method(request):
    return METHODS[request.param]


def make_adapter(
    method: AdapterMethod = METHODS["oft"], tied: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Adapter:
    """A random adapter on every linear; in a tied one, the parts of a fused projection share what acts on the input."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for module, shape in LINEARS.items():
        for leaf, leaf_shape in method.shapes(*shape).items():
            tensors[tensor_name(module, leaf)] = (torch.randn(leaf_shape, generator=generator) * 0.02).to(dtype)
        parent, _, part = module.rpartition(".")
        if tied and part in FIRST_PARTS:
            first = tensor_name(f"{parent}.{FIRST_PARTS[part]}", method.shared_leaf)
            tensors[tensor_name(module, method.shared_leaf)] = tensors[first].clone()
    return Adapter(tensors, AdapterConfig(method=method))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_round_trip_is_bit_exact(method, tied, dtype):
    adapter = make_adapter(method, tied, dtype)
    received = Adapter.decode(adapter.encode())
    received.check(LINEARS)
    assert received.config == adapter.config
    assert received.tensors.keys() == adapter.tensors.keys()
    assert all(torch.equal(received.tensors[name], tensor) for name, tensor in adapter.tensors.items())
    assert received.digest() == adapter.digest()


def test_tied_parts_travel_once(method):
    adapter = make_adapter(method, tied=True)
    repeated = sum(
        t.nbytes for n, t in adapter.tensors.items() if method.shared_leaf in n and any(p in n for p in FIRST_PARTS)
    )
    assert repeated > 0.2 * adapter.num_bytes
    header_bytes = len(adapter.encode()) - (adapter.num_bytes - repeated)
    assert 0 < header_bytes < 6000
    assert len(make_adapter(method, tied=False).encode()) > adapter.num_bytes


def test_peft_file_holds_every_part(method):
    adapter = make_adapter(method, tied=True)
    assert safetensors.torch.load(adapter.to_peft_file()).keys() == adapter.tensors.keys()


def test_one_differing_layer_sends_all_parts(method):
    adapter = make_adapter(method, tied=True)
    name = tensor_name("model.layers.2.self_attn.k_proj", method.shared_leaf)
    changed = Adapter({**adapter.tensors, name: adapter.tensors[name] + 1}, adapter.config)
    assert torch.equal(Adapter.decode(changed.encode()).tensors[name], changed.tensors[name])


@pytest.mark.parametrize("shared", ['{"k_proj": "o_proj"}', '{"q_proj": "k_proj"}', "[]", "{", '"k_proj"'])
def test_shared_parts_outside_a_projection_are_refused(shared):
    adapter = make_adapter()
    metadata = {METADATA_KEY: adapter.config.to_peft_json(), SHARED_KEY: shared}
    with pytest.raises(AdapterError, match=SHARED_KEY):
        Adapter.decode(safetensors.torch.save(dict(adapter.tensors), metadata=metadata))


@pytest.mark.parametrize("sizes", [(), (3, 5), (70_000, 3, 500_000, 1, 80_000)])
def test_digest_is_that_of_all_pieces_in_a_row(sizes):
    """However many of them are hashed together."""
    tensors = {f"t{index}": torch.arange(float(size)).bfloat16() for index, size in enumerate(sizes)}
    config = AdapterConfig()
    pieces = [config.to_peft_json().encode()]
    for name, tensor in tensors.items():
        pieces += [f"{name}|torch.bfloat16|({tensor.numel()},)|".encode(), tensor.view(torch.uint8).numpy().tobytes()]
    assert Adapter(tensors, config).digest() == hashlib.sha256(b"".join(pieces)).hexdigest()


def test_digest_depends_on_every_bit():
    adapter = make_adapter()
    name = next(iter(adapter.tensors))
    flipped = adapter.tensors[name].clone()
    flipped.view(torch.int16)[0, 0] ^= 1
    assert Adapter({**adapter.tensors, name: flipped}, adapter.config).digest() != adapter.digest()
    assert Adapter(dict(reversed(adapter.tensors.items())), adapter.config).digest() == adapter.digest()


def test_every_problem_is_listed(method):
    """The payload's side. docs/field-cases.md: names that fit nothing."""
    leaf = method.leaves[-1]
    tensors = dict(make_adapter(method).tensors)
    tensors[tensor_name("model.layers.0.self_attn.qq_proj", leaf)] = torch.zeros(4, 4)
    wrong_shape = tensor_name("model.layers.0.self_attn.q_proj", leaf)
    tensors[wrong_shape] = torch.zeros(3, num_entries(BLOCK))
    missing = tensor_name("model.layers.1.mlp.down_proj", leaf)
    del tensors[missing]
    not_finite = tensor_name("model.layers.2.mlp.up_proj", leaf)
    tensors[not_finite] = torch.full_like(tensors[not_finite], float("nan"))
    half = tensor_name("model.layers.2.mlp.gate_proj", leaf)
    tensors[half] = tensors[half].half()
    with pytest.raises(AdapterError) as refused:
        Adapter(tensors, make_adapter(method).config).check(LINEARS)
    text = "\n".join(refused.value.problems)
    assert len(refused.value.problems) == 5
    for name in ("qq_proj", wrong_shape, missing, not_finite, half):
        assert name in text


def test_a_rank_that_the_tensors_do_not_have_is_refused():
    adapter = make_adapter(METHODS["lora"])
    config = AdapterConfig(method=LoRAMethod(rank=8, alpha=8))
    with pytest.raises(AdapterError, match=r"q_proj.lora_A.weight: shape \(4, 64\), expected \(8, 64\)"):
        Adapter(adapter.tensors, config).check(LINEARS)


def test_peft_writes_targets_in_any_order():
    one, other = (AdapterConfig(target_modules=t) for t in (("q_proj", "k_proj"), ("k_proj", "q_proj")))
    assert one == other and Adapter({}, one).digest() == Adapter({}, other).digest()


def test_no_match_is_refused():
    with pytest.raises(AdapterError, match="match no linear"):
        Adapter({}, AdapterConfig(target_modules=("c_attn",))).check(LINEARS)


@pytest.mark.parametrize("body", [b"", b"\x80\x04N.", b"\xff" * 64, (2**62).to_bytes(8, "little") + b"{}"])
def test_other_bodies_are_refused(body):
    with pytest.raises(AdapterError, match="safetensors"):
        Adapter.decode(body)


def test_truncated_body_is_refused():
    with pytest.raises(AdapterError, match="safetensors"):
        Adapter.decode(make_adapter().encode()[:-1])


@pytest.mark.parametrize(
    "key, value",
    [
        ("peft_type", "ADALORA"),
        ("peft_version", "0.17.1"),
        ("peft_version", None),
        ("num_cayley_neumann_terms", 10**9),
        ("num_cayley_neumann_terms", None),
        ("layers_to_transform", 1.5),
        ("layers_to_transform", ["0"]),
        ("target_modules", ["q_proj", 7]),
        ("coft", True),
        ("block_share", True),
        ("bias", "all"),
        ("target_modules", ".*"),
        ("oft_block_size", 1),
        ("num_cayley_neumann_terms", 1),
    ],
)
def test_configurations_that_change_the_mathematics_are_refused(key, value):
    peft = {**make_adapter().config.to_peft(), key: value}
    metadata = {METADATA_KEY: json.dumps(peft)}
    with pytest.raises(AdapterError):
        Adapter.decode(safetensors.torch.save(dict(make_adapter().tensors), metadata=metadata))
