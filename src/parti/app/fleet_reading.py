"""Joins the two halves of a worker: what the fleet's manager says, and what the reader does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog

from parti.config import Settings
from parti.coordination.control_plane import ControlPlane
from parti.coordination.manager import Manager
from parti.coordination.worker_ids import Seat
from parti.core.lease import NEVER_S
from parti.jetstream.kv import Bucket, Entry
from parti.model.partition import Partition
from parti.worker.reader import Reader, ReaderPorts
from parti.worker.starts import Granted

_log = structlog.get_logger("parti.worker")


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
    ) -> None:
        self.reader: Reader | None = None
        self.finished_before = 0
        """Messages that earlier readers of this process have finished."""
        self._ports = ports
        self._settings = settings
        self._granted = granted
        self._on_worker_id = on_worker_id

    async def seated(self, seat: Seat, plane: ControlPlane) -> None:
        """Get ready to read under a worker id; a reader that had the same id just before goes on."""
        self._on_worker_id(seat.worker_id)
        store = LeasedStore(plane.bucket, seat)
        if self.reader:
            same = self.reader.worker_id == seat.worker_id
            if same and await self.reader.continues(store, seat.incarnation, lambda: seat.lease.held):
                # At once: after a reset this is all that is known of these partitions.
                await self.reader.store_progress()
                return
            _log.warning("starting over under another holding of a worker id", before=self.reader.worker_id)
            await self.reader.stop(store=False)
            self.finished_before += self.reader.finished
        settings = self._settings.model_copy(update={"worker_id": seat.worker_id})
        self.reader = Reader(
            self._ports,
            settings,
            store,
            each_subject=False,
            pointers=plane.bucket,
            incarnation=seat.incarnation,
            entitled=lambda: seat.lease.held,
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

    def let_go(self, keep: Sequence[Partition], told: Callable[[], None]) -> bool:
        """Start nothing more in partitions that are not among these."""
        return self.reader is not None and self.reader.let_go(keep, self._granted(), told)

    def permit(self, until_s: float) -> None:
        """Handlers may be started until then."""
        if self.reader:
            self.reader.permit(until_s)

    async def settle(self) -> Sequence[str]:
        """Store the positions; returns the partitions that were let go and whose handler still runs."""
        assert self.reader
        busy = self.reader.busy
        if not await self.reader.store_progress():
            # What was let go must not be given away before its position is known.
            return tuple({*busy, *self.reader.released})
        return busy

    def report(self) -> Mapping[str, Any]:
        """What a heartbeat says."""
        return self.reader.report() if self.reader else {}


def granted_by(manager: Manager) -> Granted:
    """What the newest assignment grants."""
    offered = manager.offered
    return Granted(offered.partitions, offered.stream_created, offered.incoming) if offered else Granted()
