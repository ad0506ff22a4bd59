"""LoRA's numerics, and which of peft's LoRA adapters are accepted."""

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear as PeftLinear

from orbit_kernels.adapters import LoRAMethod
from orbit_kernels.adapters.config import AdapterConfig
from orbit_kernels.adapters.lora import reference as lora

ROWS, COLUMNS, RANK, ALPHA = 48, 64, 4, 6.0


def random(*shape, seed=0, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale).to(dtype)


def factors(dtype=torch.float32):
    return random(RANK, COLUMNS, seed=1, dtype=dtype, scale=0.2), random(ROWS, RANK, seed=2, dtype=dtype, scale=0.2)


def peft_linear(weight, a, b):
    base = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    base.weight.data = weight.clone()
    layer = PeftLinear(base, "default", LoraConfig(r=RANK, lora_alpha=ALPHA), r=RANK, lora_alpha=ALPHA)
    layer.lora_A["default"].weight.data, layer.lora_B["default"].weight.data = a.clone(), b.clone()
    return layer


def test_update_and_its_gradients_equal_pefts():
    weight, x = random(ROWS, COLUMNS), random(5, COLUMNS, seed=3).requires_grad_(True)
    a, b = (tensor.requires_grad_(True) for tensor in factors())
    theirs = peft_linear(weight, a.detach(), b.detach())
    ours = x @ weight.T + lora.update(x, a, lora.scaled(b, ALPHA / RANK))
    expected = theirs(x)
    assert (expected - x @ weight.T).abs().max() > 0.1
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    towards = random(5, ROWS, seed=4)
    got = torch.autograd.grad((ours * towards).sum(), (x, a, b))
    parameters = (x, theirs.lora_A["default"].weight, theirs.lora_B["default"].weight)
    for grad, grad_expected in zip(got, torch.autograd.grad((expected * towards).sum(), parameters), strict=True):
        torch.testing.assert_close(grad, grad_expected, rtol=1e-5, atol=1e-5)


def test_scaling_b_rounds_no_worse_than_scaling_the_product():
    """Largest error against fp64 in BF16, values up to 5.9: 0.0241, and 0.0266 when the product is scaled instead."""
    a, b = factors(torch.bfloat16)
    x = random(256, COLUMNS, seed=3, dtype=torch.bfloat16)
    truth = ALPHA / RANK * (x.double() @ a.double().T) @ b.double().T
    ours = (lora.update(x, a, lora.scaled(b, ALPHA / RANK)).double() - truth).abs().max()
    scaled_product = (((x @ a.T) @ b.T * (ALPHA / RANK)).double() - truth).abs().max()
    assert 0 < scaled_product and ours < 1.2 * scaled_product


def test_initial_tensors_are_seeded_and_follow_kaimings_rule():
    method = LoRAMethod(rank=RANK, alpha=ALPHA)
    one, again = (method.initial(ROWS, COLUMNS, torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(one["lora_A"], again["lora_A"])
    assert not torch.equal(one["lora_A"], method.initial(ROWS, COLUMNS, torch.Generator().manual_seed(8))["lora_A"])
    expected = torch.empty(RANK, COLUMNS)
    torch.nn.init.kaiming_uniform_(expected, a=math.sqrt(5), generator=torch.Generator().manual_seed(7))
    torch.testing.assert_close(one["lora_A"], expected)


@pytest.mark.parametrize(
    "key, value",
    [
        ("use_dora", True),
        ("bias", "lora_only"),
        ("lora_bias", True),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 2}),
        ("alpha_pattern", {"q_proj": 2}),
        ("exclude_modules", ["k_proj"]),
        ("layer_replication", [[0, 2]]),
        ("target_parameters", ["experts"]),
        ("fan_in_fan_out", True),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "loftq"),
        ("r", 0),
        ("r", True),
        ("r", None),
        ("lora_alpha", 0),
        ("lora_alpha", float("nan")),
        ("lora_alpha", "16"),
    ],
)
def test_options_that_change_the_mathematics_are_refused_by_name(key, value):
    peft = AdapterConfig(method=LoRAMethod()).to_peft()
    assert AdapterConfig.from_peft(peft).method == LoRAMethod()
    name = {"r": "rank", "lora_alpha": "alpha"}.get(key, key)
    with pytest.raises(ValueError, match=f"^{name} "):
        AdapterConfig.from_peft({**peft, key: value})


def test_what_peft_itself_writes_is_read():
    config = LoraConfig(r=RANK, lora_alpha=16, target_modules=["q_proj"], layers_to_transform=[1]).to_dict()
    read = AdapterConfig.from_peft({**config, "peft_type": "LORA", "target_modules": ["q_proj"]})
    assert read == AdapterConfig(method=LoRAMethod(rank=RANK, alpha=16), target_modules=("q_proj",), layers=(1,))
    assert read.method.scaling == 4.0


def test_the_scale_of_a_rank_stabilised_adapter_is_pefts():
    config = LoraConfig(r=RANK, lora_alpha=16, target_modules=["0"], use_rslora=True)
    theirs = get_peft_model(torch.nn.Sequential(torch.nn.Linear(COLUMNS, ROWS)), config).base_model.model[0].scaling
    read = AdapterConfig.from_peft({**config.to_dict(), "peft_type": "LORA", "target_modules": ["q_proj"]})
    assert read.method.scaling == pytest.approx(theirs["default"], rel=1e-15) != 16 / RANK


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_update_on_cuda_is_the_one_on_cpu(dtype, tolerance):
    """Against fp64 on the CPU; BF16 rounds inputs, factors and outputs to 8 bits."""
    a, b = factors()
    x = random(64, COLUMNS, seed=3)
    expected = lora.update(x.double(), a.double(), lora.scaled(b.double(), 2.0))
    got = lora.update(x.cuda().to(dtype), a.cuda(), lora.scaled(b.cuda(), 2.0)).cpu().double()
    assert (got - expected).abs().max() < tolerance * expected.abs().max()
