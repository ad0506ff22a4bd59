"""What cannot work ends at once: a sentence with the fix, a non-zero exit, nothing started."""

import pytest
import torch
from transformers import AutoTokenizer

from tests.support.runs import SYNC

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


def test_a_tracker_of_a_step_that_is_gone_is_refused(train, models, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("4")
    run = train(models(torch.bfloat16), tmp_path, "trainer.v1.trainer_mode=sync", "trainer.resume_mode=auto")
    check_refused(run, "global_step_4 is not there or not whole; no whole step lies there")


def test_a_data_set_below_a_batch_is_refused_before_model_and_server(train, models, tmp_path):
    """Ray has started then, since verl filters rows there."""
    run = train(models(torch.bfloat16), tmp_path, *SYNC, "data.train_max_samples=5")
    assert run.status == 1
    assert (
        "has 5 rows (after data.filter_overlong_prompts), data.train_batch_size=8: an epoch has no whole batch"
        in run.log
    )
    assert "create worker group" not in run.log
    assert not (run.folder / "metrics.jsonl").exists()


def check_refused(run, message: str) -> None:
    assert run.status == 1
    assert message in run.log
    assert "ray init kwargs" not in run.log
    assert not (run.folder / "metrics.jsonl").exists()
