"""A fleet seen from outside: the records in its bucket as they change, and what its consumers carry on the server.

Everything is taken from a watch of the bucket, with the time of arrival; `verify` then asks the leader and the
consumers themselves, so that what a benchmark says does not rest on the watch alone.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from parti.config import Settings
from parti.coordination.control_plane import ControlPlane
from parti.coordination.records import KEYS, Records
from parti.errors import NotFound
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.kv import Entry
from parti.jetstream.watch import Watch
from parti.model.fleet import LeaderRecord, MemberRecord, name_of
from parti.model.partition import Template
from parti.strategies import Slot, minimum_moves

_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class Place:
    """Where a fleet lives."""

    url: str
    stream: str
    template: str
    bucket: str = "parti"
    prefix: str = "parti"


@dataclass(frozen=True, slots=True)
class Seen:
    """A member or a leader, as its record arrived; `record` is None when it was gone."""

    at_s: float
    key: str
    record: MemberRecord | LeaderRecord | None


@dataclass(frozen=True, slots=True)
class Handover:
    """A partition that got another owner; `source` is empty when it had none before."""

    at_s: float
    partition: str
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Movement:
    """What a change of the fleet has moved, and what it had to."""

    orphans: int
    """Partitions whose owner went: each needs another one in any case."""
    moved: int
    """Partitions that have left a worker which stayed."""
    minimum: int
    """How many of those an even share takes."""
    handovers: int
    """Changes of owner seen, all of them: more than `orphans + moved` when a partition changed hands twice."""


class Observer:
    """Watches one fleet from `observing` on."""

    def __init__(self, place: Place, connection: Connection, api: JetStreamApi, plane: ControlPlane) -> None:
        self.place = place
        self.api = api
        self.plane = plane
        self.records = Records()
        self.seen: list[Seen] = []
        """Every change of a member's or leader's lease, renewals included."""
        self.handovers: list[Handover] = []
        self.changed_s = 0.0
        """When something last changed that says who owns what."""
        self._owners: dict[str, str] = {}
        self._said: dict[str, object] = {}
        self._template = Template(place.template)
        self._watch = Watch(connection, api, plane.bucket.name, KEYS, self._take)

    async def start(self) -> None:
        """Begin; what is there already is known on return."""
        await self._watch.start()

    async def stop(self) -> None:
        """Watch no more."""
        await self._watch.stop()

    def _take(self, key: str, entry: Entry) -> None:
        now_s = time.monotonic()
        self.records.take(key, entry)
        kind, name = key.partition(".")[0], name_of(key)
        if kind == "ids":
            self.seen.append(Seen(now_s, key, self.records.members.get(name)))
            self._note(key, _standing(self.records.members.get(name)), now_s)
        elif kind == "leader":
            self.seen.append(Seen(now_s, key, self.records.leaders.get(name)))
        elif kind == "claims":
            self.changed_s = now_s
            self._note_owner(name, now_s)
        elif kind == "assignment":
            self.changed_s = now_s
        elif health := self.records.health.get(name):
            self._note(key, (health.incarnation, health.applied, health.busy), now_s)

    def _note(self, key: str, said: object, now_s: float) -> None:
        if self._said.get(key) != said:
            self._said[key] = said
            self.changed_s = now_s

    def _note_owner(self, partition: str, now_s: float) -> None:
        claim = self.records.claims.get(partition)
        before = self._owners.get(partition, "")
        if claim and claim.owner and claim.owner != before:
            self._owners[partition] = claim.owner
            self.handovers.append(Handover(now_s, partition, before, claim.owner))

    # ── who owns what ─────────────────────────────────────────────────────────────────────────────────────────

    @property
    def owners(self) -> dict[str, str]:
        """The owner of each partition that has one."""
        return {p: c.owner for p, c in self.records.claims.items() if c.owner and c.state != "free"}

    @property
    def leader(self) -> str:
        """Who the rebalancer is; empty when there is none."""
        record = self.records.leaders.get("rebalancer")
        return record.holder if record else ""

    def unsettled(self, partitions: Collection[str], workers: int) -> str:
        """What is still to happen, in a few words; empty when nothing is."""
        return unsettled(self.records, partitions, workers)

    async def await_members(self, workers: int, timeout_s: float) -> None:
        """Wait until so many workers hold an id, or the time is over."""
        deadline_s = time.monotonic() + timeout_s
        while len(self.records.members) != workers and time.monotonic() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)

    async def settle(self, partitions: Collection[str], workers: int, timeout_s: float) -> str:
        """Wait until nothing is left to happen; returns what still is when the time is over."""
        deadline_s = time.monotonic() + timeout_s
        while left := self.unsettled(partitions, workers):
            if time.monotonic() >= deadline_s:
                return left
            await asyncio.sleep(_LOOK_S)
        return ""

    def movement(self, before: Mapping[str, str], since_s: float) -> Movement:
        """Compare with the owners before a change that began at that time."""
        members, after = self.records.members, self.owners
        orphans = [p for p, owner in before.items() if owner not in members]
        moved = sum(owner in members and after.get(p) != owner for p, owner in before.items())
        handovers = sum(h.at_s >= since_s and bool(h.source) for h in self.handovers)
        return Movement(len(orphans), moved, minimum_moves(list(before), _slots(members), before), handovers)

    async def verify(self, partitions: Sequence[str]) -> list[str]:
        """Look for partitions without exactly one owner, by the leader's records and by the consumers' filters.

        Returns what is wrong, in sentences.
        """
        records = Records.of(await self.plane.read(*KEYS))
        problems = [left] if (left := unsettled(records, partitions, len(records.members))) else []
        carried = await asyncio.gather(*(self._carried(worker) for worker in records.members))
        owners = Counter(subject for subjects in carried for subject in subjects)
        wanted = {p.subject for p in self._template.partitions(partitions)}
        twice, nobody = [s for s, n in owners.items() if n > 1], wanted - owners.keys()
        if twice:
            problems.append(f"{len(twice)} subjects are in more than one consumer, such as {twice[0]}")
        if nobody:
            problems.append(f"{len(nobody)} subjects are in no consumer, such as {min(nobody)}")
        for worker, subjects in zip(records.members, carried, strict=True):
            mine = [p for p, c in records.claims.items() if c.owner == worker and c.state == "owned"]
            if {p.subject for p in self._template.partitions(mine)} != set(subjects):
                problems.append(f"the consumer of {worker} carries something else than it owns")
        return problems

    async def _carried(self, worker: str) -> list[str]:
        try:
            info = await self.api.consumer_info(self.place.stream, f"{self.place.prefix}-{worker}")
        except NotFound:
            return []
        # A consumer that is to carry nothing has a subject that nobody publishes.
        return [subject for subject in info.subjects if "_none_" not in subject]

    # ── leases ────────────────────────────────────────────────────────────────────────────────────────────────

    def of(self, key: str, since_s: float = 0.0) -> list[Seen]:
        """What was seen of a lease from then on."""
        return [seen for seen in self.seen if seen.key == key and seen.at_s >= since_s]

    def arrivals(self, since_s: float) -> dict[str, float]:
        """When members first showed up under a new incarnation since then, by key."""
        first: dict[tuple[str, int], float] = {}
        for seen in self.seen:
            if isinstance(seen.record, MemberRecord):
                first.setdefault((seen.key, seen.record.incarnation), seen.at_s)
        return {key: at_s for (key, _), at_s in first.items() if at_s >= since_s}

    def departures(self, since_s: float) -> dict[str, float]:
        """When leases of members were seen to be gone since then, by key."""
        return {s.key: s.at_s for s in self.seen if s.at_s >= since_s and s.key[:4] == "ids." and s.record is None}


@asynccontextmanager
async def observing(place: Place) -> AsyncIterator[Observer]:
    """Connect to where a fleet lives, or will, and watch it for the length of a `with` block."""
    settings = Settings(nats=(place.url,), bucket=place.bucket)
    connection = await Connection.open(settings, name="observer")
    try:
        api = JetStreamApi(connection)
        plane = await ControlPlane.open(connection, api, place.bucket, replicas=1)
        observer = Observer(place, connection, api, plane)
        await observer.start()
        try:
            yield observer
        finally:
            await observer.stop()
    finally:
        await connection.close()


def unsettled(records: Records, partitions: Collection[str], workers: int) -> str:
    """What is still to happen until so many workers own these partitions in even shares; empty when nothing is."""
    members = records.members
    if len(members) != workers:
        return f"{len(members)} of {workers} workers are there"
    if idle := [w for w, m in members.items() if m.state != "active"]:
        return f"{len(idle)} workers are {members[idle[0]].state}"
    return _unclaimed(records, partitions) or _unapplied(records, partitions) or _uneven(records, partitions)


def _unclaimed(records: Records, partitions: Collection[str]) -> str:
    for partition in partitions:
        claim = records.claims.get(partition)
        if claim is None or not claim.owner or claim.state == "free":
            return f"{partition} has no owner"
        if claim.state == "moving":
            return f"{partition} is moving"
        member = records.members.get(claim.owner)
        if member is None or claim.incarnation != member.incarnation:
            return f"{partition} belongs to {claim.owner}, which is gone"
    return ""


def _unapplied(records: Records, partitions: Collection[str]) -> str:
    wanted: dict[str, set[str]] = {worker: set() for worker in records.members}
    for partition in partitions:
        wanted[records.claims[partition].owner].add(partition)
    for worker, mine in wanted.items():
        incarnation = records.members[worker].incarnation
        assignment, health = records.assignments.get(worker), records.health.get(worker)
        if assignment is None or assignment.incarnation != incarnation or assignment.partitions.keys() != mine:
            return f"{worker} has not been told what it owns"
        if health is None or health.incarnation != incarnation or health.applied != assignment.version:
            return f"{worker} has not taken over its assignment"
        if health.busy:
            return f"{worker} still handles what it has let go"
    return ""


def _uneven(records: Records, partitions: Collection[str]) -> str:
    owners = {partition: records.claims[partition].owner for partition in partitions}
    moves = minimum_moves(list(owners), _slots(records.members), owners)
    return f"{moves} partitions are to move" if moves else ""


def _slots(members: Mapping[str, MemberRecord]) -> list[Slot]:
    return [Slot(worker, member.capacity, member.weight) for worker, member in members.items()]


def shares(owners: Mapping[str, str], workers: Iterable[str]) -> tuple[int, int]:
    """The least and the most that a worker owns."""
    counts = Counter(owners.values())
    numbers = [counts[worker] for worker in workers]
    return (min(numbers), max(numbers)) if numbers else (0, 0)


def _standing(record: MemberRecord | None) -> tuple[int, str] | None:
    return (record.incarnation, record.state) if record else None
