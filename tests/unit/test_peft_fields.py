"""What Orbit does with each field of peft's configurations, field by field of the installed peft."""

import dataclasses

import pytest
import safetensors.torch
import torch
from peft import LoraConfig, OFTConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from orbit_kernels.adapters.config import AdapterConfig
from orbit_kernels.contract.payload import Adapter, AdapterError
from orbit_kernels.contract.peft_folder import CONFIG_FILE, WEIGHTS_FILE, read_peft_folder

TARGETS = ["q_proj", "down_proj"]
CONFIGS = {
    "lora": LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS, task_type="CAUSAL_LM"),
    "oft": OFTConfig(r=0, oft_block_size=8, target_modules=TARGETS, task_type="CAUSAL_LM"),
}

# Fields that change what the adapter computes and that no file may leave out.
REQUIRED = {
    "lora": {"peft_type", "target_modules", "r", "lora_alpha"},
    "oft": {
        *("peft_type", "peft_version", "target_modules"),
        *("oft_block_size", "use_cayley_neumann", "num_cayley_neumann_terms"),
    },
}

# Fields that are read, whose absence means one thing in every release of peft.
READ = {
    "lora": {"layers_to_transform": [0], "use_rslora": True},
    "oft": {"layers_to_transform": [0]},
}

# Fields that change what the adapter computes, or which tensors it has, in a way that the slots do not have.
REFUSED = {
    "lora": {
        "alora_invocation_tokens": [1, 2],
        "alpha_pattern": {"q_proj": 32},
        "arrow_config": {"top_k": 2},
        "bias": "lora_only",
        "exclude_modules": ["v_proj"],
        "fan_in_fan_out": True,
        "init_lora_weights": "pissa",
        "kasa_config": {"beta": 0.1},
        "layer_replication": [[0, 2]],
        "lora_bias": True,
        "modules_to_save": ["lm_head"],
        "monteclora_config": {"num_samples": 2},
        "rank_pattern": {"q_proj": 2},
        "target_parameters": ["mlp.experts.gate_up_proj"],
        "trainable_token_indices": [3],
        "use_bdlora": {"nblocks": 2},
        "use_dora": True,
        "use_qalora": True,
        "velora_config": {"num_groups": 2},
    },
    "oft": {
        "bias": "oft_only",
        "block_share": True,
        "coft": True,
        "exclude_modules": ["v_proj"],
        "fan_in_fan_out": True,
        "modules_to_save": ["lm_head"],
        "r": 4,
    },
}

_OF_ANY_METHOD = {
    "auto_mapping": {"parent_library": "x"},
    "base_model_name_or_path": "another",
    "inference_mode": False,
    # The tensors say which layers are adapted, and are held against layers_to_transform.
    "layers_pattern": "layers",
    "revision": "main",
    "task_type": None,
}

# Fields without effect when the adapter is served: they are of training, or of a field that is refused.
WITHOUT_EFFECT = {
    "lora": _OF_ANY_METHOD
    | {
        "corda_config": {"corda_method": "kpm"},
        "ensure_weight_tying": True,
        "eva_config": {"rho": 3.0},
        "lora_dropout": 0.1,
        "lora_ga_config": {"scale": "unit"},
        "loftq_config": {"loftq_bits": 8},
        "megatron_config": {"x": 1},
        "megatron_core": "another",
        "peft_version": "0.12.0",
        "qalora_group_size": 32,
        "runtime_config": {"ephemeral_gpu_offload": True},
    },
    "oft": _OF_ANY_METHOD | {"eps": 1e-3, "init_weights": False, "module_dropout": 0.1},
}


@pytest.fixture(params=CONFIGS)
def name(request):
    return request.param


def saved(name: str) -> dict:
    """The fields as peft writes them."""
    config = CONFIGS[name].to_dict()
    return {**config, "peft_type": config["peft_type"].value, "target_modules": TARGETS}


def test_every_field_of_the_installed_peft_has_one_decision(name):
    decided = [*REQUIRED[name], *READ[name], *REFUSED[name], *WITHOUT_EFFECT[name]]
    assert sorted(decided) == sorted(field.name for field in dataclasses.fields(CONFIGS[name]))


