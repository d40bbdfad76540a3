"""A guest of a fleet: a member that owns the partitions that it places on itself, for as long as it needs them.

It reads nothing. Who handles the partitions is somebody else's business (a replay's); the guest keeps the lease,
holds the claims, stores the positions under the lease as workers do, and gives the partitions back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from parti.app.fleet_reading import LeasedStore, granted_by
from parti.app.worker import Job, check_template, check_version, find_stream
from parti.config import Settings
from parti.coordination.control_plane import ControlPlane
from parti.coordination.fleet_parts import FleetParts
from parti.coordination.hooks import Hooks
from parti.coordination.lease import clock
from parti.coordination.manager import Manager
from parti.coordination.orders import change_orders, obstacle, read_situation
from parti.coordination.sources import SourceContext, SourceReader
from parti.coordination.worker_ids import Seat
from parti.core.lease import NEVER_S
from parti.core.progress import Progress
from parti.core.replay import Holdings
from parti.core.retention import LIMITS, retention_named
from parti.errors import ConfigError, PartiError, RequestTimeout
from parti.jetstream.api import JetStreamApi, StreamInfo
from parti.jetstream.connection import Connection
from parti.jetstream.kv import Bucket
from parti.model.fleet import Orders
from parti.model.partition import Partition
from parti.telemetry.health import Health
from parti.telemetry.metrics import Metrics
from parti.worker.progress import ProgressKeeper

_log = structlog.get_logger("parti.guest")

_ROOM = 1_000_000
"""Partitions that a guest takes: as many as are placed on it."""
_LOOK_S = 0.05
_RATE_OVER_S = 0.5


class GuestReading:
    """The reading side of a guest: holdings instead of a consumer."""

    def __init__(
        self, stream: StreamInfo, metrics: Metrics, health: Health, granted: Callable[[], Mapping[str, Any]]
    ) -> None:
        self.holdings = Holdings()
        self.permitted_until_s = NEVER_S
        """Until when handlers may be started."""
        self.on_lost: Callable[[], None] = lambda: None
        """Called when nothing may be started any more."""
        self._stream = stream
        self._metrics = metrics
        self._health = health
        self._granted = granted
        self._keeper: ProgressKeeper | None = None
        self._counted = (0, time.perf_counter())
        self._rate = 0.0

    async def seated(self, seat: Seat, plane: ControlPlane) -> None:
        """Begin under a worker id; positions that are known here stay known."""
        self.holdings.lose()
        store = LeasedStore(plane.bucket, seat)
        if self._keeper is None or not await self._keeper.continues(store, seat.incarnation):
            self._keeper = ProgressKeeper(
                store, seat.worker_id, self._metrics, self._health, incarnation=seat.incarnation
            )
            # What an earlier run has stored stays in the record, until somebody has it at a later position.
            self.holdings.know((await self._keeper.load(self._stream)).behind)

    async def update_worker_consumer(self, worker_id: str, partitions: Sequence[Partition]) -> None:
        """There is no consumer: what is granted is held already."""

    async def refuse(self, partitions: Sequence[Partition]) -> Mapping[str, str]:
        """Take everything: there is no consumer."""
        return {}

    def let_go(self, keep: Sequence[Partition], told: Callable[[], None]) -> bool:
        """Hold exactly what the assignment grants; tasks hear of it when they ask next."""
        self.holdings.grant(self._granted())
        return True

    def permit(self, until_s: float) -> None:
        """Handlers may be started until then."""
        self.permitted_until_s = until_s
        if until_s == NEVER_S:
            self.on_lost()

    async def settle(self) -> Sequence[str]:
        """Store the positions; returns the partitions that were let go and that a task may still be handling."""
        leaving = self.holdings.busy(clock())
        if not await self.store():
            return tuple(self.holdings.positions)  # nothing may be given away before its position is known
        return leaving

    async def store(self, *, closed: bool = False) -> bool:
        """Store the positions; True when they are stored."""
        if self._keeper is None:
            return False
        self._keeper.closed = closed
        try:
            return await self._keeper.save(self._summary)
        except PartiError as error:
            _log.warning("positions not stored", error=str(error))
            return False

    def _summary(self, writer: str) -> Progress:
        return Progress(
            stream=self._stream.name,
            stream_created=self._stream.created,
            behind=dict(self.holdings.positions),
            writer=writer,
        )

    def report(self) -> Mapping[str, Any]:
        """What a heartbeat says."""
        finished, (before, at_s), now_s = self.finished, self._counted, time.perf_counter()
        if now_s - at_s > _RATE_OVER_S:
            self._rate = (finished - before) / (now_s - at_s)
            self._counted = (finished, now_s)
        return {
            "pulling": True,
            "rate": round(self._rate, 1),
            "finished": finished,
            "dead_letters": self.holdings.dead_lettered,
        }

    @property
    def finished(self) -> int:
        """Messages handled or dead-lettered."""
        return self.holdings.handled + self.holdings.dead_lettered


@dataclass(frozen=True, slots=True)
class Visit:
    """What a guest works with."""

    connection: Connection
    api: JetStreamApi
    stream: StreamInfo
    bucket: Bucket
    partitions: Mapping[str, Partition]
    """All that the fleet's source names."""


