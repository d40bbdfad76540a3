"""A running worker: everything between the settings and the handler, put together and taken apart in order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from parti.app.fleet_reading import FleetReading, granted_by
from parti.config import Settings
from parti.coordination.control_plane import read_keys
from parti.coordination.fleet_parts import FleetParts
from parti.coordination.hooks import Hooks
from parti.coordination.manager import Manager
from parti.coordination.mirror_keeping import MirrorKeeper
from parti.coordination.records import Records
from parti.coordination.sources import Discovered, Mapped, PartitionSource, SourceContext, SourceReader
from parti.coordination.stall_notes import StallNotes
from parti.core.fleet_view import FleetState
from parti.core.hot_mirror import ON, why_not
from parti.core.retention import INTEREST, LIMITS, retention_named
from parti.core.stall import Stall, grace_s
from parti.errors import ConfigError, NotFound, ServerTooOld, StreamNotFound, SubjectMismatch
from parti.jetstream.api import JetStreamApi, StreamInfo
from parti.jetstream.connection import Connection
from parti.jetstream.fleet_marks import check_fleet
from parti.jetstream.kv import Bucket
from parti.jetstream.lifecycle import Lifecycle
from parti.jetstream.micro import MicroService, ServiceStats
from parti.jetstream.state_store import StateStore
from parti.jetstream.streams import ensure_mapped_stream
from parti.jetstream.vitals import Vitals
from parti.jetstream.wire import Wire
from parti.model.partition import Partition, PartitionLike, Template
from parti.model.subjects import overlap, within
from parti.strategies.interface import Strategy, learns_loads
from parti.telemetry.tasks import owned
from parti.telemetry.tracing import check_tracing
from parti.telemetry.watchdog import Watchdog, Watched
from parti.version import __version__
from parti.worker.deadletters import DeadLetterStream
from parti.worker.ledger import ensure_ledger_stream
from parti.worker.reader import Reader, ReaderPorts
from parti.worker.runners import Handler
from parti.worker.state import is_stateful

_log = structlog.get_logger("parti.worker")

MIN_SERVER_VERSION = (2, 14, 0)
"""The first version with the consumer RESET that positions rest on."""
SOLO_ID = "worker-0"
"""The id of a worker that takes part in no fleet and was given none."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker is to do: which partitions of which stream, and with what handler."""

    stream: str
    template: Template
    source: PartitionSource | None
    """None: every subject that fits the template is a partition."""
    handler: Handler
    strategy: Strategy
    weights: Callable[[], Mapping[str, float] | None] = lambda: None
    """Loads of single partitions by id, for strategies that care."""


