"""The alerts of parti, as values: when each fires, how urgent it is, and what it says. Pure.

Each names its metrics by their declarations (`parti.telemetry.queries`), has a page of the same name in
docs/runbooks, and a test that provokes it. `parti.telemetry.rules` writes them down for Prometheus.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from parti.core import slo
from parti.telemetry.queries import (
    BATCH,
    METRICS,
    buckets,
    count,
    grown,
    largest,
    rate,
    series,
    total,
)

FLEET = "job"
"""The label that tells fleets apart: Prometheus sets it to the name of the scrape job, one for each fleet."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One condition that somebody should know of."""

    name: str
    expr: str
    summary: str
    """What is shown; `$labels` and `$value` as Prometheus has them."""
    lasts: str = "0s"
    """How long it must hold."""
    severity: Literal["page", "ticket"] = "ticket"
    """`page`: somebody should look now. `ticket`: on the next working day."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What counts as too much; the defaults suit most fleets."""

    redelivery_ratio: float = round(1 - slo.REDELIVERY.target, 6)
    subject_share: float = 0.9
    update_failure_ratio: float = 0.05
    inflight_share: float = 0.9
    lag_msgs: int = 10_000
    claim_failures: int = 5
    """Within ten minutes; a few are normal when a leader changes."""
    move_s: float = 5.0
    moves_each: float = 3.0
    """Moves of each partition, on average, within half an hour."""
    mirror_share: float = 0.95
    pipeline_lag: int = 100_000
    latency_p95_s: float = 0.25
    """The usual p95 of handlers; twice that must be a bucket of the histogram of their times."""
    audit_age_s: int = 2 * 86_400
    """An audit that ended longer ago is old: a daily one may be late once."""


def alerts(t: Thresholds) -> tuple[Alert, ...]:
    """All alerts but those on error budgets (`parti.telemetry.objectives`)."""
    return (*_consumers(t), *_handling(t), *_fleets(t), *_storage(t), *_batches(t))


def _consumers(t: Thresholds) -> Iterator[Alert]:
    m, worker = METRICS, (FLEET, "worker")
    again, received = (total(rate(series(x), "5m"), FLEET) for x in (m.redeliveries, m.messages))
    yield Alert(
        "PartiRedeliveries",
        f"{again} / {received} > {t.redelivery_ratio:g}",
        "{{ $value | humanizePercentage }} of the messages of {{ $labels.job }} are delivered more than once",
        lasts="5m",
    )
    yield Alert(
        "PartiSubjectsNearCap",
        f"{largest(series(m.subject_count), *worker)} / {largest(series(m.subject_limit), *worker)}"
        f" > {t.subject_share:g}",
        "Worker {{ $labels.worker }} carries {{ $value | humanizePercentage }} of the subjects that it may",
        lasts="10m",
    )
    failed, done = (total(grown(x, 600), *worker) for x in (series(m.update_failures), count(m.update_duration)))
    yield Alert(
        "PartiConsumerUpdatesFail",
        f"{failed} / ({done} + {failed}) > {t.update_failure_ratio:g}",
        "{{ $value | humanizePercentage }} of the consumer updates of worker {{ $labels.worker }} failed",
    )
    yield Alert(
        "PartiBacklog",
        f"{largest(series(m.inflight), *worker)} / {largest(series(m.inflight_limit), *worker)}"
        f" > {t.inflight_share:g}",
        "Worker {{ $labels.worker }} has had its hands full for ten minutes: handlers are slower than the stream",
        lasts="10m",
    )
    yield Alert(
        "PartiLag",
        f"{total(series(m.lag), FLEET)} > {t.lag_msgs}",
        "{{ $value | humanize }} messages wait for {{ $labels.job }} on the server",
        lasts="15m",
    )
    yield Alert(
        "PartiNotPulling",
        f"{largest(series(m.pull_healthy), *worker)} == 0 and {largest(series(m.subject_count), *worker)} > 0",
        "Worker {{ $labels.worker }} has partitions but cannot read them",
        lasts="1m",
        severity="page",
    )
    yield Alert(
        "PartiStalled",
        f"{largest(series(m.stalled), *worker)} > 0 or {total(grown(series(m.stalls), 600), *worker)} > 0",
        "Worker {{ $labels.worker }} stood still within the last ten minutes, or does",
        severity="page",
    )
    yield Alert(
        "PartiDisconnected",
        f"{largest(series(m.connection_state, state='connected'), *worker)} == 0",
        "Worker {{ $labels.worker }} has no connection to NATS",
        lasts="1m",
        severity="page",
    )


def _handling(t: Thresholds) -> Iterator[Alert]:
    m, worker = METRICS, (FLEET, "worker")
    yield Alert(
        "PartiDeadLetters",
        f"{total(grown(series(m.dead_letters), 600), FLEET)} > 0",
        "{{ $value | humanize }} messages of {{ $labels.job }} became dead letters within ten minutes",
    )
    yield Alert(
        "PartiJobsWait",
        f"{largest(series(m.jobs_slot_queue), *worker)} > 0",
        "Jobs of worker {{ $labels.worker }} have waited for slots for a quarter of an hour",
        lasts="15m",
    )


