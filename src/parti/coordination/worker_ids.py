"""Stable worker ids: `worker-0 … worker-N`, each leased to one process at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import msgspec
import structlog

from parti.coordination.lease import Lease, clock
from parti.core.lease import LeaseTerms
from parti.core.standby import Seen, Step, Understudy
from parti.core.worker_ids import Applicant, choose_id
from parti.errors import ControlPlaneReset, DecodeError, LeaseLost, NoFreeWorkerId, PartiError, WorkerIdTaken
from parti.jetstream.kv import MARKER_TTL_S, Bucket, Entry, Write
from parti.model.fleet import MemberRecord, MemberState, decode, encode, key_of, name_of

_log = structlog.get_logger("parti.worker_ids")

RENEW_SHARE = 1 / 3
"""Members renew more often than leaders: their heartbeat carries news."""
_LOOK_S = 0.2
_STANDBY_LOOK_S = 0.05
"""Short against the margin of a lease, half of which is all the time there is to take it over before it ends."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What a process says of itself when it takes an id."""

    host: str
    pid: int
    version: str
    capacity: int
    weight: float
    service: str = ""
    client: str = ""
    guest: bool = False


class Seat:
    """A worker id, held."""

    def __init__(self, bucket: Bucket, terms: LeaseTerms, worker_id: str, record: MemberRecord) -> None:
        self.worker_id = worker_id
        self.record = record
        self.bucket = bucket
        self.lease = Lease(bucket, key_of("ids", worker_id), terms, self._is_ours)

    def _is_ours(self, value: bytes) -> bool:
        found = _decoded(value)
        return (found.token, found.incarnation) == (self.record.token, self.record.incarnation)

    async def sit_down(self, over: Entry | None, *, floor: int = 0) -> None:
        """Take the id over what was found there; raises `LeaseLost` when somebody else was quicker."""

        def value_of(incarnation: int) -> bytes:
            self.record = msgspec.structs.replace(self.record, incarnation=incarnation)
            return encode(self.record)

        await self.lease.acquire(over, value_of, floor=floor)

    @property
    def incarnation(self) -> int:
        """Number of this holding; no other holder of the id ever has or had it."""
        return self.record.incarnation

    def describe(self, *, state: MemberState | None = None, client: str | None = None) -> None:
        """Change what the next renewal says."""
        changes = {k: v for k, v in {"state": state, "client": client}.items() if v is not None}
        self.record = msgspec.structs.replace(self.record, **changes)

    async def renew(self, extra: Sequence[Write] = ()) -> list[int]:
        """Renew, maybe with other writes in the same batch; see `Lease.renew`."""
        return await self.lease.renew(encode(self.record), extra)

    async def leave(self, *, back_within_s: float = 0.0, successor: bool = False) -> bool:
        """Give the id back; with an identity, or for a `successor`, keep it reserved for a while."""
        away = (bool(self.record.identity) or successor) and back_within_s > 0
        state: MemberState = "away" if away else "left"
        ttl_s = back_within_s if away else MARKER_TTL_S
        last = msgspec.structs.replace(self.record, state=state, token="", ttl_seconds=ttl_s)
        return await self.lease.hand_back(encode(last), ttl_s)


