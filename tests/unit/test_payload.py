"""The payload: exact, tamper-evident, as small as the adapter, and refused with every problem named."""

import hashlib
import json

import pytest
import safetensors.torch
import torch

from orbit_kernels.adapters import AdapterMethod, LoRAMethod, OFTMethod
from orbit_kernels.adapters.config import LINEAR_TARGETS, AdapterConfig, split_name, tensor_name
from orbit_kernels.adapters.oft.method import num_entries
from orbit_kernels.contract.payload import FORMAT, FORMAT_KEY, FUSED_KEY, METADATA_KEY, Adapter, AdapterError

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
    method: AdapterMethod = METHODS["oft"],
    tied: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    linears: dict[str, tuple[int, int]] = LINEARS,
    targets: tuple[str, ...] = LINEAR_TARGETS,
) -> Adapter:
    """A random adapter on every targeted linear; in a tied one, the parts of a fused projection share what acts on the input."""
    generator, config = torch.Generator().manual_seed(0), AdapterConfig(method=method, target_modules=targets)
    tensors = {
        tensor_name(module, leaf): (torch.randn(leaf_shape, generator=generator) * 0.02).to(dtype)
        for module, shape in linears.items()
        if config.targets(module)
        for leaf, leaf_shape in method.shapes(*shape).items()
    }
    if tied:
        tensors = {name: tensor for name, tensor in tensors.items() if config.tied_names(name)[0] == name}
    return Adapter(tensors, config, tied)


def payload(adapter: Adapter, **metadata: str) -> bytes:
    """Its tensors with other metadata beside its configuration."""
    return safetensors.torch.save(
        dict(adapter.tensors), metadata={METADATA_KEY: adapter.config.to_peft_json(), **metadata}
    )


def problems_of(adapter: Adapter) -> list[str]:
    with pytest.raises(AdapterError) as refused:
        Adapter.decode(adapter.encode()).check(LINEARS)
    return refused.value.problems


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_round_trip_is_bit_exact(method, tied, dtype):
    adapter = make_adapter(method, tied, dtype)
    received = Adapter.decode(adapter.encode())
    received.check(LINEARS)
    assert (received.config, received.tied) == (adapter.config, tied)
    assert received.tensors.keys() == adapter.tensors.keys()
    assert all(torch.equal(received.tensors[name], tensor) for name, tensor in adapter.tensors.items())
    assert received.digest() == adapter.digest()


def test_a_tied_tensor_is_held_digested_and_sent_once(method):
    """One on the input of each fused projection, under its first part's name; each part has it at the other end."""
    adapter = make_adapter(method, tied=True)
    received = Adapter.decode(adapter.encode())
    parts = [split_name(name)[0].rsplit(".", 1)[-1] for name in received.tensors if method.input_leaf in name]
    assert sorted(parts) == sorted(["q_proj", "o_proj", "gate_proj", "down_proj"] * 3)
    assert received.modules() == sorted(LINEARS)
    for part, first in FIRST_PARTS.items():
        module = next(module for module in LINEARS if module.endswith(part))
        tensors, of_first = (received.module_tensors(name) for name in (module, module.replace(part, first)))
        assert tensors.keys() == set(method.leaves)
        assert tensors[method.input_leaf] is of_first[method.input_leaf]
        assert all(tensors[leaf] is not of_first[leaf] for leaf in method.leaves if leaf != method.input_leaf)


def test_a_tied_payload_is_as_large_as_the_trained_tensors(method):
    """Within 3 %, and far from what the parts take one by one."""
    linears = {module: (16 * rows, 16 * columns) for module, (rows, columns) in LINEARS.items()}
    adapter = make_adapter(method, tied=True, linears=linears)
    assert 0 < len(adapter.encode()) - adapter.num_bytes < 0.03 * adapter.num_bytes
    assert make_adapter(method, linears=linears).num_bytes > 1.2 * adapter.num_bytes


def test_nothing_is_compared_where_the_payload_says_tied(method, monkeypatch):
    body = make_adapter(method, tied=True).encode()
    monkeypatch.delattr(torch, "equal")
    Adapter.decode(body).check(LINEARS)


def test_the_first_targeted_part_is_the_owner():
    adapter = make_adapter(METHODS["lora"], tied=True, targets=("k_proj", "v_proj", "up_proj"))
    adapter.check(LINEARS)
    assert {split_name(name)[0].rsplit(".", 1)[-1] for name in adapter.tensors if "lora_A" in name} == {
        "k_proj",
        "up_proj",
    }
    assert adapter.module_tensors("model.layers.0.self_attn.q_proj") == {}


def test_peft_file_holds_every_part(method):
    """What peft reads, and what is read again, has a tensor of every part, none of them shared."""
    adapter = make_adapter(method, tied=True)
    file = safetensors.torch.load(adapter.to_peft_file())
    assert file.keys() == make_adapter(method).tensors.keys()
    assert all(torch.equal(file[name], tensor) for name, tensor in adapter.untied().tensors.items())
    read = Adapter.decode(adapter.to_peft_file())
    assert not read.tied and read.digest() == adapter.untied().digest() != adapter.digest()


def test_a_part_of_a_tied_adapter_has_no_tensor_of_its_own(method):
    """What a tie allows is one rule on both sides: every tensor that breaks it is named."""
    adapter, leaf = make_adapter(method, tied=True), method.input_leaf
    k, up, gate, q = (
        tensor_name(f"model.layers.1.{part}", leaf)
        for part in ("self_attn.k_proj", "mlp.up_proj", "mlp.gate_proj", "self_attn.q_proj")
    )
    tensors = {**adapter.tensors, k: adapter.tensors[q].clone(), up: adapter.tensors[gate]}
    del tensors[gate]
    assert problems_of(Adapter(tensors, adapter.config, tied=True)) == [
        f"{up}: unknown tensor, fused is 'tied', so that {gate} alone holds it",
        f"{k}: unknown tensor, fused is 'tied', so that {q} alone holds it",
        f"{gate}: missing, although its module is targeted",
    ]


def test_a_shared_tensor_fits_every_part():
    """Parts that read inputs of other widths share nothing, whatever the payload says."""
    adapter = make_adapter(tied=True)
    linears = {module: (32, 48) if "v_proj" in module else shape for module, shape in LINEARS.items()}
    with pytest.raises(AdapterError) as refused:
        adapter.check(linears)
    assert [problem.split(":")[0] for problem in refused.value.problems] == [
        tensor_name(f"model.layers.{layer}.self_attn.v_proj") for layer in range(3)
    ]


@pytest.mark.parametrize(
    "metadata, said",
    [
        ({FORMAT_KEY: "3"}, "orbit_format is '3': this release reads '2'"),
        ({FORMAT_KEY: "two"}, "orbit_format is 'two'"),
        ({"shared_parts": '{"k_proj": "q_proj"}'}, "orbit_format is '1'"),
        ({FORMAT_KEY: FORMAT}, "fused is None: must be 'tied'.*or 'split'"),
        ({FORMAT_KEY: FORMAT, FUSED_KEY: '{"k_proj": "q_proj"}'}, "fused is"),
    ],
)
def test_another_format_is_refused_with_the_fix(metadata, said):
    with pytest.raises(AdapterError, match=said):
        Adapter.decode(payload(make_adapter(), **metadata))


def test_a_file_of_pefts_has_no_number():
    """Whatever else its metadata holds: peft itself writes a ``format``."""
    adapter = make_adapter()
    read = Adapter.decode(payload(adapter, format="pt"))
    assert not read.tied and read.digest() == adapter.digest()


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
    """field-cases #3, the payload's side."""
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
