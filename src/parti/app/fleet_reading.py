"""Joins the two halves of a worker: what the fleet's manager says, and what the reader does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import structlog

from parti.config import Settings
from parti.coordination.control_plane import ControlPlane
from parti.coordination.manager import Manager
from parti.coordination.worker_ids import Seat
from parti.core.filters import find_unreadable
from parti.core.fleet_report import waits_for_room
from parti.core.lease import NEVER_S
from parti.errors import DecodeError
from parti.jetstream.kv import Bucket, Entry
from parti.model.fleet import Assignment, Claim, HealthRecord, decode, key_of
from parti.model.partition import Partition
from parti.telemetry.tasks import owned
from parti.worker.reader import SIGNALS, Reader, ReaderPorts
from parti.worker.standby import WaitingPull, can_be_pinned
from parti.worker.starts import Granted

_log = structlog.get_logger("parti.worker")
_T = TypeVar("_T", bound=msgspec.Struct)


class LeasedStore:
    """The bucket as a worker may write to it: each write takes effect only while its lease stands.

    The server compares the lease's revision with every write, so one that arrives late, or comes from a process that
    has been replaced, changes nothing.
    """

    def __init__(self, bucket: Bucket, seat: Seat) -> None:
        self._bucket = bucket
        self._seat = seat

    async def get(self, key: str) -> Entry | None:
        """Read a key from the leader; None when it never existed."""
        return await self._bucket.get(key)

    async def put(self, key: str, value: bytes, *, revision: int) -> int:
        """Write a key under the lease, whose holder is its only writer; raises `LeaseLost` when it has ended."""
        return await self._seat.lease.put(key, value)


class FleetReading:
    """The reading side of a fleet's worker: a reader for as long as the same worker id is held."""

    def __init__(
        self,
        ports: ReaderPorts,
        settings: Settings,
        granted: Callable[[], Granted],
        on_worker_id: Callable[[str], None],
        step_down: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`step_down` is called when somebody who stands by has been given this worker's consumer."""
        self.reader: Reader | None = None
        self.finished_before = 0
        """Messages that earlier readers of this process have finished."""
        self._ports = ports
        self._stream = ports.stream
        self._settings = settings
        self._granted = granted
        self._on_worker_id = on_worker_id
        self._step_down = step_down
        self._waiting: WaitingPull | None = None
        self._ending: asyncio.Task[None] | None = None

    async def seated(self, seat: Seat, plane: ControlPlane) -> None:
        """Get ready to read under a worker id; a reader that had the same id just before goes on."""
        if self._waiting:
            await self._waiting.stop()
        await self._ended()
        self._on_worker_id(seat.worker_id)
        store = LeasedStore(plane.bucket, seat)
        if self.reader:
            same = self.reader.worker_id == seat.worker_id
            if same and await self.reader.continues(store, seat.incarnation, lambda: seat.lease.held):
                # At once: after a reset this is all that is known of these partitions.
                await self.reader.store_progress()
                return
            _log.warning("starting over under another holding of a worker id", before=self.reader.worker_id)
            await self._end(self.reader)
        settings = self._settings.model_copy(update={"worker_id": seat.worker_id})
        self.reader = Reader(
            self._ports,
            settings,
            store,
            each_subject=False,
            pointers=plane.bucket,
            incarnation=seat.incarnation,
            entitled=lambda: seat.lease.held,
            safe_elsewhere=partial(safe_elsewhere, plane.bucket, seat.worker_id),
            wait_for_room=partial(wait_for_room, plane.bucket),
            outpinned=self._step_down,
        )
        self.reader.permit(NEVER_S)

    async def update_worker_consumer(self, worker_id: str, partitions: Sequence[Partition]) -> None:
        """Read exactly these partitions."""
        assert self.reader
        assert self.reader.worker_id == worker_id
        if self.reader.started:
            await self.reader.update(partitions, self._granted())
        else:
            await self.reader.start(partitions, self._granted())

    async def refuse(self, partitions: Sequence[Partition]) -> Mapping[str, str]:
        """Which of these partitions cannot be read, and why; the stream may have got further subjects since."""
        s = self._settings
        check = partial(find_unreadable, partitions, max_subjects=s.max_subjects, shards=s.consumer_shards)
        if (refused := check(self._stream.stored_subjects)) and self.reader:
            self._stream = await self._ports.api.stream_info(self._stream.name)
            self.reader.follow(self._stream)
            refused = check(self._stream.stored_subjects)
        return refused

    def let_go(self, keep: Sequence[Partition], told: Callable[[], None]) -> bool:
        """Start nothing more in partitions that are not among these."""
        return self.reader is not None and self.reader.let_go(keep, self._granted(), told)

    def permit(self, until_s: float) -> None:
        """Handlers may be started until then."""
        if self.reader:
            self.reader.permit(until_s)

    async def settle(self) -> Sequence[str]:
        """Store the positions; returns the partitions that were let go and whose handler still runs."""
        if self.reader is None:
            return ()  # it was handed over
        busy = self.reader.busy
        if not await self.reader.store_progress():
            # What was let go must not be given away before its position is known.
            return tuple({*busy, *self.reader.released})
        return busy

    def stand_by(self, worker_id: str, *, alive: bool, replaced: bool) -> None:
        """Let the server know of somebody it can pin instead, while the one that is pinned is well.

        What was read under a lease that somebody else has had since is of no use any more.
        """
        if replaced and self.reader:
            self._ending = owned(self._end(self.reader), "reader-end", self._ports.health, signals=False)
            self.reader = None
        if self._waiting is None and can_be_pinned(self._settings, self._ports.stream):
            self._waiting = WaitingPull(self._settings, self._ports.stream.name, worker_id)
        if self._waiting:
            self._waiting.stand(alive)

    async def hand_over(self) -> None:
        """Finish what runs and store the positions; whoever is next goes on from there."""
        if self.reader:
            await self._end(self.reader, store=True)
            self.reader = None

    async def _end(self, reader: Reader, *, store: bool = False) -> None:
        """End a reader while this process goes on: what ailed it is no matter any more."""
        await reader.stop(store=store)
        self.finished_before += reader.finished
        for signal in [name for name in self._ports.health.reasons if name.startswith(SIGNALS)]:
            self._ports.health.clear(signal)

    async def close(self) -> None:
        """This process stands by no more."""
        if self._waiting:
            await self._waiting.stop()
        await self._ended()

    async def _ended(self) -> None:
        """Wait for the end of a reader that was given up."""
        ending, self._ending = self._ending, None
        if ending:
            await ending

    def report(self) -> Mapping[str, Any]:
        """What a heartbeat says."""
        return self.reader.report() if self.reader else {}


async def safe_elsewhere(bucket: Bucket, worker_id: str, partitions: Iterable[str]) -> set[str]:
    """Which of these partitions somebody else owns whose consumer carries them, or nobody wants any more."""
    owners: dict[str, str] = {}
    safe = set()
    for partition in partitions:
        claim = await _read(bucket, key_of("claims", partition), Claim)
        if claim and waits_for_room(claim):
            continue  # somebody will want it again: until then its messages must be kept
        if claim and claim.state in {"free", "moving"} and claim.owner in {"", worker_id}:
            # Nobody wants it any more, or we were told to let go because the next owner carries it.
            safe.add(partition)
        elif claim and claim.owner != worker_id:
            owners[partition] = claim.owner
    for owner in set(owners.values()):
        told = await _read(bucket, key_of("assignment", owner), Assignment)
        said = await _read(bucket, key_of("health", owner), HealthRecord)
        if told and said and said.incarnation == told.incarnation and said.ready >= told.version:
            taken = told.partitions.keys() - set(said.refused)
            safe |= {p for p, owned_by in owners.items() if owned_by == owner and p in taken}
    return safe


async def wait_for_room(bucket: Bucket, partitions: Iterable[str]) -> set[str]:
    """Which of these partitions nobody owns because nobody has room for them."""
    claims = {p: await _read(bucket, key_of("claims", p), Claim) for p in partitions}
    return {p for p, claim in claims.items() if claim and waits_for_room(claim)}


async def _read(bucket: Bucket, key: str, kind: type[_T]) -> _T | None:
    entry = await bucket.get(key)
    try:
        return decode(entry.value, kind) if entry and entry.value else None
    except DecodeError:
        return None


def granted_by(manager: Manager) -> Granted:
    """What the assignment grants that is being applied."""
    told = manager.assignment
    return Granted(told.partitions, told.stream_created, told.incoming) if told else Granted()
