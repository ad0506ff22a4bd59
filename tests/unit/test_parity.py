"""Log-prob parity: the statistics by hand, the gate, and the version of every token."""

import math

import pytest
import torch

from orbit_verl.config.keys import ParitySettings
from orbit_verl.driver.parity import PREFIX, parity_metrics, violations
from orbit_verl.driver.samples import UNKNOWN_VERSION, token_versions


def test_statistics_by_hand():
    sampled = torch.log(torch.tensor([0.5, 0.25, 0.125, 0.5]))
    trained = torch.log(torch.tensor([0.5, 0.5, 0.125, 0.25]))
    metrics = parity_metrics(sampled, trained)
    log2 = math.log(2)
    assert metrics[f"{PREFIX}/logprob_abs_diff_mean"] == pytest.approx(log2 / 2)
    assert metrics[f"{PREFIX}/logprob_abs_diff_max"] == pytest.approx(log2)
    # exp(d) - d - 1 is 2 - log 2 - 1 for the doubled and 1/2 + log 2 - 1 for the halved probability.
    assert metrics[f"{PREFIX}/k3_kl"] == pytest.approx((1 - log2 + log2 - 0.5) / 4)
    assert metrics[f"{PREFIX}/num_tokens"] == 4


def test_no_tokens_give_no_metrics():
    assert parity_metrics(torch.tensor([]), torch.tensor([]), "stale_") == {}


def test_tail_is_gated_when_the_mean_is_small():
    """The mean alone would pass. docs/field-cases.md: truncated sampling."""
    difference = torch.zeros(100)
    difference[:3] = 0.5
    metrics = parity_metrics(torch.zeros(100), difference)
    assert metrics[f"{PREFIX}/logprob_abs_diff_mean"] < 0.02
    found = violations(metrics, ParitySettings())
    assert len(found) == 1 and "p99" in found[0] and "orbit.parity.max_p99=0.2" in found[0]


def test_not_a_number_is_a_violation():
    """Of stale tokens too, and with the bounds off."""
    for kind in ("", "audit_", "stale_"):
        for value in (float("nan"), float("-inf")):
            metrics = parity_metrics(torch.zeros(2), torch.tensor([0.0, value]), kind)
            (found,) = violations(metrics, ParitySettings(max_mean=None, max_p99=None))
            assert f"{PREFIX}/{kind}logprob_abs_diff_max is" in found and "not a finite number" in found


def test_stale_tokens_are_not_gated_but_audited_ones_are():
    sampled, trained = torch.zeros(4), torch.ones(4)
    assert violations(parity_metrics(sampled, trained, "stale_"), ParitySettings()) == []
    assert len(violations(parity_metrics(sampled, trained, "audit_"), ParitySettings())) == 2


def test_bounds_can_be_switched_off():
    metrics = parity_metrics(torch.zeros(4), torch.ones(4))
    assert violations(metrics, ParitySettings(max_mean=None, max_p99=None)) == []


def test_version_of_every_token():
    sample = {"orbit_versions": [[7, 0, 2], [8, 2, 3]], "min_global_steps": 6, "max_global_steps": 7}
    assert token_versions(sample, 5) == [7, 7, 8, 8, 8]
    assert token_versions(sample, 3) == [7, 7, 8]


def test_several_turns_of_one_version():
    """A multi-turn sample carries the spans of its first turn only."""
    one = {"orbit_versions": [[7, 0, 2]], "min_global_steps": 6, "max_global_steps": 6}
    assert token_versions(one, 6) == [7] * 6
    mixed = {**one, "max_global_steps": 7}
    assert token_versions(mixed, 6) == [UNKNOWN_VERSION] * 6
