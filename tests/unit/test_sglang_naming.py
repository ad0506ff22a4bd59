"""SGLang's names of linears against the checkpoint's."""

import pytest

from orbit_sglang.model.naming import part_names, without_language_prefix


@pytest.mark.parametrize(
    "module, parts",
    [
        ("self_attn.fused_qkv_a_proj_with_mqa", ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa")),
        ("self_attn.kv_a_proj_with_mqa", ("self_attn.kv_a_proj_with_mqa",)),
        ("mlp.shared_experts.gate_up_proj", ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")),
    ],
)
def test_parts_are_named_in_the_order_of_their_rows(module, parts):
    prefix = "language_model.model.layers.3."
    assert part_names(prefix + module) == tuple(prefix + part for part in parts)


def test_a_prefix_is_taken_from_names_and_patterns_alike():
    patterns = ["language_model.lm_head", r"re:language_model\.model\.layers\.0\..*", "re:.*self_attn.*", "lm_head"]
    expected = ["lm_head", r"re:model\.layers\.0\..*", "re:.*self_attn.*", "lm_head"]
    assert without_language_prefix(patterns) == expected
