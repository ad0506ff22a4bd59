"""What cannot work ends at once: a sentence with the fix, a non-zero exit, nothing started."""

import pytest
import torch


@pytest.mark.parametrize(
    "override, message",
    [
        ("orbit.adapter.rnak=8", "orbit.adapter.rnak: unknown key; the keys of orbit.adapter are block_size"),
        (
            "orbit.adapter.block_size=48",
            "is not a multiple of the OFT block size 48; choose a block size that divides it",
        ),
        ("actor_rollout_ref.model.path=/no/such/folder", "give the folder of a Hugging Face checkpoint"),
    ],
)
def test_refused_before_anything_starts(train, models, tmp_path, override, message):
    run = train(models(torch.bfloat16), tmp_path, "trainer.v1.trainer_mode=sync", override)
    assert run.status == 1
    assert message in run.log
    assert "ray init kwargs" not in run.log
    assert not (tmp_path / "metrics.jsonl").exists()
