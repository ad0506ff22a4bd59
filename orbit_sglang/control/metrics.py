"""This module puts Prometheus metrics of the slots on SGLang's own ``/metrics``.

SGLang exports from files that each of its processes writes (``PROMETHEUS_MULTIPROC_DIR``, set by ``--enable-metrics``).
Without that option the values stay in memory and nobody reads them.
"""

import time
from collections.abc import Mapping

from orbit_kernels.contract.errors import ErrorCode

REFRESH_S = 1.0
STAGE_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
PAUSE_BUCKETS_S = (0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.1)


class SlotMetrics:
    """``SlotMetrics`` are written by the process that does what is measured; the files of all processes add up.

    Args:
        exported: False for ranks that do what another one already counts.
    """

    def __init__(self, *, exported: bool = True):
        # Not at the module's head: the package chooses files or memory when it is imported, and SGLang 0.5.12 names the
        # folder of the files only after it has loaded the plugins (entrypoints/engine.py::_set_envs_and_config).
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        registry = CollectorRegistry()
        self._exported = exported
        self._stage_seconds = Histogram(
            "orbit_stage_seconds", "Time to place a version in its slot.", buckets=STAGE_BUCKETS_S, registry=registry
        )
        self._pause_seconds = Histogram(
            "orbit_activate_pause_seconds",
            "Time an activation or rollback holds the scheduler's loop.",
            buckets=PAUSE_BUCKETS_S,
            registry=registry,
        )
        self._rejected = Counter("orbit_stage_rejected_total", "Stagings refused.", ["reason"], registry=registry)
        self._rollbacks = Counter("orbit_rollback_total", "Rollbacks carried out.", registry=registry)
        self._active_version = Gauge(
            "orbit_active_version", "Version of new requests.", multiprocess_mode="mostrecent", registry=registry
        )
        self._requests = Gauge(
            "orbit_requests_in_flight",
            "Requests running and waiting.",
            ["version"],
            multiprocess_mode="mostrecent",
            registry=registry,
        )
        self._labels: set[int] = set()
        self._next_refresh = 0.0

    def observe_stage(self, seconds: float) -> None:
        """Observes that a version was placed in its slot."""
        if self._exported:
            self._stage_seconds.observe(seconds)

    def observe_pause(self, seconds: float) -> None:
        """Observes that an activation or rollback held the loop.

        The next ``refresh`` comes with the scheduler's next iteration.
        """
        if self._exported:
            self._pause_seconds.observe(seconds)
        self._next_refresh = 0.0

    def count_rejection(self, code: ErrorCode) -> None:
        """Counts that a staging was refused."""
        if self._exported:
            self._rejected.labels(code).inc()

    def count_rollback(self) -> None:
        """Counts that a rollback was carried out."""
        if self._exported:
            self._rollbacks.inc()

    def is_due(self) -> bool:
        """Returns whether the gauges are older than ``REFRESH_S`` seconds."""
        return self._exported and time.monotonic() >= self._next_refresh

    def refresh(self, active_version: int, requests: Mapping[int, int]) -> None:
        """Sets the gauges; a version without requests reads 0."""
        self._next_refresh = time.monotonic() + REFRESH_S
        self._active_version.set(active_version)
        self._labels.update(requests)
        for version in self._labels:
            self._requests.labels(version).set(requests.get(version, 0))
        self._labels.intersection_update(requests)  # a version that has gone reads 0 and is not touched again
