"""The gate of a run: each mini-batch's log-probs are compared before it is trained on.

Suffixes: T tokens.
"""

import logging
from collections import Counter
from typing import Any

from transfer_queue import KVBatchMeta

from orbit_verl.config.keys import ParitySettings
from orbit_verl.driver.parity import ParityError, parity_metrics, violations
from orbit_verl.driver.samples import UNKNOWN_VERSION, SampledTokens

logger = logging.getLogger(__name__)


class ParityGate:
    """A `ParityGate` measures how far the policy that is trained is from the one that sampled, and holds it to the bounds.

    Args:
        workers: verl's worker group of the policy.
        settings: ``orbit.parity``.
        temperature: of the rollout.
    """

    def __init__(self, workers: Any, settings: ParitySettings, temperature: float):
        self._workers = workers
        self._settings = settings
        self._temperature = temperature

    def measure(self, batch: KVBatchMeta, trained_version: int, *, audit: bool) -> dict[str, float]:
        """Returns the metrics of a mini-batch whose log-probs the trainer has computed.

        Args:
            batch: the mini-batch.
            trained_version: whose log-probs these are.
            audit: whether stale sequences are recomputed too.
        """
        tokens = SampledTokens.read(batch)
        current_T = tokens.versions_T == trained_version
        age_T = (trained_version - tokens.versions_T[tokens.versions_T != UNKNOWN_VERSION]).double()
        staleness = {}
        if age_T.numel():
            staleness = {"orbit/staleness/mean": age_T.mean().item(), "orbit/staleness/max": age_T.max().item()}
        return {
            **parity_metrics(tokens.sampled_T[current_T], tokens.trained_T[current_T]),
            **parity_metrics(tokens.sampled_T[~current_T], tokens.trained_T[~current_T], "stale_"),
            **(self._audit(batch, tokens, trained_version) if audit else {}),
            **staleness,
        }

    def check(self, metrics: dict[str, float], where: str) -> None:
        """Holds what ``measure`` found against the bounds; ``where`` is the step and version of the message.

        Raises:
            ParityError: a bound is passed, and the run is to stop then.
        """
        found = violations(metrics, self._settings)
        if not found:
            return
        message = f"{where}: {'; '.join(found)}"
        if self._settings.on_violation == "stop":
            raise ParityError(
                f"{message}. Trainer and server compute different policies; nothing was trained on this mini-batch"
            )
        logger.warning("orbit: parity: %s", message)

    def _audit(self, batch: KVBatchMeta, tokens: SampledTokens, trained_version: int) -> dict[str, float]:
        """Measures parity of stale sequences at the version that sampled them, with the adapter kept for it."""
        held = self._workers.published_versions()[0] if self._settings.audit_samples else []
        stale = [
            (row, version)
            for row, version in tokens.version_of_row.items()
            if version in held and version != trained_version
        ]
        if not stale:
            return {}
        version = Counter(version for _, version in stale).most_common(1)[0][0]
        rows = [row for row, row_version in stale if row_version == version][: self._settings.audit_samples]
        num_ranks = max(self._workers._dispatch_info["actor"]) + 1
        rows = rows[: len(rows) // num_ranks * num_ranks]
        if not rows:
            return {}
        audited = KVBatchMeta(
            partition_id=batch.partition_id,
            keys=[batch.keys[row] for row in rows],
            tags=[batch.tags[row] for row in rows],
            extra_info={
                "calculate_entropy": False,
                "compute_loss": False,
                "temperature": self._temperature,
                "micro_batch_size_per_gpu": len(rows) // num_ranks,
            },
        )
        self._workers.use_published(version)
        try:
            self._workers.compute_log_prob(audited)
        finally:
            self._workers.use_current()
        recomputed = SampledTokens.read(audited, trained_field="log_probs")
        return parity_metrics(recomputed.sampled_T, recomputed.trained_T, "audit_")
