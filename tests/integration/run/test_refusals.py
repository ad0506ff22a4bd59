"""What cannot work ends at once: a sentence with the fix, a non-zero exit, nothing started."""

import pytest
import torch
from transformers import AutoTokenizer

pytestmark = pytest.mark.xdist_group("run")


@pytest.mark.parametrize(
    "override, message",
    [
        ("orbit.adapter.rnak=8", "orbit.adapter.rnak: unknown key; the keys of orbit.adapter are alpha, block_size"),
        (
            "orbit.adapter.block_size=48",
            "is not a multiple of the OFT block size 48; choose a block size that divides it",
        ),
        ("actor_rollout_ref.model.path=/no/such/folder", "give the folder of a Hugging Face checkpoint"),
        ("trainer.v1.trainer_mode=colocate_async", "sync, separate_async"),
        ("actor_rollout_ref.rollout.top_p=0.85", "truncated distribution"),
    ],
)
def test_refused_before_anything_starts(train, models, tmp_path, override, message):
    check_refused(train(models(torch.bfloat16), tmp_path, "trainer.v1.trainer_mode=sync", override), message)


def test_tokeniser_of_another_model_is_refused(train, models, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(models(torch.bfloat16))
    tokenizer.add_tokens([f"<another {number}>" for number in range(8)])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    run = train(
        models(torch.bfloat16),
        tmp_path,
        "trainer.v1.trainer_mode=sync",
        f"actor_rollout_ref.model.tokenizer_path={tmp_path}/tokenizer",
    )
    check_refused(run, "it belongs to another model; set actor_rollout_ref.model.tokenizer_path to the model's own")


def check_refused(run, message: str) -> None:
    assert run.status == 1
    assert message in run.log
    assert "ray init kwargs" not in run.log
    assert not (run.folder / "metrics.jsonl").exists()
