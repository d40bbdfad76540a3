"""Records of a migration, and the lease under which one process at a time may change them.

Everything is written in one atomic batch with a renewal of that lease, orders included: a migration that was
suspended and is replaced changes nothing any more. Guards that a partition is never given to the fleet by somebody
who does not know that it went back to its old consumer.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import msgspec

from parti.coordination.control_plane import ControlPlane
from parti.coordination.lease import Lease, clock
from parti.coordination.orders import KEY as ORDERS
from parti.coordination.orders import orders_in
from parti.core.lease import LeaseTerms
from parti.core.progress import Progress, decode_progress, encode_progress
from parti.errors import ConfigError, DecodeError, LeaseLost, PartiError, RequestTimeout, WrongRevision
from parti.jetstream.kv import MARKER_TTL_S, MAX_BATCH, Entry, Write
from parti.model.fleet import Claim, Orders, decode, encode, key_of
from parti.model.migration import (
    OLD_CONSUMERS,
    Action,
    MigrationRecord,
    MigratorLease,
    OldConsumer,
    Phase,
    PhaseNote,
)
from parti.telemetry.tasks import bound_to, owned

KEY = "migration"
LEASE = "migrator"
_TTL_S = 10.0
_RENEW_SHARE = 0.4
_LOOK_S = 0.2
_NOTES = 100
_TRIES = 100
_SILENCES = 3
_LOST = "another 'parti migrate' has taken over, or the server was away for too long; run this again"


class MigrationDesk:
    """What is known of the migration in this bucket, as last read or written."""

    def __init__(self, plane: ControlPlane, by: str) -> None:
        self.record: MigrationRecord | None = None
        self.old: dict[str, OldConsumer] = {}
        """By partition."""
        self._plane = plane
        self._by = by
        self._token = uuid.uuid4().hex
        self._revisions: dict[str, int] = {}
        self._lease: Lease | None = None

    async def load(self) -> MigrationRecord | None:
        """Read everything; None when there is no migration here. Raises `ConfigError` for unreadable records."""
        entry = await self._plane.bucket.get(KEY)
        entries = await self._plane.read(f"{KEY}.>")
        try:
            self.record = decode(entry.value, MigrationRecord) if entry and entry.value else None
            self.old = {
                old.partition: old for e in entries.values() if e.value for old in [decode(e.value, OldConsumer)]
            }
        except DecodeError as error:
            raise ConfigError(
                f"the records of the migration cannot be read ({error}); use the version of parti that wrote them, "
                f"or let 'parti doctor' name the key"
            ) from None
        self._revisions = {key: found.revision for key, found in entries.items()}
        self._revisions[KEY] = entry.revision if entry else 0
        return self.record

    @property
    def migration(self) -> MigrationRecord:
        """The record; there must be one."""
        assert self.record
        return self.record

    # ── the lease ─────────────────────────────────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def held(self, *, wait_s: float = 3 * _TTL_S) -> AsyncIterator[None]:
        """Be the only one who migrates, until the block ends; waits for the lease of one that was killed to end.

        Raises `ConfigError` when somebody else is at it. When the lease is lost the block is cancelled, and
        `LeaseLost` is raised.
        """
        lease = self._lease = await self._take(wait_s)
        keeping = owned(self._keep(lease), "migration-lease", signals=False)
        try:
            async with bound_to(keeping, LeaseLost(_LOST)):
                await self.load()
                yield
        finally:
            keeping.cancel()  # what was written was written under the lease: that it ends now is no matter
            await asyncio.gather(keeping, return_exceptions=True)
            await asyncio.shield(lease.release())
            self._lease = None

    async def _take(self, wait_s: float) -> Lease:
        bucket, until_s = self._plane.bucket, clock() + wait_s
        # Nobody can renew what nobody can read.
        unreadable_until_s = clock() + min(_TTL_S, wait_s)
        while True:
            entry = await bucket.get(LEASE)
            if entry is None or not entry.value or (not _is_lease(entry) and clock() >= unreadable_until_s):
                lease = Lease(bucket, LEASE, LeaseTerms(_TTL_S, _RENEW_SHARE), self._is_ours)
                try:
                    await lease.acquire(entry, lambda _: self._value)
                except LeaseLost:
                    continue
                return lease
            if clock() >= until_s:
                raise ConfigError(f"{_holder(entry)} is migrating at this moment; wait until that has ended")
            await asyncio.sleep(_LOOK_S)

    @property
    def _value(self) -> bytes:
        return encode(MigratorLease(token=self._token, by=self._by))

    def _is_ours(self, value: bytes) -> bool:
        return value == self._value

    async def _keep(self, lease: Lease) -> None:
        while True:
            await asyncio.sleep(max(0.0, lease.renew_at_s - clock()))
            try:
                await lease.renew(self._value)
            except LeaseLost:
                return
            except PartiError:
                if not lease.held:
                    return
                await asyncio.sleep(lease.terms.retry_after(clock(), lease.ends_at_s))

    # ── writing ───────────────────────────────────────────────────────────────────────────────────────────────

    async def found(self, record: MigrationRecord, old: Sequence[OldConsumer]) -> None:
        """Begin a migration, or replace what a plan before said."""
        wanted = {KEY, *map(_key, old)}
        stale = [key for key in self._revisions if key not in wanted]
        for key in stale:
            await self._write([Write(key, b"", self._revisions.pop(key), MARKER_TTL_S, deletes=True)])
        self.old = {p: each for p, each in self.old.items() if _key(each) in wanted}
        await self.save(old=old)
        await self.save(record=record)

    async def begin(self, action: Action) -> None:
        """Note that something was begun."""
        if self.migration.doing != action:
            await self.save(record=msgspec.structs.replace(self.migration, doing=action))

    async def end(self, action: Action, phase: Phase, text: str, *, complete: bool = True) -> None:
        """Note what came of it; what is not complete stays begun."""
        record = self.migration
        phase, doing = (phase, "") if complete else (record.phase, action)
        note = PhaseNote(action=action, at=datetime.now(UTC), by=self._by, phase=phase, text=text)
        notes = (*record.notes, note)[-_NOTES:]
        await self.save(record=msgspec.structs.replace(record, phase=phase, doing=doing, notes=notes))

    async def save(
        self,
        *,
        record: MigrationRecord | None = None,
        old: Iterable[OldConsumer] = (),
        positions: Mapping[str, int] | None = None,
    ) -> None:
        """Write these; positions of partitions that old consumers have given up go first, in the same batch."""
        changed = list(old)
        writes = [await self._positions(positions)] if positions else []
        if record:
            writes.append(Write(KEY, encode(record), self._revisions.get(KEY, 0)))
        writes += [Write(key, encode(each), self._revisions.get(key, 0)) for each in changed for key in [_key(each)]]
        for begin in range(0, len(writes), MAX_BATCH - 1):
            batch = writes[begin : begin + MAX_BATCH - 1]
            revisions = await self._write(batch)
            self._revisions.update((w.key, r) for w, r in zip(batch, revisions, strict=True))
        self.record = record or self.record
        self.old.update((each.partition, each) for each in changed)

    async def _positions(self, positions: Mapping[str, int]) -> Write:
        record, key = self.migration, key_of("progress", OLD_CONSUMERS)
        entry = await self._plane.bucket.get(key)
        known = _progress(entry, record)
        behind = {p: max(seq, known.behind.get(p, 0)) for p, seq in positions.items()}
        written = msgspec.structs.replace(known, behind=known.behind | behind)
        return Write(key, encode_progress(written), entry.revision if entry else 0)

    async def orders(self) -> tuple[Orders, int]:
        """The orders that stand, and their revision; 0: there have never been any."""
        entry = await self._plane.bucket.get(ORDERS)
        return (orders_in(entry), entry.revision) if entry else (Orders(), 0)

    async def change_orders(self, change: Callable[[Orders], Orders]) -> int:
        """Change the orders of the fleet, under the lease; returns the revision of what stands then."""
        for _ in range(_TRIES):
            before, revision = await self.orders()
            after = change(before)
            if after == before:
                return revision
            try:
                return (await self._write([Write(ORDERS, encode(after), revision)]))[0]
            except WrongRevision:
                continue  # another operator was quicker
        raise WrongRevision(10071, "the orders change faster than they can be written")

    async def seal(self, partitions: Iterable[str]) -> list[str]:
        """Write the claims of these again as they are, free; returns those that are not, or were changed just now.

        A leader that decided before it knew the orders compares with the revision that it has read, so it gives
        away nothing of this; it reads claims and orders again, and the orders are older than this.
        """
        keys = {key_of("claims", partition): partition for partition in partitions}
        entries = await self._plane.read(*keys) if keys else {}
        owned = {key for key, entry in entries.items() if entry.value and not _is_free(entry)}
        writes = [_again(key, entries.get(key)) for key in keys if key not in owned]
        given = [keys[key] for key in owned]
        for begin in range(0, len(writes), MAX_BATCH - 1):
            batch = writes[begin : begin + MAX_BATCH - 1]
            try:
                await self._write(batch)
            except WrongRevision:
                given += [keys[write.key] for write in batch]
        return given

    async def _write(self, writes: Sequence[Write]) -> list[int]:
        for _ in range(_SILENCES):
            if self._lease is None or not self._lease.held:
                raise LeaseLost(_LOST)
            try:
                return await self._lease.renew(self._value, writes)
            except RequestTimeout:
                # All of it has taken effect or nothing: the last key tells.
                last = writes[-1]
                entry = await self._plane.bucket.get(last.key)
                if entry and entry.revision > last.revision and entry.value == last.value:
                    return list(range(entry.revision - len(writes) + 1, entry.revision + 1))
        raise RequestTimeout(f"the server does not answer to writes of {self._plane.bucket.name!r}; run this again")


def _key(old: OldConsumer) -> str:
    return key_of(KEY, old.partition)


def _again(key: str, entry: Entry | None) -> Write:
    """Writes a key as it is; for one that is not there, a marker that ends by itself."""
    revision = entry.revision if entry else 0
    if entry and entry.value:
        return Write(key, entry.value, revision)
    return Write(key, b"", revision, MARKER_TTL_S, deletes=True)


def _is_free(entry: Entry) -> bool:
    """Whether a claim says that nobody has the partition; one that cannot be read does not say so."""
    try:
        return decode(entry.value, Claim).state == "free"
    except DecodeError:
        return False


def _is_lease(entry: Entry) -> bool:
    try:
        decode(entry.value, MigratorLease)
    except DecodeError:
        return False
    return True


def _holder(entry: Entry) -> str:
    try:
        return decode(entry.value, MigratorLease).by
    except DecodeError:
        return "somebody"


def _progress(entry: Entry | None, record: MigrationRecord) -> Progress:
    fresh = Progress(stream=record.stream, stream_created=record.stream_created)
    if entry is None or not entry.value:
        return fresh
    try:
        known = decode_progress(entry.value)
    except DecodeError as error:
        key = key_of("progress", OLD_CONSUMERS)
        raise ConfigError(f"the key {key!r} cannot be read ({error}); restore it from a backup") from None
    return known if (known.stream, known.stream_created) == (fresh.stream, fresh.stream_created) else fresh
