"""Dashboards as values: what each panel shows, with metrics named by their declarations. Pure.

A panel says nothing of ids and places: those follow from its order (`parti.telemetry.grafana`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from parti.core import slo
from parti.telemetry.alerts import FLEET
from parti.telemetry.instruments import Counter, Instrument, LabelledCounter
from parti.telemetry.objectives import BAD, BUDGET, TAIL
from parti.telemetry.queries import BATCH, METRICS, count, increase, largest, quantile, rate, series, total

_PER_S, _WORKER = "5m", ("worker",)


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture: expressions with their legends."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    about: str = ""
    kind: Literal["timeseries", "stat"] = "timeseries"
    width: int = 8
    scoped: bool = True
    """Limited to the chosen fleet; what commands write has no fleet."""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One page."""

    uid: str
    title: str
    rows: tuple[Row, ...]


def dashboards() -> Mapping[str, Dashboard]:
    """All dashboards by the name of their file."""
    found = (
        Dashboard("parti-fleet", "parti: fleet", (_overview(), _consumers(), _handlers(), _fleet(), _jobs())),
        Dashboard("parti-objectives", "parti: objectives", (_objectives(), _data())),
    )
    return MappingProxyType({f"{each.uid}.json": each for each in found})


# ── what is shown ─────────────────────────────────────────────────────────────────────────────────────────────────


def _overview() -> Row:
    m = METRICS
    share = f"{total(rate(series(m.redeliveries), _PER_S), FLEET)} / {total(rate(series(m.messages), _PER_S), FLEET)}"
    return Row(
        "Is all well?",
        (
            _stat("Workers", largest(series(m.fleet_workers), FLEET), "Told by the monitor."),
            _stat("Partitions", largest(series(m.fleet_partitions), FLEET), "Claimed; told by the monitor."),
            _stat("Without owner", largest(series(m.fleet_unowned), FLEET), "Should be 0."),
            _stat("Rebalancers", total(series(m.leading), FLEET), "Should be 1."),
            _stat("Delivered again", share, "Less than 3 %.", "percentunit"),
            _stat("Dead letters, 1 h", total(increase(series(m.dead_letters), "1h"), FLEET), "Should be 0."),
        ),
    )


def _consumers() -> Row:
    m = METRICS
    return Row(
        "Consumers",
        (
            _rates("Messages received", m.messages),
            Panel(
                "Redelivery ratio",
                ((f"{_rate(m.redeliveries)} / {_rate(m.messages)}", "{{worker}}"),),
                "percentunit",
                "Deliveries that had been delivered before; they are recognised, and not handled again.",
            ),
            _gauge("Lag", m.lag, "What the server has not delivered yet, looked up every ten seconds."),
            Panel(
                "In flight",
                (
                    (largest(series(m.inflight), *_WORKER), "{{worker}}"),
                    (f"max({series(m.inflight_limit)})", "pulling pauses"),
                ),
                about="Received and not yet acknowledged. Near the limit handlers are the bottleneck.",
            ),
            Panel(
                "Subjects",
                (
                    (largest(series(m.subject_count), *_WORKER), "{{worker}}"),
                    (f"max({series(m.subject_limit)})", "limit"),
                ),
                about="Filters that the worker's consumers carry.",
            ),
            Panel(
                "Consumer updates",
                (
                    (f"sum({rate(count(m.update_duration), _PER_S)})", "done"),
                    (f"sum({rate(series(m.update_failures), _PER_S)})", "failed"),
                    (f"sum({rate(series(m.update_skipped), _PER_S)})", "nothing to change"),
                ),
                "ops",
            ),
            _times("Time of an update", m.update_duration),
            _by_label("Answers to pulls", m.pull_status),
            Panel(
                "Connection trouble",
                tuple(
                    (f"sum({increase(series(metric), _PER_S)})", legend)
                    for metric, legend in (
                        (m.reconnects, "reconnects"),
                        (m.pull_missed_heartbeats, "missed heartbeats"),
                        (m.recreated, "consumer made again"),
                    )
                ),
            ),
            Panel(
                "Hot mirror",
                (
                    (f"max({series(m.mirror_bytes)})", "size"),
                    (f"max({series(m.mirror_limit)})", "limit"),
                ),
                "bytes",
                "A copy of the stream in memory, read by workers that lag.",
            ),
            _gauge("Reads the mirror", m.mirror_inside, "1 while the worker's consumer is on the hot mirror."),
            _by_label("Moves to and from the mirror", m.mirror_moves),
        ),
    )


def _handlers() -> Row:
    m = METRICS
    return Row(
        "Handlers",
        (
            _times("Time of a handler call", m.handler_latency),
            _by_label("Failures by what followed", m.handler_failures),
            _rates("Dead letters", m.dead_letters),
            _gauge("Running now", m.handler_running),
            _gauge("Waiting in lanes", m.lane_depth),
            _rates("Partitions parked", m.parked, "A partition whose handler did not move was set aside."),
            Panel(
                "Positions",
                (
                    (f"sum({rate(series(m.progress_writes), _PER_S)})", "written"),
                    (f"sum({rate(series(m.progress_failures), _PER_S)})", "failed"),
                ),
                "ops",
            ),
            _times("Ledger: time until a batch is stored", m.ledger_duration),
            Panel(
                "Ledger and state: failures",
                (
                    (f"sum({increase(series(m.ledger_failures), _PER_S)})", "ledger"),
                    (f"sum({increase(series(m.state_failures), _PER_S)})", "state"),
                ),
            ),
        ),
    )


