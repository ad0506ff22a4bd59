"""Experts of SGLang's own kernels are recorded as they pass by its loader."""

import pytest
import torch

from orbit_kernels.checkpoint.manifest import BaseManifest
from orbit_kernels.formats import read_base_scheme
from orbit_kernels.formats.int4 import Int4Format
from orbit_kernels.formats.scheme.write import quantization_config
from orbit_sglang.base.streamed import StreamedExperts

CONFIG = {"num_hidden_layers": 1, "hidden_size": 64, "moe_intermediate_size": 32, "dtype": "bfloat16"}
SHAPES = {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}
PREFIX = "language_model.model.layers"


def expert_tensors(layer: int, weight_format: Int4Format) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(layer)
    return {
        f"{PREFIX}.{layer}.mlp.experts.{expert}.{projection}.{leaf}": tensor
        for expert in range(4)
        for projection, shape in SHAPES.items()
        for leaf, tensor in weight_format.quantize(torch.randn(shape, generator=generator).bfloat16()).items()
    }


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_record_every_expert_once_and_pass_everything_on(num_ranks):
    """Layers beyond the model's number, which SGLang does not load, and other tensors are not recorded."""
    weight_format = Int4Format(group_size=32)
    scheme = read_base_scheme(CONFIG | {"quantization_config": quantization_config(weight_format, ["lm_head"])})
    experts = expert_tensors(0, weight_format)
    weights = experts | expert_tensors(1, weight_format) | {"language_model.lm_head.weight": torch.zeros(2, 2)}
    manifests = []
    for rank in range(num_ranks):
        passing = StreamedExperts(scheme, CONFIG, torch.bfloat16, rank=rank, num_ranks=num_ranks)
        passed = dict(passing.watch(weights.items()))
        assert passed.keys() == weights.keys() and all(passed[name] is weights[name] for name in weights)
        manifests.append(passing.manifest)
    assert sum(len(manifest.tensors) for manifest in manifests) == len(experts)
    formats = {name.rpartition(".")[0]: weight_format for name in experts}
    assert BaseManifest.union(manifests) == BaseManifest.of(formats, experts.items())


def test_unquantised_experts_are_recorded_in_the_dtype_that_sglang_holds():
    passing = StreamedExperts(read_base_scheme(CONFIG), CONFIG, torch.float32, rank=0, num_ranks=1)
    name = "model.layers.0.mlp.experts.3.down_proj.weight"
    weight = torch.randn(SHAPES["down_proj"]).bfloat16()
    list(passing.watch([(name, weight)]))
    assert passing.manifest.tensors == BaseManifest.of({}, [(name, weight.float())]).tensors
    assert passing.manifest.formats["model.layers.0.mlp.experts.3.down_proj"]["dtype"] == "float32"
