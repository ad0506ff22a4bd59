"""One suite over every adapter method: identity at the start, merge, save, load, shard."""

import json

import pytest
import torch
from peft import LoraConfig, OFTConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from orbit_kernels.adapters import METHODS, LoRAMethod, OFTMethod
from orbit_kernels.adapters.config import AdapterConfig, split_name, tensor_name
from orbit_kernels.contract.payload import Adapter, AdapterError

ROWS, COLUMNS = 48, 64
NUMBERS = {
    "oft": OFTMethod(block_size=16),
    "oft exact": OFTMethod(block_size=8, cayley_neumann_terms=None),
    "lora": LoRAMethod(rank=4, alpha=6),
    "lora wide": LoRAMethod(rank=8, alpha=8),
}
TARGETS = ("q_proj", "v_proj", "up_proj", "down_proj")
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.fixture(params=NUMBERS)
def method(request):
    return NUMBERS[request.param]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def trained(method, rows=ROWS, columns=COLUMNS, seed=1, dtype=torch.float32):
    """Tensors far from the identity, each one random."""
    draw = generator(seed)
    shapes = method.shapes(rows, columns)
    return {leaf: (0.1 * torch.randn(shape, generator=draw)).to(dtype) for leaf, shape in shapes.items()}


def weight_and_input():
    return torch.randn(ROWS, COLUMNS, generator=generator(2)), torch.randn(9, COLUMNS, generator=generator(3))


def test_the_table_holds_every_method():
    assert {method.type for method in NUMBERS.values()} == METHODS.keys()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_start_is_the_identity_bit_for_bit(method, dtype):
    weight, x = (tensor.to(dtype) for tensor in weight_and_input())
    tensors = method.initial(ROWS, COLUMNS, generator())
    assert {leaf: tuple(t.shape) for leaf, t in tensors.items()} == method.shapes(ROWS, COLUMNS)
    assert torch.equal(method.linear(x, weight, tensors), x @ weight.T)
    assert torch.equal(method.merge(weight, tensors).to(dtype), weight)


@pytest.mark.parametrize("adapter_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("input_dtype", [torch.bfloat16, torch.float32])
def test_output_dtype_is_the_inputs(method, input_dtype, adapter_dtype):
    """docs/field-cases.md: dtype and Cayley mode."""
    weight, x = (tensor.to(input_dtype) for tensor in weight_and_input())
    adapted = method.linear(x, weight, trained(method, dtype=adapter_dtype))
    assert adapted.dtype == input_dtype and not torch.equal(adapted, x @ weight.T)


def test_merge_equals_the_adapted_forward(method):
    """docs/field-cases.md: merged adapter."""
    weight, x = weight_and_input()
    tensors = trained(method)
    merged = method.merge(weight, tensors)
    assert (merged - weight).abs().max() > 0.01
    torch.testing.assert_close(
        x @ merged.T, method.linear(x, weight, tensors), rtol=0, atol=1e-5 * weight.norm().item()
    )


def test_row_shards_are_the_whole(method):
    weight, x = weight_and_input()
    tensors = trained(method)
    shards = [method.linear(x, weight[i : i + 12], method.shard_rows(tensors, i, i + 12)) for i in range(0, ROWS, 12)]
    torch.testing.assert_close(torch.cat(shards, -1), method.linear(x, weight, tensors), rtol=0, atol=1e-5)


def test_column_shards_add_up_to_the_whole(method):
    weight, x = weight_and_input()
    tensors = trained(method)
    cuts = [slice(i, i + 16) for i in range(0, COLUMNS, 16)]
    shards = [
        method.linear(x[:, cut], weight[:, cut], method.shard_columns(tensors, cut.start, cut.stop)) for cut in cuts
    ]
    torch.testing.assert_close(sum(shards), method.linear(x, weight, tensors), rtol=0, atol=1e-5 * weight.norm().item())


def test_a_shard_that_cuts_an_oft_block_is_refused():
    """10944 columns on four ranks are 85.5 blocks of 32 on each; LoRA has no blocks to cut.

    docs/field-cases.md: width and block size.
    """
    share = 10944 // 4
    oft, lora = OFTMethod(block_size=32), LoRAMethod(rank=2)
    with pytest.raises(ValueError, match=f"columns 0 to {share}: a boundary cuts an OFT block of 32"):
        oft.shard_columns({"oft_R": torch.zeros(oft.shapes(8, 10944)["oft_R"])}, 0, share)
    shard = lora.shard_columns({"lora_A": torch.zeros(2, 10944), "lora_B": torch.zeros(8, 2)}, share, 2 * share)
    assert shard["lora_A"].shape == (2, share)


def test_configuration_round_trips_through_peft(method):
    """docs/field-cases.md: dtype and Cayley mode; exported adapter."""
    config = AdapterConfig(method=method, target_modules=TARGETS, layers=(0, 2))
    assert AdapterConfig.from_peft_json(config.to_peft_json()) == config
    assert hash(config) == hash(AdapterConfig.from_peft_json(config.to_peft_json()))


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "model.embed_tokens"])
def test_head_and_embeddings_are_refused_with_the_reason(method, target):
    """docs/field-cases.md: tied embeddings."""
    with pytest.raises(ValueError, match="tied to the embeddings shares their matrix"):
        AdapterConfig(method=method, target_modules=("q_proj", target))


def linears(model) -> dict[str, tuple[int, int]]:
    """Rows and columns of the decoder layers' linears by name."""
    named = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "layers." in name}
    return {name: tuple(linear.weight.shape) for name, linear in named.items()}


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.2,
    )
    return Qwen3ForCausalLM(config).float().eval()


