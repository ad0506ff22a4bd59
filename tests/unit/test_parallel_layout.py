"""How a model may be divided between ranks, and what of it each holds."""

import dataclasses
import re

import pytest
import torch
from transformers import DeepseekV3Config, Qwen3Config, Qwen3MoeConfig

from orbit_kernels.adapters import LoRAMethod, OFTMethod
from orbit_kernels.adapters.config import AdapterConfig
from orbit_kernels.families import DecoderArchitecture, read_architecture
from orbit_kernels.formats import Int4Format
from orbit_kernels.formats.scheme.fields import Rules
from orbit_kernels.linears.share import Share, divided_dim
from orbit_verl.model.layout import GroupRank, ParallelLayout, ParallelSizes
from orbit_verl.model.sharding import check_stages, check_tensor_parallel, linear_share

TARGETS = ("q_proj", "o_proj", "up_proj", "down_proj")
OFT, LORA = (
    AdapterConfig(method=method, target_modules=TARGETS) for method in (OFTMethod(block_size=16), LoRAMethod())
)
FIELDS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "dtype": "float32",
}


def architecture(config=Qwen3Config, name="Qwen3ForCausalLM", **fields) -> DecoderArchitecture:
    return read_architecture(config(architectures=[name], **FIELDS | fields))


MOE = architecture(
    Qwen3MoeConfig, "Qwen3MoeForCausalLM", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48
)