def _fleet() -> Row:
    m = METRICS
    return Row(
        "Fleet",
        (
            Panel("What workers do", ((f"sum by (state) ({series(m.fleet_state)})", "{{state}}"),)),
            Panel(
                "Partitions",
                (
                    (f"max({series(m.fleet_partitions)})", "claimed"),
                    (f"max({series(m.fleet_moving)})", "moving"),
                    (f"max({series(m.fleet_unowned)})", "without owner"),
                ),
            ),
            _by_label("Claims given", m.claims_given),
            _times("Time to handoff", m.move_duration, "From the order to move until the next owner has it."),
            Panel(
                "Claims that somebody else had changed",
                ((f"sum({increase(series(m.claim_failures), '10m')})", "in 10 min"),),
            ),
            _by_label("Elections won", m.elections),
            _by_label("Leases lost", m.lease_losses, per_second=False),
            Panel(
                "Not recorded in the history",
                ((f"sum({increase(series(m.history_lost), '1h')})", "changes of owners, in 1 h"),),
            ),
            Panel(
                "Processes that share a worker id",
                ((total(series(m.standby), *_WORKER), "{{worker}}"),),
                about="2 or more: somebody stands by. 1: nobody does. 0: the worker is not started with --standby.",
            ),
        ),
    )


def _jobs() -> Row:
    m = METRICS
    used = f"sum({series(m.jobs_slots_used)}) / sum({series(m.jobs_slots)})"
    return Row(
        "Jobs",
        (
            Panel(
                "Jobs",
                ((f"sum({series(m.jobs_held)})", "held"), (f"sum({series(m.jobs_running)})", "running")),
            ),
            Panel("Slots in use", ((used, "share"),), "percentunit"),
            _gauge("Waiting for slots", m.jobs_slot_queue),
            _times("Time until slots are free", m.jobs_slot_wait),
            _times("Time of a job", m.jobs_duration),
            _by_label("Jobs ended, by how", m.jobs_ended),
        ),
    )


def _objectives() -> Row:
    panels = []
    for objective in slo.OBJECTIVES:
        where, allowed = f'{{objective="{objective.name}"}}', round(1 - objective.target, 6)
        panels += [
            Panel(
                f"{objective.name}: budget left",
                ((f"{BUDGET}{where}", "{{job}}"),),
                "percentunit",
                f"{objective.sentence}; of 30 days.",
                "stat",
                6,
            ),
            Panel(
                f"{objective.name}: how fast the budget burns",
                tuple((f"{BAD}{window}{where} / {allowed:g}", window) for window in ("5m", "1h", "6h", "3d")),
                "none",
                "1: it lasts for exactly 30 days. 14.4 for an hour pages.",
                width=18,
            ),
        ]
    tail = Panel(
        "p99 over p95 of handler times",
        ((TAIL, "{{job}}"),),
        "none",
        "Below 2, 99 % of the messages are handled in less than 2 x p95.",
        width=24,
    )
    return Row("Objectives", (*panels, tail))


def _data() -> Row:
    b = BATCH
    return Row(
        "Audit and pipeline",
        (
            Panel(
                "Violations that the last audit found",
                ((series(b.audit_violations), "{{stream}} {{invariant}}"),),
                about="From `parti audit --metrics`.",
                width=12,
                scoped=False,
            ),
            Panel(
                "Hours since the last audit",
                ((f"(time() - {series(b.audit_finished)}) / 3600", "{{stream}}"),),
                "h",
                width=12,
                scoped=False,
            ),
            Panel(
                "Lag of tables",
                ((series(b.pipeline_lag), "{{stream}} {{table}}"),),
                about="From `parti pipeline status --metrics`.",
                width=12,
                scoped=False,
            ),
            Panel("Rows of tables", ((series(b.pipeline_rows), "{{stream}} {{table}}"),), width=12, scoped=False),
        ),
    )


# ── kinds of panels ───────────────────────────────────────────────────────────────────────────────────────────────


def _rate(metric: Instrument) -> str:
    return total(rate(series(metric), _PER_S), *_WORKER)


def _stat(title: str, expression: str, about: str, unit: str = "short") -> Panel:
    return Panel(title, ((expression, "{{job}}"),), unit, about, "stat", 4)


def _rates(title: str, metric: Counter, about: str = "") -> Panel:
    return Panel(title, ((_rate(metric), "{{worker}}"),), "ops", about)


def _gauge(title: str, metric: Instrument, about: str = "") -> Panel:
    return Panel(title, ((largest(series(metric), *_WORKER), "{{worker}}"),), about=about)


def _by_label(title: str, metric: LabelledCounter, *, per_second: bool = True) -> Panel:
    assert metric.label
    grown = rate(series(metric), _PER_S) if per_second else increase(series(metric), _PER_S)
    return Panel(title, ((total(grown, metric.label), f"{{{{{metric.label}}}}}"),), "ops" if per_second else "short")


def _times(title: str, metric: Any, about: str = "") -> Panel:
    queries = tuple((quantile(share, metric, _PER_S), f"p{share * 100:g}") for share in (0.5, 0.95, 0.99))
    return Panel(title, queries, "s", about)
