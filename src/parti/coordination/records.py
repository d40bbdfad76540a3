"""Reading the control plane's records as they are: what operators and the monitor look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from parti.core.fleet_report import FleetReport, report_fleet
from parti.core.loads import LoadBook
from parti.jetstream.kv import Entry
from parti.model.fleet import (
    Assignment,
    Claim,
    HealthRecord,
    LeaderRecord,
    LoadRecord,
    MemberRecord,
    StandbyRecord,
    decode,
    name_of,
)

MONITORED = ("ids.>", "health.>", "claims.>", "leader.*")
KEYS = (*MONITORED, "assignment.>", "load.>", "standby.>")
_T = TypeVar("_T", bound=msgspec.Struct)


@dataclass(slots=True)
class Records:
    """Everything in the bucket that tells of the fleet; unreadable records are left out and counted."""

    members: dict[str, MemberRecord] = field(default_factory=dict)
    health: dict[str, HealthRecord] = field(default_factory=dict)
    claims: dict[str, Claim] = field(default_factory=dict)
    leaders: dict[str, LeaderRecord] = field(default_factory=dict)
    assignments: dict[str, Assignment] = field(default_factory=dict)
    loads: dict[str, LoadRecord] = field(default_factory=dict)
    """What workers have measured, those that are gone included."""
    standbys: dict[str, StandbyRecord] = field(default_factory=dict)
    """Processes that wait for a worker id; the record names it."""
    unreadable: int = 0

    @classmethod
    def of(cls, entries: Mapping[str, Entry]) -> Records:
        """Decode what was read from the bucket."""
        records = cls()
        for key, entry in entries.items():
            records.take(key, entry)
        return records

    def take(self, key: str, entry: Entry) -> None:
        """Take in one key as it is now."""
        kind, name = key.partition(".")[0], name_of(key)
        if kind == "ids":
            self._put(self.members, name, entry, MemberRecord)
            if name in self.members and self.members[name].state == "left":
                del self.members[name]
        elif kind == "health":
            self._put(self.health, name, entry, HealthRecord)
        elif kind == "claims":
            self._put(self.claims, name, entry, Claim)
        elif kind == "leader":
            self._put(self.leaders, name, entry, LeaderRecord)
        elif kind == "assignment":
            self._put(self.assignments, name, entry, Assignment)
        elif kind == "load":
            self._put(self.loads, name, entry, LoadRecord)
        elif kind == "standby":
            self._put(self.standbys, name, entry, StandbyRecord)

    def _put(self, records: dict[str, _T], name: str, entry: Entry, kind: type[_T]) -> None:
        if not entry.value:
            records.pop(name, None)
            return
        try:
            records[name] = decode(entry.value, kind)
        except (msgspec.ValidationError, msgspec.DecodeError):
            self.unreadable += 1

    @property
    def named_in_claims(self) -> frozenset[str]:
        """Workers that own something, or are about to."""
        return frozenset(name for claim in self.claims.values() for name in (claim.owner, claim.next) if name)

    def report(self) -> FleetReport:
        """The fleet at this moment."""
        return report_fleet(self.members, self.health, self.claims, self.leaders.get("rebalancer"), self.loads)

    @property
    def measured(self) -> Mapping[str, float] | None:
        """Loads of all claimed partitions as the rebalancer counts them; None: nobody measures."""
        book = LoadBook()
        for worker, record in self.loads.items():
            book.take(worker, record)
        return book.weights({p: claim.owner for p, claim in self.claims.items()})
