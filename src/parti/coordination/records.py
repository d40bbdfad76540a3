"""Reading the control plane's records as they are: what operators and the monitor look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from parti.coordination.repairs import repair_of
from parti.core.fleet_report import FleetReport, report_fleet
from parti.core.loads import LoadBook
from parti.errors import DecodeError
from parti.jetstream.kv import Entry
from parti.model.fleet import (
    Assignment,
    Claim,
    HealthRecord,
    LeaderRecord,
    LoadRecord,
    MemberRecord,
    StallRecord,
    StandbyRecord,
    decode,
    is_key,
    name_of,
)

MONITORED = ("ids.>", "health.>", "claims.>", "leader.*")
KEYS = (*MONITORED, "assignment.>", "load.>", "standby.>", "stalls.>")
_T = TypeVar("_T", bound=msgspec.Struct)


@dataclass(slots=True)
class Records:
    """Everything in the bucket that tells of the fleet; what cannot be read is left out and named."""

    members: dict[str, MemberRecord] = field(default_factory=dict)
    health: dict[str, HealthRecord] = field(default_factory=dict)
    claims: dict[str, Claim] = field(default_factory=dict)
    leaders: dict[str, LeaderRecord] = field(default_factory=dict)
    assignments: dict[str, Assignment] = field(default_factory=dict)
    loads: dict[str, LoadRecord] = field(default_factory=dict)
    """What workers have measured, those that are gone included."""
    standbys: dict[str, StandbyRecord] = field(default_factory=dict)
    """Processes that wait for a worker id; the record names it."""
    stalls: dict[str, StallRecord] = field(default_factory=dict)
    """Workers that stood still not long ago."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Keys whose value is no record, and the reason."""
    on_refused: Callable[[str, int, DecodeError], None] = lambda key, revision, error: None

    @classmethod
    def of(
        cls,
        entries: Mapping[str, Entry],
        on_refused: Callable[[str, int, DecodeError], None] = lambda key, revision, error: None,
    ) -> Records:
        """Decode what was read from the bucket."""
        records = cls(on_refused=on_refused)
        for key, entry in entries.items():
            records.take(key, entry)
        return records

    def take(self, key: str, entry: Entry) -> None:
        """Take in one key as it is now."""
        if not is_key(key):
            return  # what it would be read as has another key
        self.unreadable.pop(key, None)
        kind, name = key.partition(".")[0], name_of(key)
        if kind == "ids":
            self._put(self.members, key, entry, MemberRecord)
            if name in self.members and self.members[name].state == "left":
                del self.members[name]
        elif kind == "health":
            self._put(self.health, key, entry, HealthRecord)
        elif kind == "claims":
            self._put(self.claims, key, entry, Claim)
        elif kind == "leader":
            self._put(self.leaders, key, entry, LeaderRecord)
        elif kind == "assignment":
            self._put(self.assignments, key, entry, Assignment)
        elif kind == "load":
            self._put(self.loads, key, entry, LoadRecord)
        elif kind == "standby":
            self._put(self.standbys, key, entry, StandbyRecord)
        elif kind == "stalls":
            self._put(self.stalls, key, entry, StallRecord)

    def _put(self, records: dict[str, _T], key: str, entry: Entry, kind: type[_T]) -> None:
        # What a key said before it became unreadable is not true any more.
        records.pop(name_of(key), None)
        if not entry.value:
            return
        try:
            records[name_of(key)] = decode(entry.value, kind)
        except DecodeError as error:
            self.refuse(key, entry.revision, error)

    def refuse(self, key: str, revision: int, error: DecodeError) -> None:
        """Note that a key holds no record."""
        self.unreadable[key] = str(error)
        self.on_refused(key, revision, error)

    @property
    def trouble(self) -> str:
        """Which records cannot be read and what to do about the first, in a sentence; empty: all can be."""
        if not self.unreadable:
            return ""
        first, others = next(iter(self.unreadable)), len(self.unreadable) - 1
        more = f" and {others:,} more" if others else ""
        return f"unreadable {'records' if others else 'record'} {first}{more}: {repair_of(first)}"

    @property
    def named_in_claims(self) -> frozenset[str]:
        """Workers that own something, or are about to."""
        return frozenset(name for claim in self.claims.values() for name in (claim.owner, claim.next) if name)

    def report(self) -> FleetReport:
        """The fleet at this moment."""
        leader = self.leaders.get("rebalancer")
        return report_fleet(self.members, self.health, self.claims, leader, self.loads, self.stalls)

    @property
    def measured(self) -> Mapping[str, float] | None:
        """Loads of all claimed partitions as the rebalancer counts them; None: nobody measures."""
        book = LoadBook()
        for worker, record in self.loads.items():
            book.take(worker, record)
        return book.weights({p: claim.owner for p, claim in self.claims.items()})
