"""Which linear has which format, and configurations that are refused by name."""

import copy
import json

import pytest
import torch

from orbit_kernels.formats import Bf16Format, Fp8Format, Int4Format, Mxfp4Format, Nvfp4Format, read_base_scheme
from orbit_kernels.formats.scheme.write import quantization_config
from tests.support.formats import FORMATS

UP_PROJ, O_PROJ = "model.layers.0.mlp.up_proj", "model.layers.11.self_attn.o_proj"
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "ignore": ["lm_head", "model.layers.0.mlp*"],
    "config_groups": {
        "group_0": {
            "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
            "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
            "targets": ["Linear"],
        }
    },
}
# As in Kimi-K2-Thinking's config.json: routed experts only.
KIMI = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "global_compression_ratio": None,
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
}
NVFP4 = quantization_config(Nvfp4Format(), ["lm_head"])
MXFP4 = quantization_config(Mxfp4Format(), ["lm_head"])


def scheme(config, **fields):
    return read_base_scheme({"dtype": "bfloat16", "quantization_config": config, **fields})


def changed(config, path: str, value):
    """A deep copy with one field set, by its path ``a/b/c``."""
    result = copy.deepcopy(config)
    *parents, leaf = path.split("/")
    place = result
    for parent in parents:
        place = place[parent]
    place[leaf] = value
    return result


def test_an_unquantised_model():
    found = read_base_scheme({"torch_dtype": "float32"})
    assert not found.rules.formats
    assert found.format_of(UP_PROJ) == Bf16Format(dtype=torch.float32)


def test_fp8_with_exceptions():
    config = FP8 | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "self_attn"]}
    found = scheme(config)
    assert found.format_of(UP_PROJ) == Fp8Format()
    assert found.format_of("model.layers.0.mlp.gate_proj") == Fp8Format()
    for module in ("lm_head", "model.layers.0.mlp.gate", O_PROJ):
        assert found.format_of(module) == Bf16Format()


def test_ue8m0_scales():
    assert scheme(FP8 | {"scale_fmt": "ue8m0"}).format_of(UP_PROJ) == Fp8Format(scale_dtype="ue8m0")


def test_kimi_quantises_routed_experts_only():
    found = scheme(KIMI)
    assert found.format_of("model.layers.1.mlp.experts.17.up_proj") == Int4Format(group_size=32)
    for module in (UP_PROJ, O_PROJ, "model.layers.1.mlp.shared_experts.up_proj", "lm_head"):
        assert found.format_of(module) == Bf16Format()


def test_a_name_counts_before_a_class():
    config = changed(KIMI, "config_groups/group_1", copy.deepcopy(KIMI["config_groups"]["group_0"]))
    config = changed(config, "config_groups/group_1/targets", ["re:.*down_proj"])
    config = changed(config, "config_groups/group_1/weights/group_size", 128) | {"ignore": []}
    found = scheme(config)
    assert found.format_of("model.layers.0.mlp.down_proj") == Int4Format(group_size=128)
    assert found.format_of(UP_PROJ) == Int4Format(group_size=32)


def test_int4_scales_have_the_models_dtype():
    found = read_base_scheme({"dtype": "float32", "quantization_config": KIMI | {"ignore": []}})
    assert found.format_of(UP_PROJ) == Int4Format(scale_dtype=torch.float32)


def test_asymmetric_and_harmless_activation_order():
    config = changed(KIMI, "config_groups/group_0/weights/symmetric", False) | {"ignore": []}
    config = changed(config, "config_groups/group_0/weights/actorder", "weight")
    assert scheme(config).format_of(UP_PROJ) == Int4Format(symmetric=False)


def test_modelopt_ignores_by_pattern():
    found = scheme(MODELOPT)
    assert found.format_of(O_PROJ) == Nvfp4Format(style="modelopt")
    assert found.format_of(UP_PROJ) == Bf16Format()
    assert found.format_of("model.layers.1.mlp.up_proj") == Nvfp4Format(style="modelopt")


@pytest.mark.parametrize(
    "name", ["fp8", "fp8_ue8m0", "fp8_block_64", "int4_32", "int4_asymmetric", "nvfp4", "nvfp4_weight_only", "mxfp4"]
)
def test_what_is_written_is_read(name):
    written = json.loads(json.dumps(quantization_config(FORMATS[name], ["lm_head", "model.layers.0.mlp.gate"])))
    found = scheme(written)
    assert found.format_of(UP_PROJ) == FORMATS[name]
    assert found.format_of("model.layers.0.mlp.gate_proj") == FORMATS[name]
    assert found.format_of("model.layers.0.mlp.gate") == Bf16Format()


@pytest.mark.parametrize("name", ["nvfp4_modelopt", "bf16"])
def test_styles_that_are_only_read(name):
    with pytest.raises(ValueError, match="only read, not written"):
        quantization_config(FORMATS[name], [])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method is 'gptq'"),
        (FP8 | {"fmt": "e5m2"}, "fmt is 'e5m2'"),
        (FP8 | {"activation_scheme": "static"}, "activation_scheme is 'static'"),
        (FP8 | {"weight_block_size": None}, "weight_block_size is None"),
        (FP8 | {"format_version": 2}, r"unknown fields \['format_version'\]"),
        (KIMI | {"format": "int-quantized"}, "format is 'int-quantized'"),
        (KIMI | {"version": "1.3.0"}, "version 1.3.0"),
        (KIMI | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (KIMI | {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config"),
        (KIMI | {"quantization_status": "frozen"}, "quantization_status is 'frozen'"),
        (KIMI | {"config_groups": {}}, "no config_groups"),
        (changed(KIMI, "config_groups/group_0/weights/num_bits", 8), "group_0 weights: num_bits is 8"),
        (changed(KIMI, "config_groups/group_0/weights/strategy", "channel"), "strategy is 'channel'"),
        (changed(KIMI, "config_groups/group_0/weights/actorder", "group"), "actorder is 'group'"),
        (changed(KIMI, "config_groups/group_0/weights/group_size", None), "group_size is None"),
        (changed(KIMI, "config_groups/group_0/weights/scale_dtype", "fp7"), "scale_dtype is 'fp7'"),
        (changed(KIMI, "config_groups/group_0/input_activations", {"num_bits": 8}), "input_activations"),
        (changed(KIMI, "config_groups/group_0/targets", ["Embedding"]), "target 'Embedding'"),
        (MODELOPT | {"quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'"),
        (MODELOPT | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "kv_cache_scheme"),
        (MODELOPT | {"group_size": 32}, "group_size is 32"),
        (changed(MODELOPT, "config_groups/group_0/weights/num_bits", 8), "weights: num_bits is 8"),
        (changed(NVFP4, "config_groups/group_0/weights/group_size", 32), "group_size is 32"),
        (changed(NVFP4, "config_groups/group_0/input_activations/dynamic", True), "dynamic is True"),
        (changed(MXFP4, "config_groups/group_0/weights/scale_dtype", "torch.bfloat16"), "scale_dtype"),
        (changed(MXFP4, "config_groups/group_0/weights/scale_bias", 126), r"unknown fields \['scale_bias'\]"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(config, message):
    with pytest.raises(ValueError, match=message):
        scheme(config)


def test_experts_of_another_format_are_refused():
    with pytest.raises(ValueError, match="expert_dtype 'fp4'"):
        scheme(FP8, expert_dtype="fp4")


@pytest.mark.parametrize("dtype", ["float16", "int8", None])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match="dtype"):
        read_base_scheme({"dtype": dtype})
