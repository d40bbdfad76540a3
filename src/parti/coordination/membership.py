"""Who is in the fleet, as seen through a watch; the watch is a hint, the leader's answer decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import structlog

from parti.coordination.lease import clock
from parti.core.fleet_view import MemberView
from parti.errors import DecodeError, PartiError
from parti.jetstream.kv import Bucket, Entry
from parti.model.fleet import MemberRecord, decode, key_of, name_of
from parti.telemetry.refusals import Refusals

_log = structlog.get_logger("parti.membership")

EventKind = Literal["joined", "returned", "left", "away", "suspected", "lost"]
_LATE_S = 1.0
"""The server may take this long to say that a lease has ended."""


@dataclass(frozen=True, slots=True)
class MemberEvent:
    """Something that happened to a member."""

    kind: EventKind
    worker: str
    incarnation: int


class Membership:
    """The members, kept current by `entry` (from a watch) and `verify` (by asking the leader).

    A member counts until its lease is known to have ended; a broken connection makes it suspected, no more, because
    it may still be working.
    """

    def __init__(
        self,
        bucket: Bucket,
        on_event: Callable[[MemberEvent], None] = lambda event: None,
        refusals: Refusals | None = None,
    ) -> None:
        self.members: dict[str, MemberRecord] = {}
        self.left: set[str] = set()
        """Workers that are gone and said so."""
        self.suspected: dict[str, str] = {}
        """Workers whose connection broke, and which one that was."""
        self._bucket = bucket
        self._refusals = refusals
        self._refused_s: dict[str, float] = {}
        """Workers whose newest record cannot be read, and since when."""
        self._on_event = on_event
        self._seen_s: dict[str, float] = {}
        self._revisions: dict[str, int] = {}

    def entry(self, key: str, entry: Entry) -> bool:
        """Take in the newest value of `ids.<worker>`; True when somebody came, went or changed."""
        worker = name_of(key)
        if entry.revision and entry.revision <= self._revisions.get(worker, 0):
            return False
        self._revisions[worker] = entry.revision
        if not entry.value:
            self._refused_s.pop(worker, None)
            return self._gone(worker)
        try:
            record = decode(entry.value, MemberRecord)
        except DecodeError as error:
            # Its holder cannot renew it any more, and stops when its lease has ended: until then it counts.
            self._refused_s[worker] = clock()
            if self._refusals:
                self._refusals.note(key, entry.revision, error, "that worker counts until its lease is over")
            return False
        self._refused_s.pop(worker, None)
        return self._here(worker, record)

    def _here(self, worker: str, record: MemberRecord) -> bool:
        if record.state == "left":
            self.left.add(worker)
            return self._gone(worker)
        before = self.members.get(worker)
        self.members[worker] = record
        self._seen_s[worker] = clock()
        if self.suspected.get(worker) != record.client:
            # Over another connection: it is back. Over the broken one it was only written before.
            self.suspected.pop(worker, None)
        self.left.discard(worker)
        if before is None:
            self._tell("joined", worker, record)
        elif before.incarnation != record.incarnation:
            self._tell("returned", worker, record)
        elif before.state != record.state and record.state == "away":
            self._tell("away", worker, record)
        else:
            return before.state != record.state
        return True

    def _gone(self, worker: str) -> bool:
        record = self.members.pop(worker, None)
        self._seen_s.pop(worker, None)
        self.suspected.pop(worker, None)
        if record is None:
            return False
        self._tell("left" if worker in self.left else "lost", worker, record)
        return True

    def suspect(self, client: str) -> str | None:
        """The connection `<server>/<client>` of a member broke; returns whose it was."""
        for worker, record in self.members.items():
            if record.client == client and worker not in self.suspected:
                self.suspected[worker] = client
                self._tell("suspected", worker, record)
                return worker
        return None

    def revision(self, worker: str) -> int:
        """Revision of the newest record that was seen of a worker."""
        return self._revisions.get(worker, 0)

    async def verify(self) -> bool:
        """Ask the leader about members that should have been heard of; True when that changed something."""
        now_s = clock()
        silent = [
            worker
            for worker, record in self.members.items()
            if now_s - self._seen_s[worker] > record.ttl_seconds + _LATE_S
        ]
        changed = False
        for worker in silent:
            try:
                entry = await self._bucket.get(key_of("ids", worker))
            except PartiError:
                break
            if worker in self._refused_s and entry and entry.revision == self._revisions.get(worker):
                del self._refused_s[worker]
                changed |= self._gone(worker)
                continue
            self._seen_s[worker] = clock()
            changed |= self.entry(key_of("ids", worker), entry or Entry(b"", 0))
        return changed

    def in_doubt(self, worker: str, ttl_s: float) -> bool:
        """Whether nobody can tell if a worker is there: its record became unreadable less than a lease ago."""
        since_s = self._refused_s.get(worker)
        return worker not in self.members and since_s is not None and clock() - since_s <= ttl_s + _LATE_S

    def view(self) -> dict[str, MemberView]:
        """The members as the planner sees them; one that says impossible things counts as nothing special."""
        return {
            worker: MemberView(
                record.incarnation,
                record.state,
                max(0, record.capacity),
                record.weight if 0 < record.weight < float("inf") else 1.0,
                record.guest,
            )
            for worker, record in self.members.items()
        }

    def _tell(self, kind: EventKind, worker: str, record: MemberRecord) -> None:
        _log.info(f"worker {kind}", worker=worker, incarnation=record.incarnation, identity=record.identity or None)
        self._on_event(MemberEvent(kind, worker, record.incarnation))