class Worker:
    """One worker, from `start` to `stop`: a member of the fleet, or (`fleet=false`) on its own.

    `start` raises a `PartiError` that says what is wrong when the worker cannot do its job; nothing is left
    behind then. `stop` drains: pulling ends, running handlers finish, positions are stored, the id is given back.
    """

    def __init__(self, settings: Settings, job: Job, hooks: Hooks | None = None) -> None:
        self.settings = settings
        self._vitals = Vitals(settings.worker_id or "", per_partition=settings.metrics_per_partition)
        self._life = Lifecycle(self._vitals)
        self.metrics = self._vitals.metrics
        self.health = self._vitals.health
        self.metrics.standby.value = int(settings.standby)
        self.on_worker_id: Callable[[str], None] = lambda worker_id: None
        """Called with each worker id that this worker takes."""
        self.manager: Manager | None = None
        """This worker's place in the fleet; None on its own, or before the start."""
        self._job = job
        self._hooks = hooks or Hooks()
        self.on_stalled: Callable[[str], None] | None = None
        """Called, in a thread, when this worker stands still and a restart has not helped; None: it stops."""
        self._connection: Connection | None = None
        self._watchdog: Watchdog | None = None
        self._leaving: set[asyncio.Task[bool]] = set()
        self._solo: Reader | None = None
        self._fleet: FleetReading | None = None

    async def start(self) -> None:
        """Connect, check everything, and begin; a member of the fleet holds a worker id then."""
        await self._life.begin(self._start, self._abandon)

    async def _abandon(self) -> None:
        if self.manager:
            await self.manager.stop()
        if self._reader:
            await self._reader.stop(drain=False, store=False)

    async def _start(self) -> None:
        settings, job = self.settings, self._job
        if settings.tracing:
            check_tracing()
        name = f"{settings.prefix}-{settings.worker_id or 'worker'}"
        connection = self._connection = await self._life.connect(settings, name=name)
        check_version(connection)
        api = JetStreamApi(connection)
        await api.account_info()
        if isinstance(job.source, Mapped):
            stream = await ensure_mapped_stream(api, job.stream, job.source.mapping, replicas=settings.replicas)
        else:
            stream = await find_stream(api, job.stream)
        check_template(job, stream)
        _check_retention(job, settings, stream)
        _check_mirror(job, settings, stream)
        await check_fleet(api, stream.name, settings)
        bucket = await Bucket.open(api, settings.bucket, replicas=settings.replicas)
        partitions = await self._check_partitions(api, bucket, stream)
        dead_letters = await DeadLetterStream.open(
            api,
            self.health,
            settings,
            max_payload=connection.max_payload,
            omit_large=stream.retention == "limits",
        )
        if settings.ledger != "off":
            await ensure_ledger_stream(api, settings, job.stream)
        states = None
        if is_stateful(job.handler):
            _check_stateful(job, settings, stream)
            states = await StateStore.open(connection, settings.bucket, replicas=settings.replicas)
        ports = ReaderPorts(
            connection,
            api,
            Wire(connection.client, plain=settings.protocol_reader == "plain"),
            dead_letters,
            stream,
            job.template,
            job.handler,
            self.metrics,
            self.health,
            states,
            measures=settings.fleet and learns_loads(job.strategy),
        )
        self._vitals.serve(settings)
        service = MicroService(
            connection,
            version=__version__,
            description=f"handles {job.template.text} of stream {job.stream}",
            subject=job.template.pattern,
            metadata=self._describe,
            stats=self._statistics,
        )
        self._life.hold(service.stop)
        if settings.fleet:
            await self._join(ports, service.id)
        else:
            await self._go_alone(ports, bucket, partitions)
        await service.start()
        self._watch()

    def _watch(self) -> None:
        """Have this worker watched from now on."""
        settings, notes = self.settings, StallNotes(self.settings, lambda: self.worker_id)
        loop = asyncio.get_running_loop()

        def leave(stall: Stall, reason: str) -> None:
            if self.on_stalled:
                self.on_stalled(reason)
            else:
                loop.call_soon_threadsafe(self._give_up)
            notes.write(stall, reason, "left")

        watched = Watched(
            look=lambda: self._reader.look() if self._reader else {},
            story=lambda: self._reader.story() if self._reader else {},
            restart=lambda stall: self._reader.restart(stall) if self._reader else None,
            tell=notes.write,
            recovered=lambda stall, reason: notes.write(stall, reason, "recovered"),
            leave=leave,
        )
        self._watchdog = Watchdog(
            watched,
            self.metrics,
            self.health,
            stall_after_s=settings.stall_after_s,
            grace_s=grace_s(settings.stall_after_s, settings.lease_ttl_s),
        )
        self._watchdog.start()
        self._life.call(self._watchdog.stop)

    def _give_up(self) -> None:
        """Leave, so that others take over: this worker stands still."""
        owned(self.stop(drain=False), "leave", self.health, keep=self._leaving)

    async def _check_partitions(self, api: JetStreamApi, bucket: Bucket, stream: StreamInfo) -> Sequence[Partition]:
        """Read the source once, so that what is wrong with it is said at the start."""
        if self._job.source is None:
            return ()
        context = SourceContext(api, bucket, stream.name, self._job.template)
        partitions = await SourceReader(self._job.source, context).read()
        stored = stream.stored_subjects
        for partition in partitions:
            if not within(partition.subject, stored):
                raise SubjectMismatch(
                    f"subject {partition.subject!r} is outside stream {stream.name!r}, which takes "
                    f"{', '.join(stored) or 'nothing'}; correct the template or the stream"
                )
        return partitions

    async def _go_alone(self, ports: ReaderPorts, bucket: Bucket, partitions: Sequence[PartitionLike]) -> None:
        await _check_alone(ports, bucket)
        worker_id = self.settings.worker_id or SOLO_ID
        self.on_worker_id(worker_id)
        self.metrics.worker_id = worker_id
        settings = self.settings.model_copy(update={"worker_id": worker_id})
        every = self._job.source is None
        if every:
            partitions = [self._job.template.partition(dict.fromkeys(self._job.template.keys, "*"))]
        self._solo = Reader(ports, settings, bucket, each_subject=every, pointers=bucket)
        await self._solo.start(partitions)
        refusals = ports.metrics.refusals
        keeper = MirrorKeeper(
            ports.api, bucket, settings, ports.stream.name, _only(worker_id), refusals, alone=worker_id
        )
        self._life.run(keeper.run, "mirror-keeping")

    async def _join(self, ports: ReaderPorts, service: str) -> None:
        job = self._job
        assert job.source
        reading = self._fleet = FleetReading(
            ports,
            self.settings,
            lambda: granted_by(manager),
            self.on_worker_id,
            lambda reason: manager.step_down(reason),  # noqa: PLW0108 - it is made below
        )
        self._life.hold(reading.close)
        parts = FleetParts(
            ports.connection,
            ports.api,
            self.settings,
            job.stream,
            retention_named(ports.stream.retention),
            job.template,
            job.source,
            job.strategy,
            job.weights,
            self.metrics,
            self.health,
        )
        standby = reading if self.settings.standby else None
        self.manager = manager = Manager(parts, reading, self._hooks, service=service, standby=standby)
        await manager.start()

    def announce(self) -> None:
        """Say in one log line what this worker does."""
        _log.info(
            "worker started",
            worker=self.worker_id,
            nats=self.settings.connection_summary,
            stream=self._job.stream,
            fleet=self.settings.fleet,
            ordered=self.settings.ordered,
            metrics_port=self.metrics_port,
        )

    @property
    def worker_id(self) -> str:
        """The id that this worker has now."""
        return self.metrics.worker_id

    @property
    def state(self) -> FleetState:
        """What this worker is doing."""
        return self.manager.state if self.manager else FleetState.STABLE if self._solo else FleetState.INIT

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """What this worker owns now, as a member of the fleet."""
        return self.manager.partitions if self.manager else ()

    async def wait_assigned(self) -> None:
        """Return once the worker has been told what it owns, be it nothing."""
        if self.manager:
            await self.manager.wait_assigned()

    async def update_worker_consumer(self, worker_id: str, partitions: Iterable[PartitionLike]) -> None:
        """Make a worker that is on its own read exactly these partitions."""
        if self._solo is None:
            raise ConfigError(
                "only a worker with fleet=false is told what to read; in a fleet the rebalancer decides"
            )
        if worker_id != self.worker_id:
            raise ConfigError(f"this consumer belongs to worker {self.worker_id!r}, not to {worker_id!r}")
        await self._solo.update(partitions)

    async def stop(self, *, drain: bool = True) -> bool:
        """Leave: stop pulling, let running handlers finish, store the positions; True when all of it worked.

        What was received and not started is left to the next owner. With `drain=False`, or after
        `drain_timeout_s`, running handlers are cancelled and their messages will be delivered again.
        """
        return await self._life.end(lambda: self._leave(drain))

    async def _leave(self, drain: bool) -> bool:
        clean = True
        if self._watchdog:
            self._watchdog.stop()
        if self.manager:
            await self.manager.drain()
        if self._reader:
            clean = await self._reader.stop(drain=drain)
        if self.manager:
            clean = await self.manager.stop() and clean
        return clean

    async def vanish(self) -> None:
        """End as a killed process does: nothing more is said to the server, and the fleet has to notice by itself.

        For `parti.testing`; no part of the public API.
        """
        if self._connection:
            await self._connection.close()
        await self.stop(drain=False)

    @property
    def _reader(self) -> Reader | None:
        return self._fleet.reader if self._fleet else self._solo

    def _describe(self) -> dict[str, str]:
        return {
            "worker": self.worker_id,
            "prefix": self.settings.prefix,
            "stream": self._job.stream,
        }

    def _statistics(self) -> ServiceStats:
        report = self._reader.report() if self._reader else {}
        return ServiceStats(
            finished=self.finished,
            errors=report.get("failures", 0),
            last_error=next(iter(self.health.reasons.values()), ""),
            processing_time_s=self.metrics.handler_latency.sum,
            data={"worker": self.worker_id, "state": self.state.value, "partitions": len(self.partitions), **report},
        )

    @property
    def metrics_port(self) -> int | None:
        """Port that serves `/metrics` and `/healthz`, or None."""
        return self._vitals.port

    @property
    def finished(self) -> int:
        """Messages handled or dead-lettered since the start."""
        before = self._fleet.finished_before if self._fleet else 0
        return before + (self._reader.finished if self._reader else 0)


