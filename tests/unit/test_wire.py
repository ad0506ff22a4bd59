"""The payload: exact, tamper-evident, as small as the adapter, and refused with every problem named."""

import json

import pytest
import safetensors.torch
import torch

from orbit_kernels.adapter import AdapterConfig, tensor_name
from orbit_kernels.oft import num_entries
from orbit_kernels.wire import METADATA_KEY, SHARED_KEY, Adapter, AdapterError

BLOCK = 16
PARTS = {"self_attn.q_proj": 64, "self_attn.k_proj": 64, "self_attn.v_proj": 64, "self_attn.o_proj": 64}
PARTS |= {"mlp.gate_proj": 64, "mlp.up_proj": 64, "mlp.down_proj": 96}
WIDTHS = {f"model.layers.{layer}.{part}": width for layer in range(3) for part, width in PARTS.items()}


def make_adapter(tied: bool = False, dtype: torch.dtype = torch.bfloat16, **config) -> Adapter:
    adapter = AdapterConfig(block_size=BLOCK, **config)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for module, width in WIDTHS.items():
        first = module.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_proj", "gate_proj")
        if tied and first != module:
            tensors[tensor_name(module)] = tensors[tensor_name(first)].clone()
        else:
            entries = torch.randn(width // BLOCK, num_entries(BLOCK), generator=generator) * 0.02
            tensors[tensor_name(module)] = entries.to(dtype)
    return Adapter(
        {
            name: t
            for name, t in tensors.items()
            if adapter.targets(name.removeprefix("base_model.model.").removesuffix(".oft_R.weight"))
        },
        adapter,
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_round_trip_is_bit_exact(tied, dtype):
    adapter = make_adapter(tied, dtype)
    received = Adapter.decode(adapter.encode())
    received.check(WIDTHS)
    assert received.config == adapter.config
    assert received.tensors.keys() == adapter.tensors.keys()
    assert all(torch.equal(received.tensors[name], tensor) for name, tensor in adapter.tensors.items())
    assert received.digest() == adapter.digest()


def test_tied_parts_travel_once():
    adapter = make_adapter(tied=True)
    first_parts = sum(
        t.nbytes for n, t in adapter.tensors.items() if not any(p in n for p in ("k_proj", "v_proj", "up_proj"))
    )
    header_bytes = len(adapter.encode()) - first_parts
    assert header_bytes < 4000
    assert len(adapter.encode()) < adapter.num_bytes < len(make_adapter(tied=False).encode())


def test_peft_file_holds_every_part():
    adapter = make_adapter(tied=True)
    assert safetensors.torch.load(adapter.to_peft_file()).keys() == adapter.tensors.keys()


def test_one_differing_layer_sends_all_parts():
    adapter = make_adapter(tied=True)
    name = tensor_name("model.layers.2.self_attn.k_proj")
    changed = Adapter({**adapter.tensors, name: adapter.tensors[name] + 1}, adapter.config)
    assert torch.equal(Adapter.decode(changed.encode()).tensors[name], changed.tensors[name])


@pytest.mark.parametrize("shared", ['{"k_proj": "o_proj"}', '{"q_proj": "k_proj"}', "[]", "{", '"k_proj"'])
def test_shared_parts_outside_a_projection_are_refused(shared):
    adapter = make_adapter()
    metadata = {METADATA_KEY: adapter.config.to_peft_json(), SHARED_KEY: shared}
    with pytest.raises(AdapterError, match=SHARED_KEY):
        Adapter.decode(safetensors.torch.save(dict(adapter.tensors), metadata=metadata))


def test_digest_depends_on_every_bit():
    adapter = make_adapter()
    name = next(iter(adapter.tensors))
    flipped = adapter.tensors[name].clone()
    flipped.view(torch.int16)[0, 0] ^= 1
    assert Adapter({**adapter.tensors, name: flipped}, adapter.config).digest() != adapter.digest()
    assert Adapter(dict(reversed(adapter.tensors.items())), adapter.config).digest() == adapter.digest()


def test_every_problem_is_listed():
    """field-cases #3, the payload's side."""
    tensors = dict(make_adapter().tensors)
    tensors[tensor_name("model.layers.0.self_attn.qq_proj")] = torch.zeros(4, num_entries(BLOCK))
    wrong_shape = tensor_name("model.layers.0.self_attn.q_proj")
    tensors[wrong_shape] = torch.zeros(3, num_entries(BLOCK))
    missing = tensor_name("model.layers.1.mlp.down_proj")
    del tensors[missing]
    not_finite = tensor_name("model.layers.2.mlp.up_proj")
    tensors[not_finite] = torch.full_like(tensors[not_finite], float("nan"))
    half = tensor_name("model.layers.2.mlp.gate_proj")
    tensors[half] = tensors[half].half()
    with pytest.raises(AdapterError) as refused:
        Adapter(tensors, make_adapter().config).check(WIDTHS)
    text = "\n".join(refused.value.problems)
    assert len(refused.value.problems) == 5
    for name in ("qq_proj", wrong_shape, missing, not_finite, half):
        assert name in text


def test_peft_writes_targets_in_any_order():
    one, other = (
        AdapterConfig(block_size=BLOCK, target_modules=t) for t in (("q_proj", "k_proj"), ("k_proj", "q_proj"))
    )
    assert one == other and Adapter({}, one).digest() == Adapter({}, other).digest()


def test_no_match_is_refused():
    with pytest.raises(AdapterError, match="match no linear"):
        Adapter({}, AdapterConfig(block_size=BLOCK, target_modules=("c_attn",))).check(WIDTHS)


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
        ("peft_type", "LORA"),
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
