"""Trainer and server of two ranks each under an asynchronous run: both divide the model alike and round alike."""

import re

import pytest
import torch

from tests.support.runs import ASYNC

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("run")]

TWO_RANKS = (
    "actor_rollout_ref.rollout.n_gpus_per_node=2",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "trainer.n_gpus_per_node=2",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
    "trainer.total_training_steps=3",
)


@pytest.fixture(scope="module")
def run(train, models, tmp_path_factory):
    return train(models(torch.bfloat16), tmp_path_factory.mktemp("ranks"), *ASYNC, *TWO_RANKS).succeeded()


def test_the_base_is_compared_before_and_after(run):
    compared = re.search(r"orbit: (\d+) tensors of the base are equal, trainer ranks: 2, servers: 1", run.log)
    # 14 linears in two parts; norms whole; a vocabulary that fits the first rank.
    assert int(compared[1]) == 2 * 14 + 11
    assert re.search(r"orbit: base unchanged \([0-9a-f]{64}\)", run.log)


def test_the_policy_trained_is_the_policy_served(run):
    """Both round the ranks' partial sums to BF16 before they add them; one rank would be 1.5e-2 to 1.9e-2 away."""
    run.check_parity()


def test_versions_grow_by_one(run):
    assert [step["orbit/version/served"] for step in run.steps] == [2, 3, 4]