def _only(worker_id: str) -> Callable[[], Awaitable[Sequence[str]]]:
    """A fleet of one."""

    async def workers() -> Sequence[str]:
        return (worker_id,)

    return workers


async def _check_alone(ports: ReaderPorts, bucket: Bucket) -> None:
    """Refuse to work alone beside a running fleet: both would handle everything."""
    entries = await read_keys(ports.connection, ports.api, bucket.name, ("ids.>",))
    members = sorted(Records.of(entries).members)
    if members:
        raise ConfigError(
            f"a fleet runs on bucket {bucket.name!r} ({', '.join(members[:5])}), and working alone beside it would "
            f"handle its messages twice; join it by leaving out --solo (fleet=false), or use another bucket"
        )


def _check_retention(job: Job, settings: Settings, stream: StreamInfo) -> None:
    """Refuse streams that cannot be served without losing messages."""
    if settings.fleet and stream.retention == INTEREST.name and not settings.ordered:
        raise ConfigError(
            f"stream {stream.name!r} has interest retention, where a partition can only move if its messages are "
            f"handled in order; set ordered=true, or start a single worker with --solo (fleet=false)"
        )
    if settings.fleet and stream.retention == INTEREST.name and isinstance(job.source, Discovered):
        raise ConfigError(
            f"stream {stream.name!r} has interest retention: the server drops messages on subjects that nobody reads "
            f"yet, so partitions cannot be discovered; list them"
        )