def random_adapter(model, method, targets=TARGETS) -> Adapter:
    config = AdapterConfig(method=method, target_modules=targets)
    tensors = {
        tensor_name(module, leaf): tensor
        for index, (module, shape) in enumerate(linears(model).items())
        if config.targets(module)
        for leaf, tensor in trained(method, *shape, seed=index).items()
    }
    return Adapter(tensors, config)


@torch.no_grad()
def logits_with(model, adapter: Adapter, merged: bool):
    """Logits of ``model`` with our own numerics on its linears, merged into the weights or applied to the inputs."""
    method = adapter.config.method
    for module in adapter.modules():
        linear, tensors = model.get_submodule(module), adapter.module_tensors(module)
        if merged:
            linear.weight.data = method.merge(linear.weight, tensors)
        else:
            linear.forward = lambda x, w=linear.weight, t=tensors: method.linear(x, w, t)
    return model(IDS).logits


@pytest.mark.parametrize("merged", [False, True])
@torch.no_grad()
def test_peft_loads_what_is_written(model, method, merged, tmp_path):
    """Logits through peft equal our own, and differ from the base's. docs/field-cases.md: exported adapter."""
    adapter = random_adapter(model, method)
    adapter.check(linears(model))
    (tmp_path / "adapter_config.json").write_text(adapter.config.to_peft_json())
    (tmp_path / "adapter_model.safetensors").write_bytes(adapter.to_peft_file())
    base, state = model(IDS).logits, {name: tensor.clone() for name, tensor in model.state_dict().items()}
    theirs = PeftModel.from_pretrained(model, tmp_path).eval()(IDS).logits
    fresh = Qwen3ForCausalLM(model.config).float().eval()
    fresh.load_state_dict(state)
    ours = logits_with(fresh, adapter, merged)
    assert (theirs - base).abs().max() > 0.05
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@torch.no_grad()
def test_what_peft_writes_is_loaded(model, method, tmp_path):
    """docs/field-cases.md: exported adapter."""
    if method.type == "oft":
        exact = method.cayley_neumann_terms is None
        config = OFTConfig(
            r=0, oft_block_size=method.block_size, use_cayley_neumann=not exact, target_modules=list(TARGETS)
        )
    else:
        config = LoraConfig(r=method.rank, lora_alpha=method.alpha, target_modules=list(TARGETS))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    theirs = get_peft_model(model, config).eval()
    for name, parameter in theirs.named_parameters():
        if any(part in name for part in ("oft_R", "lora_A", "lora_B")):
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator(4)))
    theirs.save_pretrained(tmp_path)
    config = AdapterConfig.from_peft_json((tmp_path / "adapter_config.json").read_text())
    assert config == AdapterConfig(method=method, target_modules=TARGETS)
    adapter = Adapter(load_file(tmp_path / "adapter_model.safetensors"), config)
    fresh = Qwen3ForCausalLM(model.config).float().eval()
    fresh.load_state_dict(state)
    adapter.check(linears(fresh))
    assert (theirs(IDS).logits - fresh(IDS).logits).abs().max() > 0.05
    torch.testing.assert_close(logits_with(fresh, adapter, merged=False), theirs(IDS).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "name, key",
    [
        *(("oft", key) for key in ("oft_block_size", "use_cayley_neumann", "num_cayley_neumann_terms")),
        *(("oft exact", key) for key in ("oft_block_size", "use_cayley_neumann")),
        *(("lora", key) for key in ("r", "lora_alpha")),
    ],
)
def test_a_file_without_an_option_that_changes_the_mathematics_is_refused(name, key):
    peft = AdapterConfig(method=NUMBERS[name]).to_peft()
    del peft[key]
    with pytest.raises(ValueError, match=f"^{key} is missing: it changes what the adapter computes"):
        AdapterConfig.from_peft(peft)


@pytest.mark.parametrize("name, key", [("oft", "module_dropout"), ("lora", "lora_dropout")])
def test_what_has_no_effect_when_served_is_no_reason_to_refuse(name, key):
    config = AdapterConfig(method=NUMBERS[name])
    for changed in (config.to_peft() | {key: 0.1}, {k: v for k, v in config.to_peft().items() if k != key}):
        assert AdapterConfig.from_peft(changed) == config


def test_a_tensor_of_the_other_method_is_listed(model, method):
    """docs/field-cases.md: names that fit nothing."""
    adapter = random_adapter(model, method)
    other = next(leaf for known in METHODS.values() for leaf in known.leaves if known.type != method.type)
    module = adapter.modules()[0]
    stray = tensor_name(module, other)
    assert split_name(stray) == (module, other)
    with pytest.raises(AdapterError) as refused:
        Adapter({**adapter.tensors, stray: torch.zeros(1)}, adapter.config).check(linears(model))
    assert refused.value.problems == [f"{stray}: unknown tensor, not one of {method.peft_type}'s"]


def test_a_version_with_fewer_targets_leaves_the_others_alone(model, method):
    """The payload's side: q_proj and down_proj, then q_proj only. docs/field-cases.md: what the version before left."""
    both, one = (random_adapter(model, method, targets) for targets in (("q_proj", "down_proj"), ("q_proj",)))
    received = Adapter.decode(one.encode())
    assert {module.rsplit(".", 1)[-1] for module in received.modules()} == {"q_proj"}
    assert all(not received.module_tensors(module) for module in both.modules() if module.endswith("down_proj"))


def test_other_types_are_refused():
    """docs/field-cases.md: merged adapter."""
    with pytest.raises(ValueError, match="peft_type 'BOFT': the slots hold OFT or LoRA adapters"):
        AdapterConfig.from_peft_json(json.dumps({"peft_type": "BOFT", "target_modules": ["q_proj"]}))