class WorkerIds:
    """Finds and leases an id for this process."""

    def __init__(
        self,
        bucket: Bucket,
        read_ids: Callable[[], Awaitable[Mapping[str, Entry]]],
        *,
        ttl_s: float,
        max_workers: int,
    ) -> None:
        self._bucket = bucket
        self._read_ids = read_ids
        self._terms = LeaseTerms(ttl_s, RENEW_SHARE)
        self._names = [f"worker-{n}" for n in range(max_workers)]

    async def take(self, applicant: Applicant, profile: Profile, *, floor: int = 0) -> Seat:
        """Lease an id, with an incarnation above `floor`.

        Raises `WorkerIdTaken` when a live process holds the one that was insisted on, `NoFreeWorkerId` when there
        is none left.
        """
        seen: dict[str, int] = {}
        unreadable = _Unreadable(self._terms.ttl_s)
        give_up_s = clock() + self._terms.ttl_s + 2.0
        while True:
            entries = {name_of(k): e for k, e in (await self._read_ids()).items()}
            records = {w: _decoded(e.value) for w, e in entries.items() if e.value}
            over = unreadable.over({w: entries[w].revision for w, r in records.items() if r is _UNREADABLE})
            held = {w: record for w, record in records.items() if record.state != "left" and w not in over}
            choice = choose_id(applicant, held, self._names)
            awaited = choice.await_end_of
            if awaited is not None:
                applicant = replace(applicant, preferred=awaited)  # should its lease end, it is ours
                revision = entries[awaited].revision
                if seen.setdefault(awaited, revision) == revision and clock() < give_up_s:
                    await asyncio.sleep(_LOOK_S)
                    continue
                # It was renewed: its holder is alive.
                self._taken(applicant, held[awaited], awaited)
                if not choice.candidates:
                    raise NoFreeWorkerId(
                        f"identity {applicant.identity!r} is in use and all other worker ids are held"
                    )
            for name in choice.candidates:
                seat = await self._try(name, entries.get(name), applicant, profile, floor)
                if seat:
                    return seat

    async def stand_by(
        self,
        applicant: Applicant,
        profile: Profile,
        *,
        floor: int = 0,
        rank: int = 0,
        yields_until_s: float = float("-inf"),
        on_look: Callable[[bool, bool], None] = lambda alive, replaced: None,
        check: Callable[[], Awaitable[None]],
    ) -> Seat:
        """Lease the id that the applicant insists on, as soon as whoever holds it has stopped.

        `on_look` is told at each look whether somebody holds it firmly, and whether somebody else has held it since
        this process did. Failures to look are waited out, but for `ControlPlaneReset`, which `check` raises: in
        another bucket a lease that is missing says nothing of its holder.
        """
        name, revision = applicant.fixed, 0
        assert name
        decide = Understudy(applicant, self._terms, rank=rank, yields_until_s=yields_until_s)
        while True:
            looked_s = clock()
            try:
                entry = await self._bucket.get(key_of("ids", name))
                record = _decoded(entry.value) if entry and entry.value else None
                # The time after the look: a renewal that it shows was sent before.
                before, revision = revision, entry.revision if entry else 0
                step = decide.look(Seen(revision, record), clock())
                on_look(decide.holder_lives(clock()), decide.replaced)
                if step is Step.TAKE or revision < before:
                    await check()
                if step is Step.TAKE and (seat := await self._try(name, entry, applicant, profile, floor)):
                    return seat
            except ControlPlaneReset:
                raise
            except PartiError as error:
                _log.debug("the worker id cannot be looked at, will try again", worker=name, error=str(error))
                on_look(False, decide.replaced)
            await asyncio.sleep(max(0.0, looked_s + _STANDBY_LOOK_S - clock()))

    def _taken(self, applicant: Applicant, holder: MemberRecord, name: str) -> None:
        who = f"process {holder.pid} on {holder.host or 'an unnamed host'}"
        if applicant.fixed:
            raise WorkerIdTaken(
                f"worker id {name!r} is held by {who}; stop that worker, or start this one with another --worker-id "
                f"(or with none: it then gets a free one)"
            )
        _log.warning(
            "another live process has our identity; taking another id", identity=applicant.identity, held_by=who
        )

    async def _try(
        self, name: str, over: Entry | None, applicant: Applicant, profile: Profile, floor: int
    ) -> Seat | None:
        record = MemberRecord(
            token=applicant.token,
            incarnation=0,
            identity=applicant.identity,
            started_at=datetime.now(UTC),
            ttl_seconds=self._terms.ttl_s,
            host=profile.host,
            pid=profile.pid,
            version=profile.version,
            capacity=profile.capacity,
            weight=profile.weight,
            service=profile.service,
            client=profile.client,
            guest=profile.guest,
        )
        seat = Seat(self._bucket, self._terms, name, record)
        try:
            await seat.sit_down(over, floor=floor)
        except LeaseLost:
            return None
        return seat


class _Unreadable:
    """Leases that nobody can read: nobody renews them either, so their holder has stopped after the length of one."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._since_s: dict[tuple[str, int], float] = {}

    def over(self, revisions: Mapping[str, int]) -> set[str]:
        """Which of these have been as they are for so long that they may be taken."""
        now_s = clock()
        since_s = {seen: self._since_s.get(seen, now_s) for seen in revisions.items()}
        self._since_s = since_s
        return {worker for (worker, _), began_s in since_s.items() if now_s - began_s > self._ttl_s}


_UNREADABLE = MemberRecord(
    token="",
    incarnation=0,
    host="(its record is unreadable)",
    started_at=datetime.fromtimestamp(0, UTC),
    ttl_seconds=0,
)


def _decoded(value: bytes) -> MemberRecord:
    """Read a record; one that nobody can read is somebody's, but surely not ours."""
    try:
        return decode(value, MemberRecord)
    except DecodeError:
        return _UNREADABLE