def _check_mirror(job: Job, settings: Settings, stream: StreamInfo) -> None:
    """Refuse a hot mirror where it would be wrong."""
    one_filter = not settings.fleet and job.source is None
    refused = why_not(stream.retention, stream.storage, ordered=settings.ordered, one_filter=one_filter)
    if settings.hot_mirror == ON and refused:
        raise ConfigError(f"hot_mirror=on is not possible for stream {stream.name!r}: {refused}; set hot_mirror=auto")


def _check_stateful(job: Job, settings: Settings, stream: StreamInfo) -> None:
    """Refuse to keep state where a crash could not be made good by handling messages again."""
    if stream.retention != LIMITS.name:
        raise ConfigError(
            f"stream {stream.name!r} has {stream.retention} retention, where handled messages are gone and a state "
            f"cannot be brought up to date after a crash; use limits retention, or a handler without state"
        )
    if not settings.ordered:
        raise ConfigError("a handler with state needs ordered=true: a state has one position")
    if not settings.fleet and job.source is None:
        raise ConfigError(
            "a handler with state needs a list of partitions, or a fleet: each is restored before it begins"
        )


def check_version(connection: Connection) -> None:
    """Refuse a server that lacks what parti needs."""
    if connection.server_version < MIN_SERVER_VERSION:
        found = ".".join(map(str, connection.server_version))
        need = ".".join(map(str, MIN_SERVER_VERSION))
        raise ServerTooOld(f"the server is nats-server {found}, but parti needs {need} or newer; upgrade the server")


async def find_stream(api: JetStreamApi, name: str) -> StreamInfo:
    """The stream; raises `StreamNotFound` with the names of those that there are."""
    try:
        return await api.stream_info(name)
    except NotFound:
        names = await api.stream_names()
        known = f"streams here: {', '.join(names[:10])}" if names else "there is no stream at all"
        raise StreamNotFound(f"stream {name!r} does not exist; {known}; create it or correct the name") from None


def check_template(job: Job, stream: StreamInfo) -> None:
    """Refuse a template whose subjects the stream does not take."""
    template, stored = job.template, stream.stored_subjects
    partly = any(overlap(template.pattern, s) for s in stored)
    listed = job.source is not None and not isinstance(job.source, Discovered)
    if within(template.pattern, stored) or (partly and listed):
        return  # listed partitions are checked one by one
    takes = ", ".join(stored) or "nothing"
    if partly:
        what = f"template {template.text!r} is only partly inside stream {stream.name!r}, which takes {takes}"
    else:
        what = f"template {template.text!r} is outside stream {stream.name!r}, which takes {takes}"
    raise SubjectMismatch(f"{what}; correct the template or the stream's subjects")
