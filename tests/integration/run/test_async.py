"""Asynchronous runs on a BF16 base: two servers generate while the trainer trains, and versions change under them."""

import re

import pytest
import torch

from tests.support.runs import ASYNC

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("run")]


@pytest.fixture(scope="module")
def run(train, models, tmp_path_factory):
    return train(
        models(torch.bfloat16),
        tmp_path_factory.mktemp("async"),
        *ASYNC,
        "actor_rollout_ref.rollout.n_gpus_per_node=2",
        "trainer.total_training_steps=6",
        "trainer.test_freq=3",
        "orbit.adapter.fused=split",
    ).succeeded()


def test_parity_in_bf16(run):
    run.check_parity()


def test_a_version_behind_is_far_off(run):
    """The gate's number for tokens of the version before is at least ten times that of the right version."""
    late = [step for step in run.steps if "orbit/parity/audit_logprob_abs_diff_mean" in step]
    assert late, "no step had stale tokens to audit"
    for step in late:
        stale = step["orbit/parity/stale_logprob_abs_diff_mean"]
        assert stale >= 10 * step["orbit/parity/audit_logprob_abs_diff_mean"]


def test_versions_grow_by_one_and_samples_lag_little(run):
    assert [step["orbit/version/served"] for step in run.steps] == [2, 3, 4, 5, 6, 7]
    assert all(0 <= step["orbit/staleness/max"] <= 2 for step in run.steps)


def test_both_servers_answer_and_are_served_every_version(run):
    """``served`` is the oldest of their active versions."""
    assert "orbit: 25 tensors of the base are equal, trainer ranks: 1, servers: 2" in run.log
    assert max(step["orbit/rollout_utilization_min"] for step in run.steps) > 0


def test_nothing_was_aborted(run):
    assert "RejectedSample" not in run.log
    assert not any(step.get("training/rollout_failure/evicted_samples") for step in run.steps)


def test_the_run_ends_with_the_base_unchanged_and_an_adapter(run):
    """The run compares the digests at its start and its end, and fails otherwise."""
    assert re.search(r"orbit: base unchanged \([0-9a-f]{64}\)", run.log)
    assert (run.adapter / "adapter_model.safetensors").is_file()


def test_validation_uses_the_active_version(run):
    """No request of a validation names an adapter; every token of it is the active version's.

    docs/field-cases.md: no path misses the adapter.
    """
    validations = [step for step in run.steps if "orbit/version/validated" in step]
    assert len(validations) == 2
    for step in validations:
        assert step["orbit/version/validated"] == step["orbit/version/validated_newest"] == step["orbit/version/served"]