def test_a_file_without_a_required_field_is_refused_by_name(name):
    for key in REQUIRED[name]:
        peft = saved(name)
        del peft[key]
        with pytest.raises(ValueError, match=f"^{key} "):
            AdapterConfig.from_peft(peft)


def test_a_field_that_is_read_changes_the_adapter(name):
    for key, value in READ[name].items():
        assert AdapterConfig.from_peft(saved(name) | {key: value}) != AdapterConfig.from_peft(saved(name)), key


def test_a_field_that_the_slots_do_not_have_is_refused_by_name_and_may_be_left_out(name):
    for key, value in REFUSED[name].items():
        with pytest.raises(ValueError, match=rf"\b{key} "):
            AdapterConfig.from_peft(saved(name) | {key: value})
        without = {other: value for other, value in saved(name).items() if other != key}
        assert AdapterConfig.from_peft(without) == AdapterConfig.from_peft(saved(name)), key


def test_a_field_without_effect_is_no_reason_to_refuse(name):
    for key, value in WITHOUT_EFFECT[name].items():
        without = {other: value for other, value in saved(name).items() if other != key}
        for changed in (saved(name) | {key: value}, without):
            assert AdapterConfig.from_peft(changed) == AdapterConfig.from_peft(saved(name)), key


@pytest.mark.parametrize("method, key", [("oft", "use_cayley_neumann"), ("lora", "use_rslora")])
@pytest.mark.parametrize("value", [None, "false", 0])
def test_a_switch_is_true_or_false(method, key, value):
    with pytest.raises(ValueError, match=f"^{key} {value!r}: must be true or false"):
        AdapterConfig.from_peft(saved(method) | {key: value})


@pytest.mark.parametrize("change", [{"oft_block_size": 0}, {}, {"oft_block_size": None}])
def test_blocks_by_their_number_are_refused_as_such(change):
    """Also where the block size is missing or, which peft itself refuses, given beside it."""
    with pytest.raises(ValueError, match="r 4: as many blocks for every linear.* in place of r$"):
        AdapterConfig.from_peft(saved("oft") | {"r": 4} | change)


@pytest.fixture(scope="module")
def model_config():
    return LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)


@torch.no_grad()
def test_minor_components_are_lora(model_config, tmp_path):
    """peft's MiCA freezes B and leaves the base as it is: what it writes has LoRA's tensors and computes LoRA's update."""
    config = LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS, init_lora_weights="mica")
    theirs = get_peft_model(LlamaForCausalLM(model_config).eval(), config).eval()
    layer = theirs.base_model.model.model.layers[0].mlp.down_proj
    layer.lora_A["default"].weight.normal_()
    theirs.save_pretrained(tmp_path)
    adapter, x = read_peft_folder(tmp_path), torch.randn(5, 48)
    ours = adapter.config.method.linear(
        x, layer.base_layer.weight, adapter.module_tensors("model.layers.0.mlp.down_proj")
    )
    torch.testing.assert_close(ours, layer(x), rtol=0, atol=1e-5)
    assert (ours - layer.base_layer(x)).abs().max() > 0.1


@pytest.mark.parametrize("method, key", [("oft", "use_cayley_neumann"), ("lora", "lora_alpha")])
def test_both_sides_name_the_missing_field(model_config, tmp_path, method, key):
    """The trainer's reader of ``init_path`` names the file too; the server's reader of a payload has only its text."""
    get_peft_model(LlamaForCausalLM(model_config), CONFIGS[method]).save_pretrained(tmp_path)
    config = tmp_path / CONFIG_FILE
    text = config.read_text()
    config.write_text(text.replace(f'"{key}":', f'"not_{key}":'))
    with pytest.raises(ValueError, match=f"^{config}: {key} is missing"):
        read_peft_folder(tmp_path)
    payload = _with_metadata(tmp_path / WEIGHTS_FILE, config.read_text())
    with pytest.raises(AdapterError, match=f"^{key} is missing"):
        Adapter.decode(payload)
    assert Adapter.decode(_with_metadata(tmp_path / WEIGHTS_FILE, text)).config.type == method


def _with_metadata(weights, text: str) -> bytes:
    return safetensors.torch.save(safetensors.torch.load_file(weights), metadata={"adapter_config": text})
