"""A running worker: everything between the settings and the handler, put together and taken apart in order."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import structlog

from parti.config import Settings
from parti.core.retry import RetryPolicy
from parti.errors import NotFound, PartiError, ServerTooOld, StreamNotFound, SubjectMismatch
from parti.jetstream.api import JetStreamApi, StreamInfo
from parti.jetstream.connection import Connection, ConnectionState
from parti.jetstream.kv import Bucket
from parti.jetstream.wire import Wire
from parti.model.partition import PartitionLike, Template
from parti.model.subjects import overlap, within
from parti.telemetry.health import Health
from parti.telemetry.http import MetricsServer
from parti.telemetry.metrics import Metrics
from parti.telemetry.tasks import watched
from parti.worker.acks import AckWriter
from parti.worker.consumer import ConsumerPorts, WorkerConsumer
from parti.worker.deadletters import DeadLetterStream
from parti.worker.lanes import Lanes
from parti.worker.parking import Parking
from parti.worker.progress import ProgressKeeper
from parti.worker.runners import Handler, Runners, make_runners
from parti.worker.unordered import UnorderedLanes

_log = structlog.get_logger("parti.worker")

MIN_SERVER_VERSION = (2, 14, 0)
"""The first version with the consumer RESET that positions rest on."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker is to do: which partitions of which stream, and with what handler."""

    stream: str
    template: Template
    partitions: tuple[PartitionLike, ...] | None
    """None: every subject that fits the template is a partition."""
    handler: Handler