@pytest.mark.parametrize(
    "sizes, model, message",
    [
        ({"tensor": 0}, (2, 0, 4), "tensor_model_parallel_size=0: must be at least 1"),
        ({"expert": 2}, (2, 0, 4), "expert_model_parallel_size=2: the model is dense"),
        (
            {"expert": 3},
            (2, 8, 3),
            "expert_model_parallel_size=3: 8 experts cannot be divided evenly; choose one of [1, 2, 4, 8]",
        ),
        (
            {"tensor": 4, "expert_tensor": 2},
            (2, 8, 4),
            "expert_tensor_parallel_size=2: must be 1, which keeps each expert whole, or 4",
        ),
        (
            {"pipeline": 2},
            (61, 8, 2),
            "pipeline_model_parallel_size=2: 61 layers cannot be divided evenly; choose one of [1, 61], or set",
        ),
        (
            {"pipeline": 2, "last_stage": 7},
            (4, 0, 2),
            "num_layers_in_last_pipeline_stage=7: of 4 layers in actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 "
            "stages, -3 are left for the other 1",
        ),
        ({"pipeline": 2, "last_stage": 4}, (4, 0, 2), "0 are left for the other 1; each stage must have at least one"),
        ({"pipeline": 4, "first_stage": 1}, (6, 0, 4), "5 are left for the other 3"),
        ({"pipeline": 2, "first_stage": 1, "last_stage": 1}, (4, 0, 2), "2 are left for the other 0"),
        ({"last_stage": 1, "first_stage": 1}, (2, 0, 1), "0 are left for the other -1"),
        ({"tensor": 4, "pipeline": 2}, (2, 0, 4), "ranks cannot be divided into groups of 8, the product"),
        (
            {"tensor": 2, "expert": 4, "expert_tensor": 2},
            (2, 8, 4),
            "expert_model_parallel_size=4, expert_tensor_parallel_size=2",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, model, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ParallelSizes(**sizes).check(*model)


def test_sizes_that_fit():
    ParallelSizes(tensor=2, expert=4, pipeline=2).check(2, 8, 8)
    ParallelSizes(pipeline=2, last_stage=30).check(61, 384, 2)
    ParallelSizes(pipeline=2, first_stage=1, last_stage=3).check(4, 0, 2)
    ParallelSizes(pipeline=4, first_stage=2, last_stage=3).check(61, 384, 4)


@pytest.mark.parametrize(
    "sizes, num_layers, expected",
    [
        ({}, 3, [3]),
        ({"pipeline": 2}, 4, [2, 2]),
        ({"pipeline": 2, "last_stage": 1}, 4, [3, 1]),
        ({"pipeline": 2, "first_stage": 1, "last_stage": 3}, 4, [1, 3]),
        ({"pipeline": 4, "first_stage": 2, "last_stage": 3}, 61, [2, 28, 28, 3]),
    ],
)
def test_the_layers_of_each_stage(sizes, num_layers, expected):
    stages = ParallelSizes(**sizes).stages(num_layers)
    assert list(map(len, stages)) == expected
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))


def test_a_stage_that_would_train_nothing_is_refused():
    first_dense = dataclasses.replace(MOE, moe=dataclasses.replace(MOE.moe, layers=frozenset({1})))
    everywhere, experts, dense = (
        dataclasses.replace(OFT, target_modules=targets)
        for targets in (("q_proj",), ("experts.up_proj", "experts.gate_proj"), ("mlp.up_proj", "mlp.gate_proj"))
    )
    for adapter in (everywhere, experts, dense):
        check_stages(first_dense, ParallelSizes(), adapter)
    check_stages(first_dense, ParallelSizes(pipeline=2), everywhere)
    with pytest.raises(
        ValueError, match=r"pipeline_model_parallel_size=2: .* match no linear of layers 0 to 0, a stage"
    ):
        check_stages(first_dense, ParallelSizes(pipeline=2), experts)
    with pytest.raises(ValueError, match="match no linear of layers 1 to 1, a stage"):
        check_stages(first_dense, ParallelSizes(pipeline=2), dense)


@pytest.mark.parametrize(
    "model, size, adapter, message",
    [
        (architecture(num_attention_heads=6), 4, OFT, "4: 6 attention heads cannot be divided"),
        (architecture(), 4, OFT, "4: 2 key and value heads cannot be divided"),
        (architecture(vocab_size=129), 2, OFT, "2: 129 tokens of the vocabulary cannot be divided"),
        (
            architecture(intermediate_size=80),
            2,
            OFT,
            "2: model.layers.0.mlp.down_proj: columns 0 to 40: a boundary cuts an OFT block",
        ),
    ],
)
def test_cuts_that_do_not_fit_are_refused(model, size, adapter, message):
    with pytest.raises(ValueError, match=f"tensor_model_parallel_size={message}"):
        check_tensor_parallel(model, ParallelSizes(tensor=size), adapter)


def test_a_cut_through_a_block_that_experts_share_is_refused():
    shared = dataclasses.replace(OFT, target_modules=("q_proj", "experts.down_proj"))
    check_tensor_parallel(MOE, ParallelSizes(tensor=2), shared)
    with pytest.raises(ValueError, match="experts.0.down_proj: columns 0 to 24: a boundary cuts an OFT block"):
        check_tensor_parallel(MOE, ParallelSizes(tensor=2, expert_tensor=2), shared)


def test_lora_may_be_cut_anywhere():
    check_tensor_parallel(architecture(intermediate_size=80), ParallelSizes(tensor=2), LORA)


def test_a_cut_through_a_group_of_weights_is_refused():
    rules = Rules(formats=((".*_proj", Int4Format(group_size=32)),))
    int4 = dataclasses.replace(architecture().base, rules=rules)
    model = dataclasses.replace(architecture(), base=int4)
    with pytest.raises(ValueError, match="down_proj: columns 0 to 48: 48 cuts a block of 32 columns"):
        check_tensor_parallel(model, ParallelSizes(tensor=2), LORA)


def test_ranks_hold_every_linear_between_them():
    for module, divided in {
        "model.layers.0.self_attn.k_proj": "rows",
        "model.layers.0.self_attn.o_proj": "columns",
        "model.layers.0.mlp.experts.3.up_proj": None,
    }.items():
        shares = [linear_share(MOE, module, ParallelLayout(tensor=GroupRank(2, rank))) for rank in range(2)]
        for dim, size in zip(("rows", "columns"), shares[0].shape, strict=True):
            parts = [getattr(share, dim) for share in shares]
            held = [index for part in parts for index in part]
            assert held == list(range(size)) * (1 if dim == divided else 2)


def test_experts_are_divided_where_the_run_divides_each():
    layout = ParallelLayout(tensor=GroupRank(2, 1), divides_each_expert=True)
    share = linear_share(MOE, "model.layers.0.mlp.experts.3.down_proj", layout)
    assert share == Share(shape=(64, 48), rows=range(64), columns=range(24, 48))


def test_latents_are_whole():
    latent = architecture(DeepseekV3Config, "DeepseekV3ForCausalLM", num_key_value_heads=4)
    layout = ParallelLayout(tensor=GroupRank(2, 1))
    whole = {
        leaf: linear_share(latent, f"model.layers.0.self_attn.{leaf}", layout) for leaf in ("q_a_proj", "q_b_proj")
    }
    assert [share.has_all_rows for share in whole.values()] == [True, False]


def test_a_layout_holds_its_layers_and_experts():
    layout = ParallelLayout(num_experts=8, expert=GroupRank(4, 1), layers=range(1, 2))
    held = {
        "model.layers.1.mlp.experts.2.up_proj.weight": True,
        "model.layers.1.mlp.experts.4.up_proj.weight": False,
        "model.layers.0.mlp.experts.2.up_proj.weight": False,
        "model.layers.1.self_attn.q_proj.weight": True,
        "model.embed_tokens.weight": False,
    }
    assert {name: layout.holds(name) for name in held} == held


def test_the_part_of_a_tensor():
    whole = torch.arange(12).view(2, 6)
    assert divided_dim((2, 3), (2, 6)) == 1
    assert torch.equal(GroupRank(2, 1).own(whole, (2, 3)), whole[:, 3:])
    assert GroupRank(2, 1).own(whole, (2, 6)) is whole
