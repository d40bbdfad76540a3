"""The reading side of a worker under one worker id: consumer, lanes, runners, positions, put together."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import structlog

from parti.config import Settings
from parti.core.hot_mirror import OFF, mirror_name, why_not
from parti.core.lane import Lane, Phase
from parti.core.lease import NEVER_S
from parti.core.retry import RetryPolicy
from parti.core.stall import Stall, StallKind
from parti.errors import PartiError
from parti.jetstream.api import JetStreamApi, StreamInfo
from parti.jetstream.backlog import BacklogReader
from parti.jetstream.connection import Connection
from parti.jetstream.kv import Bucket
from parti.jetstream.state_store import StateStore
from parti.jetstream.wire import Wire
from parti.model.partition import PartitionLike, Template
from parti.telemetry.health import Health
from parti.telemetry.metrics import Metrics
from parti.telemetry.tasks import Supervised, supervise
from parti.telemetry.tracing import traced
from parti.worker.acks import AckWriter
from parti.worker.caution import Caution
from parti.worker.consumer import WorkerConsumer
from parti.worker.deadletters import DeadLetterStream
from parti.worker.hot_mirror import HotMirror, Reading
from parti.worker.lag import keep_lag
from parti.worker.lanes import Lanes
from parti.worker.ledger import Ledger
from parti.worker.loads import LoadMeter
from parti.worker.parking import Parking
from parti.worker.progress import ProgressKeeper, ProgressStore
from parti.worker.recording import RecordingLanes, RecordingUnorderedLanes
from parti.worker.runners import Handler, make_runners
from parti.worker.signs import Signs, connect_probes
from parti.worker.starts import Granted
from parti.worker.state import StatefulHandler, StateKeeper
from parti.worker.stateful import StatefulPartitions
from parti.worker.unordered import UnorderedLanes
from parti.worker.vehicle import ConsumerPorts
from parti.worker.widening import Narrow, Widening

_log = structlog.get_logger("parti.reader")

SIGNALS = ("pull", "progress", "consumer-update", "ledger", "state", "task-")
"""What the names of health signals begin with that are about reading and storing."""

_SLOW = 3
"""A state may take some times as long as a stall: it may be large."""


@dataclass(frozen=True, slots=True)
class ReaderPorts:
    """What a reader works with; the same for every worker id that a process may hold."""

    connection: Connection
    api: JetStreamApi
    wire: Wire
    dead_letters: DeadLetterStream
    stream: StreamInfo
    template: Template
    handler: Handler
    metrics: Metrics
    health: Health
    states: StateStore | None = None
    """Where the state of a stateful handler is kept."""
    measures: bool = False
    """The fleet shares by measured load: count what handlers take."""


class Reader:
    """Reads and handles partitions from `start` to `stop`, as the worker that `settings.worker_id` names."""

    def __init__(
        self,
        ports: ReaderPorts,
        settings: Settings,
        store: ProgressStore,
        *,
        each_subject: bool,
        pointers: Bucket | None = None,
        incarnation: int = 0,
        entitled: Callable[[], bool] = lambda: True,
        safe_elsewhere: Callable[[Iterable[str]], Awaitable[set[str]]] | None = None,
        wait_for_room: Callable[[Iterable[str]], Awaitable[set[str]]] | None = None,
        outpinned: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`entitled` tells whether the worker id is still held; `incarnation` counts its holders.

        `pointers` is where the states of a stateful handler are looked up.
        """
        assert settings.worker_id
        self.entitled = entitled
        self._safe_elsewhere = safe_elsewhere
        self._wait_for_room = wait_for_room
        self._outpinned = outpinned
        self.settings = settings
        self.worker_id = settings.worker_id
        self._ports = ports
        self._each_subject = each_subject
        self._progress = ProgressKeeper(
            store, settings.worker_id, ports.metrics, ports.health, incarnation=incarnation
        )
        self._store = store
        self._stores = 0
        """Times that positions were to be stored, with or without success."""
        self._upkeep: list[Supervised] = []
        self._consumer: WorkerConsumer | None = None
        self._hot: HotMirror | None = None
        self._backlog: BacklogReader | None = None
        self._parking: Parking | None = None
        self._acks = AckWriter(ports.wire, ports.metrics, self._refill)
        self._ledger = self._make_ledger()
        self._lanes = self._make_lanes()
        self._lanes.failures.health = ports.health
        self._signs = Signs(self._lanes, ports.metrics)
        self._meter: LoadMeter | None = None
        if ports.measures:
            self._meter = LoadMeter(
                self._lanes,
                store,
                settings.worker_id,
                incarnation=incarnation,
                window_s=settings.load_window_s,
            )
        self._caution = Caution(self._lanes, self.store_progress, ports.health, limit=settings.crash_limit)
        self._stateful: StatefulPartitions | None = None
        if ports.states and pointers:
            keeper = StateKeeper(cast("StatefulHandler", ports.handler), ports.states, pointers)
            self._stateful = StatefulPartitions(
                keeper,
                self._lanes,
                ports.metrics,
                ports.health,
                worker_id=settings.worker_id,
                stream_created=self._stream_created,
                checkpoint_interval_s=settings.checkpoint_interval_s,
                slow_after_s=_SLOW * settings.stall_after_s,
            )
        if self._ledger:
            self._progress.durable = self._ledger.durable
            if self._stateful:
                self._stateful.durable = self._ledger.durable
        handler = traced(ports.handler) if settings.tracing else ports.handler
        self._runners = make_runners(
            self._lanes, handler, timeout_s=settings.handler_timeout_s, threads=settings.handler_threads
        )
        self._stop_listening = ports.wire.on_chunk(self._runners.kick)

    def _make_ledger(self) -> Ledger | None:
        ports, settings = self._ports, self.settings
        if settings.ledger == "off":
            return None
        return Ledger(
            ports.api,
            self._acks,
            ports.metrics,
            ports.health,
            settings,
            stream=ports.stream.name,
            max_payload=ports.connection.max_payload,
        )

    def _make_lanes(self) -> Lanes:
        ports, settings = self._ports, self.settings
        options: dict[str, Any] = {
            "template": ports.template,
            "stream": ports.stream.name,
            "worker_id": settings.worker_id,
            "policy": RetryPolicy(settings.attempts, settings.backoff_s),
            "dead_letters": ports.dead_letters,
            "metrics": ports.metrics,
            "each_subject": self._each_subject,
            "measures": ports.measures,
        }
        if self._ledger:
            return (RecordingLanes if settings.ordered else RecordingUnorderedLanes)(ledger=self._ledger, **options)
        return (Lanes if settings.ordered else UnorderedLanes)(acks=self._acks, **options)

    @property
    def consumer_name(self) -> str:
        """Name of the consumer on the server; empty before the start."""
        return self._consumer.name if self._consumer else ""

    @property
    def subjects(self) -> tuple[str, ...]:
        """What is being read."""
        return self._consumer.subjects if self._consumer else ()

    @property
    def finished(self) -> int:
        """Messages handled or dead-lettered."""
        return self._lanes.finished

    @property
    def pulling(self) -> bool:
        """Whether pulls are answered."""
        return self._consumer is not None and self._consumer.shards.healthy

    @property
    def started(self) -> bool:
        """Whether it has begun to read."""
        return self._consumer is not None

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self, partitions: Iterable[PartitionLike], granted: Granted | None = None) -> None:
        """Take up the consumer with these partitions and begin to read."""
        ports, settings = self._ports, self.settings
        stream = await ports.api.stream_info(ports.stream.name)
        progress = await self._progress.load(stream)
        self._hot = self._make_hot(stream)
        consumer = WorkerConsumer(
            ConsumerPorts(
                ports.api,
                ports.connection,
                ports.wire,
                self._lanes,
                ports.metrics,
                ports.health,
                self._is_entitled,
                self._on_new_stream,
                self._safe_elsewhere,
                self._wait_for_room,
                self._stateful,
                self._ledger.durable if self._ledger else None,
                self._hot,
                self._outpinned,
            ),
            settings,
            ports.template,
            stream,
            progress,
            each_subject=self._each_subject,
        )
        if settings.ordered:
            self._lanes.roster.failed.update(progress.failed)
        if granted:
            self._take(consumer, granted)
        self._consumer = consumer
        if self._ledger:
            self._ledger.open(stream.created)
        connect_probes(ports.metrics, settings, self._lanes, consumer.shards, mirrored=self._hot is not None)
        try:
            if settings.ordered and ports.stream.retention == "limits":
                limit = int(settings.backpressure * settings.max_ack_pending)
                self._backlog = BacklogReader(ports.api, ports.wire, stream, connection=ports.connection)
                self._parking = Parking(
                    self._lanes, self._backlog, self.store_progress, ports.metrics, ports.health, limit=limit
                )
                self._upkeep.append(supervise(self._parking.run, "parking", ports.health))
            await consumer.start(partitions)
        except BaseException:
            self._consumer = None
            await consumer.stop()
            await self._end_upkeep()
            raise
        self._upkeep += [
            supervise(self._keep_alive, "keep-alive", ports.health),
            supervise(self._keep_progress, "progress", ports.health),
            supervise(consumer.watch, "consumer-watch", ports.health),
        ]
        if settings.metrics_port is not None:
            self._upkeep.append(supervise(partial(keep_lag, consumer.shards, ports.metrics.lag), "lag", ports.health))
        if self._stateful:
            self._upkeep.append(supervise(self._stateful.run, "checkpoints", ports.health))
        if self._meter:
            self._upkeep.append(supervise(self._meter.run, "loads", ports.health))
        if self._hot:
            self._hot.serve(self._reading(consumer))
            self._upkeep.append(supervise(self._hot.run, "hot-mirror", ports.health))
        narrow = settings.ordered and stream.retention == "limits" and stream.storage == "file"
        # Not with shards: of several consumers with a wide filter, each would bring what the others bring too.
        if narrow and not self._each_subject and consumer.shards.alone:
            widening = Widening(ports.api, self._narrow(consumer), ports.metrics)
            self._upkeep.append(supervise(widening.run, "widening", ports.health))

    def _narrow(self, consumer: WorkerConsumer) -> Narrow:
        lanes, hot = self._lanes, self._hot
        return Narrow(
            stream=self._ports.stream.name,
            consumer=consumer.name,
            subjects=lambda: consumer.subjects,
            reached=lambda: lanes.cursor,
            widen=consumer.shards.widen,
            mirrored=lambda: hot is not None and hot.inside,
            may_mirror=lambda: hot is not None and not hot.refused,
        )

    def _make_hot(self, stream: StreamInfo) -> HotMirror | None:
        """A mirror where one may be used; `hot_mirror=on` where none may be was refused before."""
        settings, ports = self.settings, self._ports
        refused = why_not(stream.retention, stream.storage, ordered=settings.ordered, one_filter=self._each_subject)
        if settings.hot_mirror == OFF or settings.standby or refused:
            return None
        name = mirror_name(settings.prefix, stream.name, "" if settings.fleet else self.worker_id)
        return HotMirror(ports.api, self._store_now, settings, name, ports.metrics, ports.health)

    def _reading(self, consumer: WorkerConsumer) -> Reading:
        lanes = self._lanes

        def silence(silent: bool) -> None:
            self._acks.silent = silent

        return Reading(
            stream=self._ports.stream.name,
            consumers=lambda: consumer.shards.names,
            reached=lambda: consumer.shards.cursor,
            need=lambda: lanes.floors.resume_at,
            filters=lambda: consumer.shards.filters,
            store=self.store_progress,
            begin_anew=consumer.shards.new_session,
            silence=silence,
        )

    def _store_now(self) -> ProgressStore:
        """Where records are kept under the present lease."""
        return self._store

    async def update(self, partitions: Iterable[PartitionLike], granted: Granted | None = None) -> None:
        """Read exactly these partitions; see `WorkerConsumer.update_worker_consumer`."""
        assert self._consumer, "the reader has not been started"
        if granted:
            self._take(self._consumer, granted)
        await self._consumer.update_worker_consumer(self.worker_id, partitions)

    def follow(self, stream: StreamInfo) -> None:
        """Learn which subjects the stream has now."""
        if self._consumer:
            self._consumer.follow(stream)

    def let_go(self, keep: Iterable[PartitionLike], granted: Granted, left: Callable[[], None]) -> bool:
        """Handle nothing more of partitions that are not in `keep`; see `WorkerConsumer.let_go`.

        `left` is called whenever a handler has ended that still ran when its partition was let go.
        """
        self._lanes.on_left = left
        if self._stateful:
            self._stateful.on_saved = left
        if self._consumer is None:
            return False
        self._take(self._consumer, granted)
        return self._consumer.let_go(keep)

    def _take(self, consumer: WorkerConsumer, granted: Granted) -> None:
        self._lanes.roster.fence({partition: grant.fence_token for partition, grant in granted.grants.items()})
        if self.settings.ordered:
            self._caution.take(granted.grants)
        positions = {p: g.position for p, g in granted.grants.items()}
        consumer.grant(granted)
        if granted.stream_created == consumer.stream_created:
            for partition, grant in granted.grants.items():
                if grant.failed and self.settings.ordered:
                    self._lanes.roster.note_failed(partition, grant.failed, grant.attempts)
            if not self._stateful:
                self._lanes.skip_to(positions)

    def _stream_created(self) -> str:
        return self._consumer.stream_created if self._consumer else self._ports.stream.created

    def _is_entitled(self) -> bool:
        return self.entitled()

    def _on_new_stream(self, stream: StreamInfo) -> None:
        if self._backlog:
            self._backlog.follow(stream)
        if self._ledger:
            self._ledger.start_over(stream.created)

    def permit(self, until_s: float) -> None:
        """Allow handlers to be started until then (`time.perf_counter`); without permission nothing is pulled.

        Somebody else may hold the worker id by now, and with it the consumer.
        """
        self._lanes.permit(until_s)
        if self._consumer and until_s == NEVER_S:
            self._consumer.shards.suspend()
        elif self._consumer:
            self._consumer.shards.unsuspend("allowed to act again")

    async def continues(self, store: ProgressStore, incarnation: int, entitled: Callable[[], bool]) -> bool:
        """Go on under a new lease of the same id; False when somebody else has used the id in between."""
        self.entitled = entitled
        self._store = store
        if self._meter:
            self._meter.continues(store, incarnation)
        return await self._progress.continues(store, incarnation)

    @property
    def busy(self) -> Sequence[str]:
        """Partitions that were let go and whose handler still runs, or whose state is still being saved."""
        saving = self._stateful.saving if self._stateful else ()
        return tuple({*self._lanes.leaving, *saving})

    @property
    def released(self) -> Sequence[str]:
        """Partitions that were let go at some time."""
        return tuple(self._lanes.roster.released)

    async def store_progress(self) -> bool:
        """Store the positions if they changed; True when they are stored."""
        if not self._consumer:
            return True
        self._stores += 1
        if not self._consumer.begun:
            return not self._lanes.finished  # what is stored is as good as what is known
        try:
            stored = await self._progress.save(self._consumer.summarise)
        except PartiError as error:
            _log.error("positions not stored", error=str(error))
            return False
        if stored:
            self._lanes.stored()
        return stored

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────

    async def stop(self, *, drain: bool = True, store: bool = True) -> bool:
        """Stop pulling, let running handlers finish, store the positions; True when all of it worked."""
        clean = True
        if self._consumer:
            await self._consumer.stop()
        if drain:
            clean = await self._runners.drain(self.settings.drain_timeout_s)
            await self._settle_dead_letters()
        if self._stateful:
            await self._stateful.stop(save=drain and clean, timeout_s=self.settings.drain_timeout_s)
        await self._caution.stop()
        await self._runners.stop()
        self._stop_listening()
        self._stop_listening = _nothing
        if not clean:
            _log.error("handlers still ran at the end; their messages will be delivered again")
        await self._end_upkeep()
        if self._consumer and store:
            self._acks.flush()
            self._progress.closed = drain and clean
            if self._ledger:
                await self._ledger.durable(self.settings.drain_timeout_s)
            clean = await self.store_progress() and clean
        if self._hot:
            await self._hot.leave()
        if self._ledger:
            # Last of all: a chain that is closed says that nothing of it is handled again.
            await self._ledger.close(closed=store and drain and clean)
            self._acks.flush()
        return clean

    async def _settle_dead_letters(self) -> None:
        try:
            async with asyncio.timeout(self.settings.drain_timeout_s):
                await self._lanes.failures.settle_dead_letters()
        except TimeoutError:
            self._lanes.failures.cancel_dead_letters()

    async def _end_upkeep(self) -> None:
        for task in self._upkeep:
            task.cancel()
        await asyncio.gather(*self._upkeep, return_exceptions=True)
        self._upkeep.clear()

    # ── upkeep ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _keep_alive(self) -> None:
        interval_s = self.settings.ack_wait_s / 3
        while True:
            await asyncio.sleep(interval_s)
            self._lanes.keep_alive(interval_s)

    async def _keep_progress(self) -> None:
        while True:
            await asyncio.sleep(self.settings.progress_interval_s)
            self._lanes.floors.catch_up()
            self._lanes.roster.evict()
            if self._consumer:
                self._consumer.note_acknowledged(asyncio.get_running_loop().time())
            if await self.store_progress() and self._consumer:
                await self._tidy_up(self._consumer)

    async def _tidy_up(self, consumer: WorkerConsumer) -> None:
        try:
            await consumer.tidy_up()
        except PartiError as error:
            _log.warning("messages are held longer than needed; trying again", error=str(error))

    # ── progress ──────────────────────────────────────────────────────────────────────────────────────────────

    def look(self) -> dict[tuple[StallKind, str], Hashable]:
        """What is due now, for the watchdog."""
        due: dict[tuple[StallKind, str], Hashable] = {}
        lanes = self._lanes
        if lanes.permitted and not lanes.draining:
            front = lanes.front() if self._runners.may_start else None
            if front:
                head = front.waiting[0]
                due[StallKind.HANDLERS, front.ownership.partition.id] = (head.seq, head.attempt)
            for lane in lanes.orphans(self._runners.at_work()):
                # One that is held may wait for positions to be stored; as long as that is tried, it is no stall.
                tries = self._stores if lane.phase is Phase.HELD else 0
                due[StallKind.LANES, lane.ownership.partition.id] = (lane.waiting[0].seq, tries)
            for lane in self._neglected():
                due[StallKind.LANES, lane.ownership.partition.id] = lane.feed_from
        for engine in self._consumer.shards.engines if self._consumer else ():
            # Where heartbeats are further apart than a stall may take, silence is due only when some are missing.
            overdue = engine.quiet_s + self.settings.stall_after_s >= engine.may_be_quiet_s
            if (sign := engine.sign) is not None and overdue:
                due[StallKind.PULLS, engine.consumer] = sign
        return due

    def story(self) -> dict[str, Any]:
        """What a log line says of a reading side that stands still."""
        phases = Counter(lane.phase.value for lane in self._lanes.roster.all())
        engines = self._consumer.shards.engines if self._consumer else ()
        return {
            "lanes": dict(phases),
            "ready": len(self._lanes.ready),
            "in_hand": self._lanes.held,
            "running": self._lanes.running,
            "permitted": self._lanes.permitted,
            "pulls": {engine.consumer: engine.tell() for engine in engines},
            "signals": dict(self._ports.health.reasons),
        }

    def restart(self, stall: Stall) -> None:
        """Begin anew with what has come to a standstill: pulls, runners, lanes without a runner."""
        if stall.kind is StallKind.PULLS and self._consumer:
            for engine in self._consumer.shards.engines:
                engine.revive("stalled")
        for lane in self._lanes.orphans(self._runners.at_work()):
            self._lanes.readopt(lane)
        for lane in self._neglected():
            self._lanes.on_starved(lane)
        self._runners.revive()

    def _neglected(self) -> list[Lane]:
        """Parked lanes that nobody feeds."""
        return self._parking.neglected() if self._parking else []

    def _refill(self) -> None:
        if self._consumer:
            self._consumer.shards.refill()

    def report(self) -> dict[str, Any]:
        """What a heartbeat says of the reading side."""
        return {"pulling": self.pulling, "subjects": len(self.subjects), **self._signs.look()}


def _nothing() -> None:
    """There is nothing left to remove."""
