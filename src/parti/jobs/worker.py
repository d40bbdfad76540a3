"""A running job worker: everything between the settings and the handler, put together and taken apart in order."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import uuid
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import structlog

from parti.config import Settings
from parti.core.consumer_config import (
    FLEET,
    ConsumerTuning,
    build_config,
    fleet_metadata,
    fleet_of,
    is_foreign,
)
from parti.core.job_claims import Claimant
from parti.core.priority import check_update, with_group
from parti.core.retry import RetryPolicy, describe
from parti.core.stall import Look, Stall, StallKind
from parti.errors import ApiError, ConfigError, ForeignConsumer, NotFound, PartiError, SubjectMismatch
from parti.jetstream.api import JetStreamApi, StreamInfo
from parti.jetstream.connection import Connection
from parti.jetstream.dead_letters import DeadLetterStream
from parti.jetstream.kv import Bucket, Entry
from parti.jetstream.lifecycle import Lifecycle
from parti.jetstream.priority import put_consumer
from parti.jetstream.vitals import Vitals
from parti.jetstream.watch import Watch
from parti.jetstream.wire import Wire
from parti.jobs.board import JobBoard
from parti.jobs.calls import Calls, JobHandler
from parti.jobs.hand import Hand, HandPorts
from parti.jobs.pulling import JobPull
from parti.jobs.scheduler import WeightedScheduler
from parti.jobs.settings import JobSettings
from parti.model.job import BUCKET_SUFFIX, cancel_key, parse_key
from parti.model.subjects import within
from parti.telemetry.tasks import owned
from parti.telemetry.tracing import traced
from parti.telemetry.watchdog import Watchdog, Watched

_log = structlog.get_logger("parti.jobs")

Lifespan: TypeAlias = Callable[["JobWorker"], AbstractAsyncContextManager[object]]

_MAX_WAITING = 512
_NAME_IN_USE = 10058


@dataclass(frozen=True, slots=True)
class JobSource:
    """Where jobs come from and what does them."""

    stream: str
    subject: str
    handler: JobHandler
    lifespan: Lifespan | None = None
    """What the handler needs for as long as a worker runs."""


def durable_name(settings: Settings, jobs: JobSettings) -> str:
    """Name of the consumer that the workers share."""
    return jobs.durable or f"{settings.prefix}{BUCKET_SUFFIX}"


def bucket_name(settings: Settings) -> str:
    """Bucket of the records of all jobs of one deployment."""
    return f"{settings.prefix}{BUCKET_SUFFIX}"


class JobWorker:
    """One worker, from `start` to `stop`.

    `start` raises a `PartiError` that says what is wrong when the worker cannot do its job; nothing is left behind
    then. `stop` drains: pulling ends, what has not begun is given back, running jobs finish.
    """

    def __init__(
        self, settings: Settings, jobs: JobSettings, source: JobSource, scheduler: WeightedScheduler | None = None
    ) -> None:
        self.settings = settings
        self.jobs = jobs
        self.durable = durable_name(settings, jobs)
        self.worker_id = settings.worker_id or _own_name()
        self._vitals = Vitals(self.worker_id)
        self._life = Lifecycle(self._vitals)
        self.metrics = self._vitals.metrics
        self.health = self._vitals.health
        self.scheduler = scheduler or WeightedScheduler(
            jobs.max_capacity, look_ahead=jobs.fairness, metrics=self.metrics
        )
        self.on_worker_id: Callable[[str], None] = lambda worker_id: None
        """Called with the id of this worker when it starts."""
        self.on_stalled: Callable[[str], None] | None = None
        """Called, in a thread, when this worker stands still and a restart has not helped; None: it stops."""
        self._leaving: set[asyncio.Task[bool]] = set()
        self._source = source
        self._incarnation = uuid.uuid4().hex[:12]
        self._connection: Connection | None = None
        self._hand: Hand | None = None
        self._pull: JobPull | None = None
        self._resources = AsyncExitStack()
        self._created = ""

    @property
    def finished(self) -> int:
        """Jobs done, failed or cancelled since the start."""
        return self._hand.finished if self._hand else 0

    @property
    def held(self) -> int:
        """Jobs in hand."""
        return self._hand.count if self._hand else 0

    @property
    def metrics_port(self) -> int | None:
        """Port that serves `/metrics` and `/healthz`, or None."""
        return self._vitals.port

    async def start(self) -> None:
        """Connect, make sure of stream, consumer and records, and begin to pull."""
        await self._life.begin(self._start)

    async def _start(self) -> None:
        settings, jobs, source = self.settings, self.jobs, self._source
        handler = source.handler
        if settings.tracing:
            handler = traced(handler, lambda job: job.message, lambda job: job.attempt)
        self.on_worker_id(self.worker_id)
        name = f"{self.durable}-{self.worker_id}"
        connection = self._connection = await self._life.connect(settings, name=name)
        api = JetStreamApi(connection)
        await api.account_info()
        stream = await self._ensure_stream(api)
        self._created = stream.created
        bucket = await Bucket.open(api, bucket_name(settings), replicas=settings.replicas)
        dead_letters = await DeadLetterStream.open(
            api,
            self.health,
            settings,
            max_payload=connection.max_payload,
            omit_large=stream.retention == "limits",
        )
        await self._ensure_consumer(api)
        self._vitals.serve(settings)
        wire = Wire(connection.client, plain=settings.protocol_reader == "plain")
        claimant = Claimant(self._incarnation, jobs.ack_wait_s, jobs.job_crash_limit)
        board = JobBoard(
            connection,
            api,
            bucket,
            self.metrics,
            self.health,
            durable=self.durable,
            claimant=claimant,
            replicas=settings.replicas,
            keep_s=jobs.keep_s,
            report_interval_s=jobs.report_interval_s,
        )
        resources = await self._enter_lifespan()
        calls = Calls(handler, threads=jobs.max_capacity, timeout_s=settings.handler_timeout_s)
        self._life.call(calls.stop)
        ports = HandPorts(
            connection, wire, board, calls, self.scheduler, dead_letters, self.metrics, resources, self.health
        )
        hand = self._hand = Hand(
            ports,
            stream=source.stream,
            durable=self.durable,
            worker_id=self.worker_id,
            policy=RetryPolicy(settings.attempts, settings.backoff_s),
            heartbeat_s=jobs.heartbeat_interval_s,
        )
        connection.on_state(lambda state, reason: hand.reconnected(state))
        watch = Watch(
            connection,
            api,
            bucket.name,
            (cancel_key(self.durable, 0)[:-1] + "*",),
            self._on_cancel,
            health=self.health,
        )
        self._life.hold(watch.stop)
        await watch.start()
        self._pull = JobPull(
            connection,
            wire,
            self.metrics,
            self.health,
            stream=source.stream,
            consumer=self.durable,
            batch=jobs.fetch_batch_size,
            limit=jobs.max_capacity,
            timeout_s=jobs.fetch_timeout_s,
            options=jobs.pull_options,
            held=lambda: hand.count,
            deliver=hand.deliver,
            prepare=lambda: self._ensure(api),
        )
        self._life.hold(self._pull.stop)
        self._life.run(hand.beat, "job-heartbeats")
        hand.on_room = self._pull.room_changed
        hand.on_unheard = partial(self._pull.doubt, "an answer was not confirmed")
        self._pull.start()
        self._watch(self._pull, hand)

    def _watch(self, pull: JobPull, hand: Hand) -> None:
        """Have this worker watched: that its event loop turns, pulls are answered, and jobs that it has can start."""
        loop = asyncio.get_running_loop()

        def look() -> Look:
            signs = {(StallKind.PULLS, self.durable): pull.sign, (StallKind.HANDLERS, self.durable): hand.sign}
            return {due: sign for due, sign in signs.items() if sign is not None}

        def restart(stall: Stall) -> None:
            # While jobs wait to start, a new pull would only lose what is on its way on the old one.
            if stall.kind is StallKind.PULLS:
                pull.revive()

        def leave(stall: Stall, reason: str) -> None:
            if self.on_stalled:
                self.on_stalled(reason)
            else:
                loop.call_soon_threadsafe(self._give_up)

        watched = Watched(
            look=look,
            story=lambda: {"in_hand": self.held, "credit": pull.credit, "signals": dict(self.health.reasons)},
            restart=restart,
            leave=leave,
            source="consumer",
        )
        watchdog = Watchdog(
            watched,
            self.metrics,
            self.health,
            stall_after_s=max(self.settings.stall_after_s, 2 * self.jobs.fetch_timeout_s),
            grace_s=self.settings.stall_after_s,
        )
        watchdog.start()
        self._life.call(watchdog.stop)

    def _give_up(self) -> None:
        """Leave, so that others take over: this worker stands still."""
        owned(self.stop(drain=False), "leave", self.health, keep=self._leaving)

    async def _enter_lifespan(self) -> object:
        if self._source.lifespan is None:
            return None
        self._life.hold(self._leave_lifespan)
        try:
            return await self._resources.enter_async_context(self._source.lifespan(self))
        except PartiError:
            raise
        except Exception as error:
            raise ConfigError(f"the app's lifespan could not be entered: {describe(error)}") from error

    async def _leave_lifespan(self) -> None:
        try:
            await self._resources.aclose()
        except Exception:
            _log.exception("the app's lifespan did not end well")

    def announce(self) -> None:
        """Say in one log line what this worker does."""
        _log.info(
            "job worker started",
            worker=self.worker_id,
            stream=self._source.stream,
            subject=self._source.subject,
            consumer=self.durable,
            max_capacity=self.jobs.max_capacity,
            max_ack_pending=self.jobs.max_ack_pending,
            ack_wait_s=self.jobs.ack_wait_s,
            heartbeat_interval_s=self.jobs.heartbeat_interval_s,
            fetch_batch_size=self.jobs.fetch_batch_size,
            metrics_port=self.metrics_port,
        )

    # ── stream and consumer ───────────────────────────────────────────────────────────────────────────────────

    async def _ensure(self, api: JetStreamApi) -> None:
        created = (await self._ensure_stream(api)).created
        if self._hand and created != self._created:
            self._hand.stream_replaced()
        self._created = created
        await self._ensure_consumer(api)

    async def _ensure_stream(self, api: JetStreamApi) -> StreamInfo:
        source = self._source
        config = {
            "name": source.stream,
            "subjects": [source.subject],
            "retention": self.jobs.retention,
            "storage": "file",
            "num_replicas": self.settings.replicas,
            "allow_direct": True,
        }
        try:
            info = await api.ensure_stream(config)
        except ApiError as error:
            if error.code != _NAME_IN_USE:
                raise
            info = await api.stream_info(source.stream)  # another worker was faster
        if not within(source.subject, info.stored_subjects):
            takes = ", ".join(info.stored_subjects) or "nothing"
            raise SubjectMismatch(
                f"subject {source.subject!r} is outside stream {source.stream!r}, which takes {takes}; correct the "
                f"subject, or add it to the stream"
            )
        return info

    async def _ensure_consumer(self, api: JetStreamApi) -> None:
        """The consumer with these settings; one that reads something else is not touched."""
        assert self._connection
        stream, subject, name = self._source.stream, self._source.subject, self.durable
        tuning = ConsumerTuning(self.jobs.ack_wait_s, self.jobs.max_ack_pending, _MAX_WAITING, 0.0)
        mark = fleet_metadata(self.settings.prefix, bucket_name(self.settings))
        try:
            found = await api.consumer_info(stream, name)
        except NotFound:
            made = build_config(name, [subject], tuning, group=self.jobs.group, metadata=mark)
            await put_consumer(self._connection, stream, made, action="create")
            _log.info(
                f"consumer {name!r} made with max_ack_pending={self.jobs.max_ack_pending}",
                stream=stream,
                subject=subject,
            )
            return
        if is_foreign(found.config, mark[FLEET]):
            raise ForeignConsumer(
                f"consumer {name!r} of stream {stream!r} belongs to jobs whose records are in bucket "
                f"{fleet_of(found.config)!r}, and those of these are in {mark[FLEET]!r}: they would take each "
                f"other's messages; give these jobs another durable, or the same prefix as the others (PARTI_PREFIX)"
            )
        if found.subjects != (subject,):
            reads = ", ".join(found.subjects) or "everything"
            raise ConfigError(
                f"consumer {name!r} of stream {stream!r} reads {reads}, not {subject!r}; give these jobs another "
                f"durable, or delete that consumer"
            )
        if found.config.get("deliver_subject") or found.config.get("ack_policy") != "explicit":
            raise ConfigError(
                f"consumer {name!r} of stream {stream!r} is no pull consumer with explicit acknowledgements; give "
                f"these jobs another durable, or delete that consumer"
            )
        check_update(found.config, with_group(found.config, self.jobs.group))
        wanted = build_config(name, [subject], tuning, existing=found.config, metadata=mark)
        same = ("ack_wait", "max_ack_pending", "max_deliver", "inactive_threshold")
        if not fleet_of(found.config) or any(found.config.get(field, 0) != wanted[field] for field in same):
            await put_consumer(self._connection, stream, wanted, action="update")
            _log.info(f"consumer {name!r} changed to max_ack_pending={self.jobs.max_ack_pending}", stream=stream)

    # ── what happens to it ────────────────────────────────────────────────────────────────────────────────────

    def _on_cancel(self, key: str, entry: Entry) -> None:
        # One that was meant for the job of a stream that was made anew since is of no meaning.
        if self._hand and entry.value == self._created.encode():
            self._hand.cancel(parse_key(key)[1])

    async def stop(self, *, drain: bool = True) -> bool:
        """Leave; True when nothing was interrupted that ran.

        What has not had any slots is given back at once, what runs may finish within `drain_timeout_s`; then it is
        interrupted, given back, and will be delivered again.
        """
        return await self._life.end(lambda: self._leave(self.settings.drain_timeout_s if drain else 0.0))

    async def _leave(self, drain_s: float) -> bool:
        if not (self._hand and self._pull):
            return True
        self._hand.leave()
        await self._pull.stop()
        clean = await self._hand.drain(drain_s)
        await self._hand.stop()
        return clean


def _own_name() -> str:
    host = re.sub(r"[^A-Za-z0-9_-]+", "-", socket.gethostname())[:40].strip("-") or "worker"
    return f"{host}-{os.getpid()}"
