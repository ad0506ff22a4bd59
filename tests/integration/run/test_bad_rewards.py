"""A run whose reward function returns what is no number, and later numbers whose differences overflow."""

import math

import pytest
import torch

from tests.support.runs import SYNC

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("run")]

# One sample in twenty is no number for the first 150; then all are numbers of which a group has no mean in fp32.
REWARD = """
import itertools

calls = itertools.count(1)

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    call = next(calls)
    digits = sum(character.isdigit() for character in solution_str) / 6
    if call > 150:
        return 1e38 * (3 + digits / 10)
    return {0: float("nan"), 20: None, 40: float("-inf")}.get(call % 60, digits)
"""


@pytest.fixture(scope="module")
def run(train, models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad_rewards")
    (folder / "reward.py").write_text(REWARD)
    overrides = ("trainer.total_training_steps=20", f"reward.custom_reward_function.path={folder}/reward.py")
    return train(models(torch.float32), folder, *SYNC, *overrides)


def test_a_reward_that_is_no_number_fails_its_group_and_the_others_train(run):
    early = [step for step in run.steps if step["orbit/update/skipped_steps"] == 0]
    assert len(early) >= 3, run.log[-3000:]
    failed = [step["orbit/rewards/failed_groups"] for step in early]
    assert sum(failed) >= 3
    for step, groups in zip(early, failed, strict=True):
        assert math.isfinite(step["actor/grad_norm"]) and math.isfinite(step["critic/score/mean"])
        assert step.get("training/rollout_failure/evicted_samples", 0) == groups
        assert step["orbit/parity/num_tokens"] > 0
    for value in ("nan", "-inf", "None"):
        assert f"a reward is {value}" in run.log


def test_skipped_steps_in_a_row_end_the_run_and_name_their_causes(run):
    """Two may be skipped, and each says so in its metrics; the third ends the run."""
    assert run.status != 0
    assert [step["orbit/update/skipped_steps"] for step in run.steps][-2:] == [1, 1]
    assert "3 optimiser steps in a row were skipped" in run.log
    assert "orbit.max_skipped_steps=2" in run.log and "advantages" in run.log
