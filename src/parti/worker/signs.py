"""What a worker tells of its reading side: in each heartbeat, and at each scrape of its metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from parti.config import Settings
from parti.core.quantiles import quantile
from parti.model.safe_text import cut
from parti.telemetry.metrics import Metrics
from parti.worker.lanes import Lanes
from parti.worker.shards import Shards

_RATE_OVER_S = 0.5
"""Shortest time that a rate is measured over."""
_MOST_NAMED = 20
_MOST_TEXT = 200


class Signs:
    """Looks at the lanes when a heartbeat is due; costs the handling of messages nothing."""

    def __init__(self, lanes: Lanes, metrics: Metrics) -> None:
        self._lanes = lanes
        self._metrics = metrics
        self._latency = metrics.handler_latency
        self._counted = list(self._latency.counts)
        self._finished, self._since_s = 0, time.perf_counter()
        self._rate = self._p50_ms = self._p99_ms = 0.0

    def look(self) -> dict[str, Any]:
        """Fields of a heartbeat."""
        self._measure()
        lanes, metrics = self._lanes, self._metrics
        parked = [lane.ownership.partition.id for lane in lanes.roster.all() if lane.parked and not lane.incoming]
        failing = lanes.failures.failing_now()
        return {
            "rate": round(self._rate, 1),
            "finished": lanes.finished,
            "failures": metrics.handler_failures.total,
            "dead_letters": metrics.dead_letters.value,
            "update_failures": metrics.update_failures.value,
            "updates": metrics.update_duration.count,
            "updates_skipped": metrics.update_skipped.value,
            "in_hand": lanes.held,
            "p50_ms": self._p50_ms,
            "p99_ms": self._p99_ms,
            "parked": tuple(parked[:_MOST_NAMED]),
            "failing": {p: cut(text, _MOST_TEXT) for p, text in list(failing.items())[:_MOST_NAMED]},
        }

    def _measure(self) -> None:
        """End the interval that rate and latencies are measured over, once it is long enough, and begin another."""
        elapsed_s = time.perf_counter() - self._since_s
        if elapsed_s <= _RATE_OVER_S:
            return
        self._rate = (self._lanes.finished - self._finished) / elapsed_s
        self._finished, self._since_s = self._lanes.finished, self._since_s + elapsed_s
        counts = list(self._latency.counts)
        since = [now - before for now, before in zip(counts, self._counted, strict=True)]
        self._counted = counts
        self._p50_ms, self._p99_ms = (
            round(1000 * quantile(self._latency.bounds, since, share), 3) for share in (0.5, 0.99)
        )


def connect_probes(metrics: Metrics, settings: Settings, lanes: Lanes, shards: Shards, *, mirrored: bool) -> None:
    """Have gauges of the reading side looked up when they are scraped; `mirrored`: there may be a hot mirror."""
    pauses_at = int(settings.backpressure * settings.max_ack_pending)
    metrics.subject_limit.value = settings.max_subjects * settings.consumer_shards
    metrics.mirror_limit.value = settings.hot_mirror_max_bytes if mirrored else 0
    probes: Mapping[str, Callable[[], float]] = {
        "parti_consumer_inflight": lambda: lanes.held,
        "parti_consumer_inflight_limit": lambda: pauses_at * len(shards.engines),
        "parti_lane_depth": lambda: max(0, lanes.held - lanes.running),
        "parti_lane_count": lambda: len(lanes.roster.lanes),
        "parti_handler_running": lambda: lanes.running,
        "parti_pull_healthy": lambda: float(shards.healthy),
        "parti_pull_batch_size": lambda: max(engine.batch for engine in shards.engines),
        "parti_pull_credit": lambda: sum(engine.credit for engine in shards.engines),
    }
    for name, function in probes.items():
        metrics.set_probe(name, function)
