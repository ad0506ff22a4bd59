"""What both plugins read from a checkpoint's names."""

import pytest

from orbit_kernels.linears.names import EXPERT_NUMBER, is_language, layer_number, unused_tensors, without_expert

KIMI = "language_model."
LAYER = "model.layers.{}.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("name", "layer", "expert"),
    [
        ("model.layers.12.mlp.experts.7.up_proj.weight", 12, "7"),
        ("language_model.model.layers.3.mlp.experts.40.down_proj", 3, "40"),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", 3, None),
        ("model.layers.3.mlp.experts.gate_proj.oft_R.weight", 3, None),
        ("model.norm.weight", None, None),
    ],
)
def test_numbers_of_layers_and_experts(name, layer, expert):
    found = EXPERT_NUMBER.search(name)
    assert (layer_number(name), found and found[0]) == (layer, expert)


def test_what_experts_share_has_no_number():
    assert without_expert("model.layers.1.mlp.experts.12.up_proj") == "model.layers.1.mlp.experts.up_proj"
    assert without_expert("model.layers.1.mlp.up_proj") == "model.layers.1.mlp.up_proj"


def test_what_sees_images_is_no_language_model():
    others = ("vision_tower.encoder.blocks.0.attn.qkv_proj", "mm_projector.linear_1")
    assert not any(map(is_language, others)) and all(map(is_language, ("language_model.lm_head", "lm_head")))


def test_layers_beyond_the_model_and_what_sees_images_may_be_there():
    beyond, images = KIMI + LAYER.format(61), "vision_tower.encoder.blocks.0.wqkv.weight"
    names = [KIMI + LAYER.format(60), beyond, images, "audio.weight"]
    assert unused_tensors(names, prefix=KIMI, num_layers=61, tied_head=False) == {beyond, images}


def test_without_a_prefix_or_further_layers_nothing_but_a_tied_head_may():
    names = [LAYER.format(4), "vision_tower.encoder.weight"]
    assert unused_tensors(names, prefix="", num_layers=None, tied_head=True) == {"lm_head.weight"}
    assert unused_tensors(names, prefix="", num_layers=4, tied_head=False) == {LAYER.format(4)}
