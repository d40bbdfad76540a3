"""What a heartbeat says of the work in hand: how long handlers take, what fails, what is parked."""

from __future__ import annotations

from typing import Any

from parti.core.quantiles import quantile
from parti.telemetry.metrics import Metrics
from parti.worker.lanes import Lanes

_MOST_NAMED = 20
_MOST_TEXT = 200


class Signs:
    """Looks at the lanes when a heartbeat is due; costs the handling of messages nothing."""

    def __init__(self, lanes: Lanes, metrics: Metrics) -> None:
        self._lanes = lanes
        self._latency = metrics.handler_latency
        self._counted = list(self._latency.counts)
        self._p50_ms = self._p99_ms = 0.0

    def measure(self) -> None:
        """End the interval that latencies are measured over, and begin the next one."""
        counts = list(self._latency.counts)
        since = [now - before for now, before in zip(counts, self._counted, strict=True)]
        self._counted = counts
        self._p50_ms, self._p99_ms = (
            round(1000 * quantile(self._latency.bounds, since, share), 3) for share in (0.5, 0.99)
        )

    def look(self) -> dict[str, Any]:
        """Fields of a heartbeat."""
        parked = [
            lane.ownership.partition.id for lane in self._lanes.roster.all() if lane.parked and not lane.incoming
        ]
        failing = self._lanes.failures.failing_now()
        return {
            "in_hand": self._lanes.held,
            "p50_ms": self._p50_ms,
            "p99_ms": self._p99_ms,
            "parked": tuple(parked[:_MOST_NAMED]),
            "failing": {p: text[:_MOST_TEXT] for p, text in list(failing.items())[:_MOST_NAMED]},
        }
