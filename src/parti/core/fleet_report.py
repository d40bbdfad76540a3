"""What can be said of a fleet from its records: for `parti status`, for the monitor, for the console."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from parti.core.causes import Cause
from parti.model.fleet import RECOVERED, Claim, HealthRecord, LeaderRecord, LoadRecord, MemberRecord, StallRecord
from parti.strategies.ordering import natural_order


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One worker, as its own records and the claims tell."""

    worker: str
    member: MemberRecord | None
    """None: it owns something, but nobody holds its id."""
    health: HealthRecord | None
    """What it said last, if it was this very process that said it."""
    owned: int
    leaving: int
    """Partitions that it is to let go."""
    coming: int
    """Partitions that it is to get."""
    load: float | None = None
    """Seconds of handler work a second, as it has measured; None where loads are not."""
    load_share: float | None = None
    """The same as a part of what all workers have."""


@dataclass(frozen=True, slots=True)
class FleetReport:
    """The fleet at one moment."""

    workers: tuple[WorkerReport, ...]
    leader: LeaderRecord | None
    partitions: int
    """Partitions that somebody claims, or should."""
    unowned: tuple[str, ...]
    """Claimed by nobody, or by a worker that is gone."""
    moving: tuple[str, ...]
    stalls: tuple[str, ...] = ()
    """Workers that stand still, or have left because they did, in sentences."""
    recoveries: tuple[str, ...] = ()
    """Workers that stood still not long ago."""

    @property
    def unclaimed(self) -> int:
        """Partitions that the rebalancer knows of and that nobody has ever claimed."""
        return max(0, self.leader.wanted - self.partitions) if self.leader else 0

    @property
    def problems(self) -> tuple[str, ...]:
        """What an operator should look at, in sentences."""
        found = []
        if self.leader is None:
            found.append("there is no rebalancer")
        if self.unclaimed and self.leader and self.leader.state == "degraded":
            found.append(f"{self.unclaimed} partitions have never had an owner: {self.leader.reason}")
        if self.unowned:
            found.append(f"{len(self.unowned)} partitions have no live owner")
        told = Counter(each.health.problems[0] for each in self.workers if each.health and each.health.problems)
        for problem, count in told.items():
            found.append(f"{count} worker{'s' * (count > 1)}: {problem}")
        return (*found, *self.stalls)


def report_fleet(
    members: Mapping[str, MemberRecord],
    health: Mapping[str, HealthRecord],
    claims: Mapping[str, Claim],
    leader: LeaderRecord | None,
    loads: Mapping[str, LoadRecord] = MappingProxyType({}),
    stalls: Mapping[str, StallRecord] = MappingProxyType({}),
) -> FleetReport:
    """Put the records together."""
    measured = {name: sum(record.loads.values()) for name, record in loads.items() if name in members}
    total = sum(measured.values())
    live = {p: c for p, c in claims.items() if c.state != "free" or waits_for_room(c)}
    owned = Counter(c.owner for c in live.values() if c.state == "owned")
    leaving = Counter(c.owner for c in live.values() if c.state in {"preparing", "moving"})
    coming = Counter(c.next for c in live.values() if c.state in {"preparing", "moving"})
    names = natural_order(members.keys() | {c.owner for c in live.values() if c.owner})
    workers = tuple(
        WorkerReport(
            name,
            members.get(name),
            said if (said := health.get(name)) and _is_current(said, members.get(name)) else None,
            owned[name],
            leaving[name],
            coming[name],
            measured.get(name),
            measured[name] / total if total and name in measured else None,
        )
        for name in names
    )
    return FleetReport(
        workers,
        leader,
        len(live),
        tuple(natural_order(p for p, c in live.items() if c.owner not in members)),
        tuple(natural_order(p for p, c in live.items() if c.state in {"preparing", "moving"})),
        tuple(_stalled(name, stall) for name, stall in stalls.items() if not _over(stall, members.get(name))),
        tuple(_stood_still(name, stall) for name, stall in stalls.items() if _over(stall, members.get(name))),
    )


def _over(stall: StallRecord, member: MemberRecord | None) -> bool:
    """Whether nobody has to do anything any more: it recovered, or the id was taken up again since."""
    return stall.ended == RECOVERED or (member is not None and member.started_at > stall.at)


def _stood_still(name: str, stall: StallRecord) -> str:
    how = "recovered" if stall.ended == RECOVERED else "was followed by another process"
    return f"{name} stood still at {stall.at:%H:%M:%S} UTC and {how}: {stall.reason}"


def _stalled(name: str, stall: StallRecord) -> str:
    left = "; it left" if stall.ended else ""
    return f"{name} ({stall.host}:{stall.pid}) at {stall.at:%H:%M:%S} UTC: {stall.reason}{left}"


def waits_for_room(claim: Claim) -> bool:
    """Whether nobody owns a partition because its last owner has no room for it, nor has any other worker."""
    return claim.state == "free" and claim.cause == Cause.FULL


def _is_current(health: HealthRecord, member: MemberRecord | None) -> bool:
    return member is not None and health.incarnation == member.incarnation