class Guest:
    """A member of the fleet from `join` to `leave`, under the worker id `name`."""

    def __init__(self, settings: Settings, job: Job, name: str) -> None:
        changes = {"worker_id": name, "identity": None, "capacity": _ROOM, "metrics_port": None, "fleet": True}
        self.name = name
        self.settings = settings.model_copy(update=changes)
        self._job = job
        self._visit: Visit | None = None
        self._reading: GuestReading | None = None
        self._manager: Manager | None = None

    # ── the visit ─────────────────────────────────────────────────────────────────────────────────────────────

    async def connect(self) -> Visit:
        """Connect and check everything, without a trace in the fleet; raises `ConfigError` when it cannot be."""
        connection = await Connection.open(self.settings, name=f"{self.settings.prefix}-{self.name}")
        try:
            check_version(connection)
            api = JetStreamApi(connection)
            stream = await find_stream(api, self._job.stream)
            if stream.retention != LIMITS.name:
                raise ConfigError(
                    f"stream {stream.name!r} has {stream.retention} retention, where a message is gone once it is "
                    f"acknowledged; a replay needs limits retention: let the workers do it"
                )
            check_template(self._job, stream)
            assert self._job.source
            bucket = await Bucket.open(api, self.settings.bucket, replicas=self.settings.replicas)
            context = SourceContext(api, bucket, stream.name, self._job.template)
            found = await SourceReader(self._job.source, context).read()
            self._visit = Visit(connection, api, stream, bucket, {p.id: p for p in found})
        except BaseException:
            await connection.close()
            raise
        return self._visit

    async def join(self) -> None:
        """Take the worker id; waits for the lease of a predecessor that died to end."""
        visit, job = self.visit, self._job
        assert job.source
        metrics, health = Metrics(self.name), Health()
        health.on_task_death = metrics.task_deaths.inc
        self._reading = GuestReading(visit.stream, metrics, health, self._grants)
        parts = FleetParts(
            visit.connection,
            visit.api,
            self.settings,
            visit.stream.name,
            retention_named(visit.stream.retention),
            job.template,
            job.source,
            job.strategy,
            job.weights,
            metrics,
            health,
        )
        self._manager = Manager(parts, self._reading, Hooks(), guest=True)
        await self._manager.start()

    async def leave(self) -> bool:
        """Store the positions, give the id back and close; True when all of it worked."""
        clean = True
        if self._manager and self._reading:
            await self._manager.drain()
            clean = await self._reading.store(closed=True)
            clean = await self._manager.stop() and clean
        if self._visit:
            await self._visit.connection.close()
        return clean

    @property
    def visit(self) -> Visit:
        """What `connect` has found."""
        assert self._visit, "connect first"
        return self._visit

    @property
    def reading(self) -> GuestReading:
        """The holdings, and until when they count."""
        assert self._reading, "join first"
        return self._reading

    @property
    def manager(self) -> Manager:
        """This guest's place in the fleet."""
        assert self._manager, "join first"
        return self._manager

    def _grants(self) -> Mapping[str, Any]:
        granted = granted_by(self.manager)
        return granted.grants if granted.stream_created == self.visit.stream.created else {}

    # ── partitions ────────────────────────────────────────────────────────────────────────────────────────────

    async def place(self, partitions: Sequence[str]) -> None:
        """Order that these belong to this guest, and no others that a run before this one may have left placed.

        Raises `ConfigError` when another order stands in the way.
        """

        def place(orders: Orders) -> Orders:
            _check_orders(orders, partitions, self.name)
            placed = self._placed_elsewhere(orders) | dict.fromkeys(partitions, self.name)
            return msgspec.structs.replace(orders, placed=placed)

        await change_orders(self.visit.bucket, place)

    def _placed_elsewhere(self, orders: Orders) -> dict[str, str]:
        return {p: worker for p, worker in orders.placed.items() if worker != self.name}

    async def owns(self, partitions: Sequence[str], *, within_s: float, told: Callable[[int], None]) -> None:
        """Return once all of these are held and may be handled; `told` hears how many are.

        Raises `RequestTimeout` with what the first of the others is waiting for.
        """
        wanted = set(partitions)
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while missing := wanted - self.holds():
                    told(len(wanted) - len(missing))
                    await asyncio.sleep(_LOOK_S)
                told(len(wanted))
                return
        first = min(wanted - self.holds())
        situation = await read_situation(await self._plane())
        raise RequestTimeout(
            f"after {within_s:g} s {len(missing)} of {len(wanted)} partitions had not come to {self.name}; "
            f"{first}: {obstacle(situation, first, self.name)}"
        )

    def holds(self) -> set[str]:
        """What may be handled now."""
        if not self.manager.partitions or self.reading.permitted_until_s <= clock():
            return set()
        return self.reading.holdings.held.keys() & {p.id for p in self.manager.partitions}

    async def give_back(self, *, within_s: float) -> bool:
        """Take the order back and wait until others have the partitions; False when they had not in time.

        They go to others then as well, when this guest leaves, and nothing is lost or repeated either way.
        """

        def give_back(orders: Orders) -> Orders:
            return msgspec.structs.replace(orders, placed=self._placed_elsewhere(orders))

        await change_orders(self.visit.bucket, give_back)
        situation = await read_situation(await self._plane())
        if not any(m.state == "active" and not m.guest for m in situation.records.members.values()):
            return False  # nobody is there to take them
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self._is_told_of_any():  # noqa: ASYNC110 - whoever tells knows of no event
                    await asyncio.sleep(_LOOK_S)
                return True
        return False

    def _is_told_of_any(self) -> bool:
        told = self.manager.assignment
        return told is not None and bool(told.partitions or told.incoming)

    async def _plane(self) -> ControlPlane:
        visit = self.visit
        return ControlPlane(visit.connection, visit.api, visit.bucket, (await visit.bucket.info()).created)


def _check_orders(orders: Orders, partitions: Sequence[str], name: str) -> None:
    if orders.hold_moves:
        raise ConfigError("moves are paused, so no partition would come; use 'parti resume' first")
    if name in orders.drained:
        raise ConfigError(f"{name} is drained; use 'parti drain {name} --undo' first, or another --name")
    for partition in partitions:
        if partition in orders.withheld:
            raise ConfigError(f"{partition} is withheld: an older consumer handles it; see 'parti migrate status'")
        if partition in orders.paused:
            raise ConfigError(f"{partition} is paused: nobody handles it; use 'parti resume {partition}' first")
        if (elsewhere := orders.placed.get(partition, name)) != name:
            raise ConfigError(
                f"{partition} is placed on {elsewhere} by an operator; use 'parti move {partition} --auto' first"
            )
