import pytest
import torch

from orbit_sglang.cpu.stacked_parameter import StackedParameter


@pytest.fixture
def stacked():
    return StackedParameter(data=torch.full((4, 3), torch.nan), part_rows=[2, 1, 1], weight_loader=None)


def test_parts_of_any_number_of_rows_keep_their_own_block(stacked):
    """160, 80 and 80 rows have 2, 1 and 1 blocks of 128, which share none.

    docs/field-cases.md: blocks that do not fit.
    """
    parts = [torch.randn(2, 3), torch.randn(1, 3), torch.randn(1, 3)]
    for shard, part in zip("qkv", parts, strict=True):
        stacked.load_qkv_weight(part, shard_id=shard, shard_offset=7, shard_size=7)
    assert torch.equal(stacked.data, torch.cat(parts))


def test_merged_parts_are_named_by_their_index(stacked):
    part = torch.randn(1, 3)
    stacked.load_merged_column_weight(part, shard_id=2)
    assert torch.equal(stacked.data[3:], part) and stacked.data[:3].isnan().all()


def test_a_part_of_another_shape_is_no_part(stacked):
    with pytest.raises(AssertionError, match="loaded_weight.shape"):
        stacked.load_qkv_weight(torch.randn(2, 3), shard_id="k")
