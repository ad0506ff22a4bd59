"""This module compares the log-probs that tokens were sampled with and those that the trainer computes for them.

Suffixes: T tokens.
"""

import math

import torch

from orbit_verl.config.keys import ParitySettings

PREFIX = "orbit/parity"


class ParityError(RuntimeError):
    """A `ParityError` says that trainer and server disagree about the policy by more than the run allows."""


def parity_metrics(sampled_T: torch.Tensor, trained_T: torch.Tensor, kind: str = "") -> dict[str, float]:
    """Returns statistics of one group of tokens.

    Args:
        sampled_T: log-probs reported by the server, in nats.
        trained_T: log-probs of the same tokens computed by the trainer, in nats.
        kind: prefix of the metric names, e.g. ``"stale_"``.

    Returns:
        Mean, 99th percentile and maximum of the absolute difference, and the k3 estimate of
        KL(sampled || trained), ``exp(d) - d - 1`` with ``d = trained - sampled``
        (Schulman, "Approximating KL divergence", 2020); nothing for no tokens.
    """
    if sampled_T.numel() == 0:
        return {}
    d_T = trained_T.double() - sampled_T.double()
    abs_T = d_T.abs()
    return {
        f"{PREFIX}/{kind}logprob_abs_diff_mean": abs_T.mean().item(),
        f"{PREFIX}/{kind}logprob_abs_diff_p99": torch.quantile(abs_T, 0.99).item(),
        f"{PREFIX}/{kind}logprob_abs_diff_max": abs_T.max().item(),
        f"{PREFIX}/{kind}k3_kl": (d_T.exp() - d_T - 1.0).mean().item(),
        f"{PREFIX}/{kind}num_tokens": abs_T.numel(),
    }


def violations(metrics: dict[str, float], settings: ParitySettings) -> list[str]:
    """Returns the bounds that a step's metrics pass, as sentences.

    Tokens of other versions are not bounded, but no log-prob may be other than a finite number.
    """
    found = [
        f"{key} is {metrics[key]}: a log-prob of the trainer or a server is not a finite number"
        for kind in ("", "audit_", "stale_")
        if not math.isfinite(metrics.get(key := f"{PREFIX}/{kind}logprob_abs_diff_max", 0.0))
    ]
    for kind in ("", "audit_"):
        for statistic in ("mean", "p99"):
            key = f"{PREFIX}/{kind}logprob_abs_diff_{statistic}"
            bound = getattr(settings, f"max_{statistic}")
            value = metrics.get(key)
            if value is not None and bound is not None and value > bound:
                found.append(f"{key} is {value:.3g}, above orbit.parity.max_{statistic}={bound:g}")
    return found