def _fleets(t: Thresholds) -> Iterator[Alert]:
    m, worker = METRICS, (FLEET, "worker")
    yield Alert(
        "PartiDown",
        f"absent({series(m.build_info)})",
        "No worker is scraped at all: every other alert is blind",
        lasts="5m",
        severity="page",
    )
    yield Alert(
        "PartiNoLeader",
        f"{total(series(m.leading), FLEET)} == 0 and {total(series(m.fleet_state, state='!standby'), FLEET)} > 0",
        "{{ $labels.job }} has no rebalancer: nothing moves, and nothing is taken over",
        lasts="30s",
        severity="page",
    )
    yield Alert(
        "PartiPartitionsUnowned",
        f"{largest(series(m.fleet_unowned), FLEET)} > 0",
        "{{ $value }} partitions of {{ $labels.job }} have no owner: their messages wait",
        lasts="1m",
        severity="page",
    )
    yield Alert(
        "PartiDegraded",
        f"{largest(series(m.fleet_state, state='degraded'), *worker)} == 1",
        "Worker {{ $labels.worker }} is degraded: see the reason `fleet` in its /healthz",
        lasts="1m",
        severity="page",
    )
    yield Alert(
        "PartiLeaseLost",
        f"{total(grown(series(m.lease_losses), 600), *worker)} > 0",
        "Worker {{ $labels.worker }} lost its lease and had to stop",
    )
    yield Alert(
        "PartiClaimsFail",
        f"{total(grown(series(m.claim_failures), 600), FLEET)} > {t.claim_failures}",
        "{{ $value | humanize }} claims of {{ $labels.job }} were changed by somebody else within ten minutes",
    )
    yield Alert(
        "PartiMovesSlow",
        f"histogram_quantile(0.95, {total(grown(buckets(m.move_duration), 900), FLEET, 'le')}) > {t.move_s:g}",
        "One move in twenty of {{ $labels.job }} takes longer than {{ $value | humanizeDuration }}",
    )
    moved = total(grown(series(m.claims_given, kind="moved"), 1800), FLEET)
    yield Alert(
        "PartiPartitionsFlap",
        f"{moved} > {t.moves_each:g} * {largest(series(m.fleet_partitions), FLEET)} > 0",
        "Partitions of {{ $labels.job }} keep moving: {{ $value | humanize }} moves within half an hour",
    )
    yield Alert(
        "PartiStandbyMissing",
        f"{total(series(m.standby), *worker)} == 1",
        "Nobody stands by for worker {{ $labels.worker }}: if it dies, its partitions wait for its lease to end",
        lasts="2m",
    )


def _storage(t: Thresholds) -> Iterator[Alert]:
    m, worker = METRICS, (FLEET, "worker")
    yield Alert(
        "PartiPositionsNotStored",
        f"{total(grown(series(m.progress_failures), 300), *worker)} > 0",
        "Worker {{ $labels.worker }} cannot store its positions: a crash would repeat what it does now",
        lasts="2m",
    )
    yield Alert(
        "PartiLedgerStopped",
        f"{total(grown(series(m.ledger_failures), 300), *worker)} > 0",
        "The ledger takes no rows of worker {{ $labels.worker }}: nothing is started or acknowledged until it does",
        lasts="2m",
        severity="page",
    )
    yield Alert(
        "PartiMirrorFull",
        f"{largest(series(m.mirror_bytes), FLEET)} / {largest(series(m.mirror_limit), FLEET)} > {t.mirror_share:g}",
        "The hot mirror of {{ $labels.job }} is {{ $value | humanizePercentage }} full",
        lasts="10m",
    )
    yield Alert(
        "PartiHistoryLost",
        f"{total(grown(series(m.history_lost), 3600), FLEET)} > 0",
        "{{ $value | humanize }} changes of owners in {{ $labels.job }} were not recorded: `parti explain` has gaps",
    )


def _batches(t: Thresholds) -> Iterator[Alert]:
    b = BATCH
    yield Alert(
        "PartiAuditViolated",
        f"{largest(series(b.audit_violations), 'stream', 'invariant')} > 0",
        "The audit of {{ $labels.stream }} found {{ $value }} violations of {{ $labels.invariant }}",
        severity="page",
    )
    yield Alert(
        "PartiAuditOld",
        f"time() - {largest(series(b.audit_finished), 'stream')} > {t.audit_age_s}",
        "The last audit of {{ $labels.stream }} ended {{ $value | humanizeDuration }} ago: a loss would go unnoticed",
        lasts="10m",
    )
    yield Alert(
        "PartiPipelineLags",
        f"{largest(series(b.pipeline_lag), 'stream', 'table')} > {t.pipeline_lag}",
        "Table {{ $labels.table }} of {{ $labels.stream }} is {{ $value | humanize }} behind",
        lasts="30m",
    )
