"""Each worker as operators see it: its lease, what it says of itself, what it leads, and what is ordered of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime

from parti.coordination.records import Records
from parti.core.fleet_report import WorkerReport
from parti.model.fleet import Orders, StandbyRecord


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker at the moment of looking."""

    report: WorkerReport
    roles: tuple[str, ...]
    """What it leads."""
    now: datetime
    drained: bool = False
    """Operators want it to own nothing."""
    placed: int = 0
    """Partitions that operators have placed on it."""
    standbys: tuple[StandbyRecord, ...] = ()
    """Processes that stand by for its id, those that go first in front."""

    @property
    def worker(self) -> str:
        """Its id."""
        return self.report.worker

    @property
    def state(self) -> str:
        """`gone`, `draining` or `away` by its lease, `drained` by an order, else what it says itself."""
        member, health = self.report.member, self.report.health
        if member is None:
            return "gone"
        if member.state != "active":
            return member.state
        if self.drained:
            return "drained"
        return health.state if health and health.state else "starting"

    @property
    def heartbeat_age_s(self) -> float | None:
        """Time since it said something, if both clocks agree."""
        health = self.report.health
        return (self.now - health.at).total_seconds() if health else None

    @property
    def problems(self) -> tuple[str, ...]:
        """Why it is unhealthy."""
        return self.report.health.problems if self.report.health else ()

    @property
    def shown_state(self) -> str:
        """Its state as people see it: what ails a worker is more than what it does."""
        return "unhealthy" if self.problems and self.state not in {"gone", "degraded"} else self.state

    @property
    def style(self) -> str:
        """Colour of its state."""
        if self.shown_state in {"gone", "degraded", "unhealthy"}:
            return "bold red"
        return "green" if self.state == "stable" else "yellow"


def worker_rows(records: Records, now: datetime, orders: Orders | None = None) -> list[WorkerRow]:
    """One row for each worker that is here, or that still owns something."""
    drained, placed = (orders.drained, Counter(orders.placed.values())) if orders else ((), Counter[str]())
    return [
        WorkerRow(
            each,
            _roles(records, each.worker),
            now,
            each.worker in drained,
            placed[each.worker],
            tuple(sorted((s for s in records.standbys.values() if s.worker == each.worker), key=lambda s: s.rank)),
        )
        for each in records.report().workers
    ]


def _roles(records: Records, worker: str) -> tuple[str, ...]:
    member = records.members.get(worker)
    # The token tells this process from an earlier one with the same id, whose lease of a role has not yet ended.
    return tuple(role for role, held in records.leaders.items() if member and held.token == member.token)