class Worker:
    """One worker process' reading side, from `start` to `stop`.

    `start` raises a `PartiError` that says what is wrong when the worker cannot do its job; nothing is left
    behind then. `stop` drains: pulling ends, running handlers finish, positions are stored.
    """

    def __init__(self, settings: Settings, job: Job) -> None:
        self.settings = settings
        self.metrics = Metrics(settings.worker_id, per_partition=settings.metrics_per_partition)
        self.health = Health()
        self._job = job
        self._connection: Connection | None = None
        self._server: MetricsServer | None = None
        self._runners: Runners | None = None
        self._consumer: WorkerConsumer | None = None
        self._progress: ProgressKeeper | None = None
        self._lanes: Lanes | None = None
        self._acks: AckWriter | None = None
        self._upkeep: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Connect, check everything, take up the partitions and begin."""
        try:
            await self._start()
        except BaseException:
            if self._consumer:
                await self._consumer.stop()
            if self._runners:
                await self._runners.stop()
            await self._close()
            raise

    async def _start(self) -> None:
        settings, job = self.settings, self._job
        connection = await Connection.open(settings, name=f"{settings.prefix}-{settings.worker_id}")
        self._connection = connection
        connection.on_state(self._on_state)
        connection.on_permission_denied(lambda denied: self.health.raise_signal("permissions", str(denied)))
        self.metrics.connection_state.set(connection.state.value)
        _check_version(connection)
        api = JetStreamApi(connection)
        await api.account_info()
        stream = await _find_stream(api, job.stream)
        _check_template(job, stream)
        bucket = await Bucket.open(api, settings.bucket, replicas=settings.replicas)
        dead_letters = await DeadLetterStream.open(
            api,
            self.health,
            stream=settings.dead_letter_stream,
            subject=settings.dead_letter_subject,
            replicas=settings.replicas,
            max_payload=connection.max_payload,
            omit_large=stream.retention == "limits",
        )
        wire = Wire(connection.client)
        self._acks = acks = AckWriter(wire, self.metrics, self._refill)
        self._lanes = lanes = (Lanes if settings.ordered else UnorderedLanes)(
            template=job.template,
            stream=job.stream,
            worker_id=settings.worker_id,
            policy=RetryPolicy(settings.attempts, settings.backoff_s),
            acks=acks,
            dead_letters=dead_letters,
            metrics=self.metrics,
            each_subject=job.partitions is None,
        )
        self._runners = make_runners(
            lanes, job.handler, timeout_s=settings.handler_timeout_s, threads=settings.handler_threads
        )
        wire.on_chunk(self._runners.kick)
        self._progress = ProgressKeeper(bucket, settings.worker_id, self.metrics, self.health)
        ports = ConsumerPorts(api, connection, wire, lanes, self.metrics, self.health)
        progress = await self._progress.load(stream)
        self._consumer = WorkerConsumer(
            ports, settings, job.template, stream, progress, each_subject=job.partitions is None
        )
        if settings.metrics_port is not None:
            self._server = MetricsServer(self.metrics, self.health, settings.metrics_host, settings.metrics_port)
            self._server.start()
        self._connect_probes()
        if settings.ordered and stream.retention == "limits":
            limit = int(settings.backpressure * settings.max_ack_pending)
            parking = Parking(lanes, api, self._store_progress, self.metrics, stream=job.stream, limit=limit)
            self._upkeep.append(watched(parking.run(), "parking", self.health))
        await self._consumer.start(self._all_partitions())
        self._upkeep += [
            watched(self._keep_alive(), "keep-alive", self.health),
            watched(self._keep_progress(), "progress", self.health),
        ]

    def announce(self) -> None:
        """Say in one log line what this worker does."""
        assert self._consumer
        _log.info(
            "worker started",
            worker=self.settings.worker_id,
            nats=self.settings.connection_summary,
            stream=self._job.stream,
            consumer=self._consumer.name,
            subjects=len(self._consumer.subjects),
            ordered=self.settings.ordered,
            metrics_port=self.metrics_port,
        )

    def _all_partitions(self) -> Sequence[PartitionLike]:
        if self._job.partitions is not None:
            return self._job.partitions
        return [self._job.template.partition(dict.fromkeys(self._job.template.keys, "*"))]

    async def update_worker_consumer(self, worker_id: str, partitions: Iterable[PartitionLike]) -> None:
        """Make this worker read exactly these partitions; see `WorkerConsumer.update_worker_consumer`."""
        assert self._consumer, "the worker has not been started"
        await self._consumer.update_worker_consumer(worker_id, partitions)

    async def stop(self, *, drain: bool = True) -> bool:
        """Leave: stop pulling, let running handlers finish, store the positions; True when all of it worked.

        What was received and not started is left to the next owner. With `drain=False`, or after
        `drain_timeout_s`, running handlers are cancelled and their messages will be delivered again.
        """
        clean = True
        if self._consumer:
            await self._consumer.stop()
        if self._runners and self._lanes:
            if drain:
                clean = await self._runners.drain(self.settings.drain_timeout_s)
                await self._settle_dead_letters()
            await self._runners.stop()
        if not clean:
            _log.error("handlers still ran at the end; their messages will be delivered again")
        for task in self._upkeep:
            task.cancel()
        await asyncio.gather(*self._upkeep, return_exceptions=True)
        if self._consumer and self._progress and self._acks:
            self._acks.flush()
            clean = await self._store_progress() and clean
        await self._close()
        return clean

    async def _settle_dead_letters(self) -> None:
        assert self._lanes
        try:
            async with asyncio.timeout(self.settings.drain_timeout_s):
                await self._lanes.settle_dead_letters()
        except TimeoutError:
            self._lanes.cancel_dead_letters()

    async def _close(self) -> None:
        for task in self._upkeep:
            task.cancel()
        if self._server:
            self._server.stop()
        if self._connection:
            await self._connection.close()

    # ── upkeep ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _keep_alive(self) -> None:
        assert self._lanes
        interval_s = self.settings.ack_wait_s / 3
        while True:
            await asyncio.sleep(interval_s)
            self._lanes.keep_alive(interval_s)

    async def _keep_progress(self) -> None:
        assert self._lanes
        while True:
            await asyncio.sleep(self.settings.progress_interval_s)
            self._lanes.catch_up()
            self._lanes.evict()
            await self._store_progress()

    async def _store_progress(self) -> bool:
        assert self._progress
        assert self._consumer
        try:
            return await self._progress.save(self._consumer.summarise)
        except PartiError as error:
            _log.error("positions not stored", error=str(error))
            return False

    def _refill(self) -> None:
        if self._consumer:
            self._consumer.engine.refill()

    def _on_state(self, state: ConnectionState, reason: str) -> None:
        self.metrics.connection_state.set(state.value)
        if state is ConnectionState.CONNECTED:
            self.metrics.reconnects.inc()
            self.health.clear("connection")
        else:
            self.health.raise_signal("connection", f"{state.value}: {reason}")

    def _connect_probes(self) -> None:
        lanes, consumer, probe = self._lanes, self._consumer, self.metrics.set_probe
        assert lanes
        assert consumer
        engine = consumer.engine
        probe("parti_consumer_inflight", lambda: lanes.held)
        probe("parti_lane_depth", lambda: max(0, lanes.held - lanes.running))
        probe("parti_lane_count", lambda: lanes.count)
        probe("parti_handler_running", lambda: lanes.running)
        probe("parti_pull_healthy", lambda: float(engine.healthy))
        probe("parti_pull_batch_size", lambda: engine.batch)
        probe("parti_pull_credit", lambda: engine.credit)

    @property
    def metrics_port(self) -> int | None:
        """Port that serves `/metrics` and `/healthz`, or None."""
        return self._server.port if self._server else None

    @property
    def finished(self) -> int:
        """Messages handled or dead-lettered since the start."""
        return self._lanes.finished if self._lanes else 0


def _check_version(connection: Connection) -> None:
    if connection.server_version < MIN_SERVER_VERSION:
        found = ".".join(map(str, connection.server_version))
        need = ".".join(map(str, MIN_SERVER_VERSION))
        raise ServerTooOld(f"the server is nats-server {found}, but parti needs {need} or newer; upgrade the server")


async def _find_stream(api: JetStreamApi, name: str) -> StreamInfo:
    try:
        return await api.stream_info(name)
    except NotFound:
        names = await api.stream_names()
        known = f"streams here: {', '.join(names[:10])}" if names else "there is no stream at all"
        raise StreamNotFound(f"stream {name!r} does not exist; {known}; create it or correct the name") from None


def _check_template(job: Job, stream: StreamInfo) -> None:
    template = job.template
    partly = any(overlap(template.pattern, s) for s in stream.subjects)
    if within(template.pattern, stream.subjects) or (partly and job.partitions is not None):
        return  # listed partitions are checked one by one
    takes = ", ".join(stream.subjects) or "nothing"
    if partly:
        what = f"template {template.text!r} is only partly inside stream {stream.name!r}, which takes {takes}"
    else:
        what = f"template {template.text!r} is outside stream {stream.name!r}, which takes {takes}"
    raise SubjectMismatch(f"{what}; correct the template or the stream's subjects")
