"""The one durable pull consumer of a worker, and the subjects it carries.

There is a single way to (re)gain a partition, used at start, after an update, after a reconnect and when somebody
deleted the consumer: with no pull standing, RESET the consumer to the lowest position that is not finished, give it
its filter, and pull. RESET comes first, so that a crash in between leaves a consumer that starts too early (its
messages are recognised as finished) and never one that starts too late.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from parti.config import Settings
from parti.core.consumer_config import ConsumerTuning, build_config, consumer_name
from parti.core.filters import FilterDiff, FilterSet, build_filters, diff_filters
from parti.core.progress import Progress, summarise
from parti.errors import ConfigError, NotFound, PartiError, SubjectMismatch
from parti.jetstream.api import ConsumerInfo, JetStreamApi, StreamInfo
from parti.jetstream.connection import Connection
from parti.jetstream.pull import PullEngine, PullTuning
from parti.jetstream.wire import Wire
from parti.model.partition import Partition, PartitionLike, Template
from parti.model.subjects import within
from parti.telemetry.health import Health
from parti.telemetry.metrics import Metrics
from parti.worker.lanes import Lanes

_log = structlog.get_logger("parti.consumer")

_RETRY_MIN_S, _RETRY_MAX_S = 0.1, 2.0
_SIGNAL = "consumer-update"
_PROBES_AT_ONCE = 32
_NOTHING = FilterSet({}, 0)


@dataclass(frozen=True, slots=True)
class ConsumerPorts:
    """What the consumer works with."""

    api: JetStreamApi
    connection: Connection
    wire: Wire
    lanes: Lanes
    metrics: Metrics
    health: Health


class WorkerConsumer:
    """Owns the consumer `<prefix>-<workerID>` and the pull engine on it.

    `update_worker_consumer` may be called at any time and as often as one likes: calls are coalesced, the newest
    set wins, and a failure leaves the last good set active.
    """

    def __init__(
        self,
        ports: ConsumerPorts,
        settings: Settings,
        template: Template,
        stream: StreamInfo,
        progress: Progress,
        *,
        each_subject: bool = False,
    ) -> None:
        assert settings.worker_id
        self._each_subject = each_subject
        self._ports = ports
        self._settings = settings
        self._template = template
        self._stream = stream
        self._baseline = progress
        self._name = consumer_name(settings.prefix, settings.worker_id)
        self._applied = _NOTHING
        self._wanted = _NOTHING
        self._wanted_version = 0
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._updater: asyncio.Task[None] | None = None
        self._last_update_s = float("-inf")
        self._failures = 0
        self._existed = False
        self._starts: dict[str, int] = {}
        self._granted: Mapping[str, int] | None = None
        self._granted_in = ""
        self._lock = asyncio.Lock()
        self.engine = PullEngine(
            ports.connection,
            ports.wire,
            ports.lanes,
            _pull_tuning(settings),
            ports.metrics,
            ports.health,
            stream=stream.name,
            consumer=self._name,
            prepare=self._prepare,
        )

    @property
    def name(self) -> str:
        """Name and durable name of the consumer."""
        return self._name

    @property
    def stream_created(self) -> str:
        """When the stream was made that is being read."""
        return self._stream.created

    @property
    def subjects(self) -> tuple[str, ...]:
        """The subjects that the consumer carries now."""
        return self._applied.subjects

    def grant(self, positions: Mapping[str, int], stream_created: str) -> None:
        """Say where partitions begin that others have had: positions by id, in the stream made at that time."""
        self._granted, self._granted_in = dict(positions), stream_created

    async def start(self, partitions: Iterable[PartitionLike]) -> None:
        """Create or take up the consumer with these partitions and begin to pull."""
        filters = self._build(partitions)
        self._applied = self._wanted = filters
        self._own(filters)
        await self._take_up(filters)
        await self.engine.start()
        self._applied_ok(filters, diff_filters((), filters.subjects))

    async def stop(self) -> None:
        """Stop pulling; the consumer stays on the server, where the next start finds it."""
        if self._updater:
            self._updater.cancel()
            await asyncio.gather(self._updater, return_exceptions=True)
        await self.engine.stop()

    def summarise(self, writer: str) -> Progress:
        """The positions as of now."""
        lanes = self._ports.lanes
        return summarise(
            stream=self._stream.name,
            stream_created=self._stream.created,
            floor=lanes.floor,
            covered=self._applied.subjects,
            # Partitions without a lane have not moved since the record was read.
            positions=(self._baseline.ahead | dict(lanes.positions())).items(),
            behind=lanes.behind(),
            writer=writer,
        )

    # ── updates ───────────────────────────────────────────────────────────────────────────────────────────────

    async def update_worker_consumer(self, worker_id: str, partitions: Iterable[PartitionLike]) -> None:
        """Make the consumer carry exactly these partitions.

        Returns when they, or a newer set, are in force. Raises `ConfigError` (too many subjects, overlap, outside
        the stream) before anything changes, or the last error when the server refused all attempts; the previous
        set stays active then.
        """
        if worker_id != self._settings.worker_id:
            raise ConfigError(f"this consumer belongs to worker {self._settings.worker_id!r}, not to {worker_id!r}")
        filters = self._build(partitions)
        if self._updater is None and diff_filters(self._applied.subjects, filters.subjects).empty:
            self._ports.metrics.update_skipped.inc()
            return
        self._wanted = filters
        self._wanted_version += 1
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((self._wanted_version, done))
        if self._updater is None:
            self._updater = asyncio.create_task(self._update())
        await done

    def _build(self, partitions: Iterable[PartitionLike]) -> FilterSet:
        filters = build_filters(self._template.partitions(partitions), max_subjects=self._settings.max_subjects)
        for subject in filters.partitions:
            if not within(subject, self._stream.stored_subjects):
                raise SubjectMismatch(
                    f"subject {subject!r} is outside stream {self._stream.name!r}, which takes "
                    f"{', '.join(self._stream.stored_subjects) or 'nothing'}; correct the template or the stream"
                )
        if filters.duplicates:
            self._ports.metrics.duplicate_subjects.inc(filters.duplicates)
            _log.warning("partitions were named more than once", duplicates=filters.duplicates)
        return filters

    async def _update(self) -> None:
        """Apply the newest wanted set until there is no newer one."""
        applied_version = 0
        try:
            while applied_version < self._wanted_version:
                pause_s = self._last_update_s + self._settings.update_min_interval_s - time.monotonic()
                if pause_s > 0:
                    await asyncio.sleep(pause_s)
                applied_version, error = await self._apply_newest()
                self._answer(applied_version, error)
        finally:
            self._updater = None
            self._answer(self._wanted_version, ConfigError("the worker is stopping"))

    async def _apply_newest(self) -> tuple[int, PartiError | None]:
        delay = _RETRY_MIN_S
        failure: PartiError | None = None
        version = 0
        for attempt in range(1, self._settings.update_attempts + 1):
            # Re-read at each attempt: a newer set wins over one that is still being tried.
            version, filters = self._wanted_version, self._wanted
            diff = diff_filters(self._applied.subjects, filters.subjects)
            if diff.empty:
                self._ports.metrics.update_skipped.inc()
                return version, None
            try:
                await self._apply(filters, diff)
                return version, None
            except PartiError as error:
                failure = error
                _log.warning(
                    "consumer update failed",
                    attempt=attempt,
                    added=diff.added[:20],
                    removed=diff.removed[:20],
                    error=str(error),
                )
            await asyncio.sleep(delay * random.uniform(0.5, 1.5))
            delay = min(delay * 2, _RETRY_MAX_S)
        self._update_failed(failure)
        return version, failure

    async def _apply(self, filters: FilterSet, diff: FilterDiff) -> None:
        """Bring one set into force, or leave the previous one in force and raise."""
        started = time.monotonic()
        self._last_update_s = started
        previous = self._applied
        async with self._lock:
            self.engine.pause()
            try:
                self._own(filters)
                pull = await self._settle_on(filters, diff, reason="update")
            except BaseException:
                self._own(previous)
                self._take_back([previous.partitions[s] for s in diff.removed])
                self.engine.resume(prepared=False, reason="update failed")
                raise
            # Only now: until its old messages are known, the floor must not speak for an added partition.
            self._applied = filters
            self.engine.resume(prepared=True, pull=pull)
        self._last_update_s = time.monotonic()
        self._ports.metrics.update_duration.observe(self._last_update_s - started)
        self._applied_ok(filters, diff)

    def _take_back(self, partitions: Iterable[Partition]) -> None:
        """Partitions that were let go for an update that failed: what waited in their lanes must come again."""
        lanes = self._ports.lanes
        for partition in partitions:
            lanes.gain(partition, self._position(partition.id, partition.subject))

    def _applied_ok(self, filters: FilterSet, diff: FilterDiff) -> None:
        metrics = self._ports.metrics
        self._failures = 0
        self._ports.health.clear(_SIGNAL)
        metrics.subject_count.value = len(filters.partitions)
        metrics.update_changes.inc("added", len(diff.added))
        metrics.update_changes.inc("removed", len(diff.removed))
        _log.info(
            "consumer carries", subjects=len(filters.partitions), added=len(diff.added), removed=len(diff.removed)
        )

    def _update_failed(self, error: PartiError | None) -> None:
        self._failures += 1
        self._ports.metrics.update_failures.inc()
        if self._failures >= self._settings.update_failure_threshold:
            self._ports.health.raise_signal(_SIGNAL, f"{self._failures} consumer updates failed in a row: {error}")

    def _answer(self, version: int, error: PartiError | None) -> None:
        for waiting_for, future in self._waiters:
            if waiting_for <= version and not future.done():
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)
        self._waiters = [(v, f) for v, f in self._waiters if not f.done()]

    # ── the one way to gain partitions ────────────────────────────────────────────────────────────────────────

    async def _prepare(self, reason: str) -> bool:
        """Verify the consumer and put it to the position; the engine calls this before each session."""
        async with self._lock:
            return await self._settle_on(self._applied, FilterDiff((), ()), reason=reason)

    async def _settle_on(self, filters: FilterSet, diff: FilterDiff, *, reason: str) -> bool:
        """RESET to the lowest unfinished position, then set the filter; False when there is nothing to pull."""
        lanes, api, stream = self._ports.lanes, self._ports.api, self._stream.name
        subjects = filters.subjects or (self._placeholder(),)
        info = await self._find()
        if info is None:
            await self._check_stream()
        elif reason not in {"start", "update"} and info.subjects != tuple(sorted(subjects)):
            await self._mistrust(filters, info)
        await self._gain([filters.partitions[s] for s in diff.added])
        target = lanes.resume_at
        if info is None:
            if self._existed:
                self._ports.metrics.recreated.inc()
                _log.warning("consumer was gone and is made again", consumer=self._name, at=target, reason=reason)
            info = await api.put_consumer(stream, build_config(self._name, subjects, self._tuning()), action="create")
            self._existed = True
        await api.reset_consumer(stream, self._name, target)
        lanes.cursor = target
        self._ports.metrics.resets.inc("update" if reason == "update" else "session")
        config = build_config(self._name, subjects, self._tuning(), existing=info.config)
        if info.subjects != tuple(sorted(subjects)) or any(info.config.get(k) != v for k, v in config.items()):
            await api.put_consumer(stream, config, action="update")
        return bool(filters.partitions)

    async def _check_stream(self) -> None:
        """The consumer is gone; if the stream went with it and is another one now, nothing we know holds."""
        stream = await self._ports.api.stream_info(self._stream.name)
        if stream.created == self._stream.created and stream.last_seq + 1 >= self._ports.lanes.resume_at:
            return
        _log.warning(
            "the stream was made anew or restored; starting over", stream=stream.name, created=stream.created
        )
        self._stream = stream
        self._baseline = Progress(stream=stream.name, stream_created=stream.created)
        self._starts.clear()
        self._ports.lanes.start_over()

    async def _mistrust(self, filters: FilterSet, info: ConsumerInfo) -> None:
        """Somebody else changed the filter: messages may have been passed over, so look for them."""
        _log.error("the consumer's filter was changed by somebody else; putting it right", found=info.subjects[:20])
        lanes = self._ports.lanes
        if self._each_subject:
            lanes.next_seq = min(lanes.next_seq, self._baseline.floor)
        else:
            await self._gain(list(filters.partitions.values()))

    async def _find(self) -> ConsumerInfo | None:
        try:
            return await self._ports.api.consumer_info(self._stream.name, self._name)
        except NotFound:
            return None

    async def _take_up(self, filters: FilterSet) -> None:
        """Work out where each partition starts, from the progress record and an existing consumer."""
        lanes, info = self._ports.lanes, await self._find()
        self._existed = info is not None
        if info is not None:
            self._baseline = self._baseline.raised(info.subjects, info.ack_floor)
        record = self._baseline
        if self._granted is not None:
            await self._take_up_granted(filters)
            return
        if record.fresh:
            lanes.next_seq = self._stream.last_seq + 1 if self._settings.start == "new" else 1
            return
        lanes.next_seq = record.floor
        lanes.restore(record.behind)
        lanes.restore({p.id: record.position(p.id, p.subject) for p in self._no_longer_ours(filters)})
        for partition_id in record.behind:
            partition = self._parked_partition(partition_id, filters)
            if partition:
                lanes.gain(partition, record.behind[partition_id], feed_to=self._stream.last_seq)
        uncovered = [p for s, p in filters.partitions.items() if not record.covers(s) and not lanes.has(p.id)]
        if self._each_subject and uncovered:
            # A list of partitions became "every subject": what was not listed starts at its first message.
            first = await self._first_unfinished(uncovered[0])
            lanes.next_seq = min(record.floor, first or record.floor)
            return
        await self._gain(uncovered)

    async def _take_up_granted(self, filters: FilterSet) -> None:
        """Others may have had these partitions since the record was written: look where each of them stands."""
        lanes, record = self._ports.lanes, self._baseline
        info = await self._ports.api.stream_info(self._stream.name)
        lanes.next_seq = info.last_seq + 1
        lanes.restore(record.behind)
        lanes.restore({p.id: record.position(p.id, p.subject) for p in self._no_longer_ours(filters)})
        for partition in filters.partitions.values():
            if partition.id in record.behind and self._parked_partition(partition.id, filters):
                lanes.gain(partition, self._position(partition.id, partition.subject), feed_to=info.last_seq)
        others = [p for p in filters.partitions.values() if not lanes.has(p.id)]
        firsts = await self._probe(others, end=info.last_seq + 1)
        lanes.next_seq = min([lanes.next_seq, *(seq for seq in firsts if seq is not None)])

    def _no_longer_ours(self, filters: FilterSet) -> list[Partition]:
        """Partitions that an earlier run owned and this one does not: their positions must not be forgotten."""
        gone = [s for s in self._baseline.covered if not self._each_subject and s not in filters.partitions]
        partitions = []
        for subject in gone:
            try:
                partitions.append(self._template.parse(subject))
            except SubjectMismatch:
                _log.warning("the record speaks of a subject that does not fit the template", subject=subject)
        return partitions

    def _parked_partition(self, partition_id: str, filters: FilterSet) -> Partition | None:
        """The partition behind an entry of the record, if it was parked (and not released) and is ours again."""
        if self._stream.retention != "limits" or not self._settings.ordered:
            return None
        if self._each_subject:
            partition = self._template.partition(partition_id)
        else:
            found = next((p for p in filters.partitions.values() if p.id == partition_id), None)
            if found is None:
                return None
            partition = found
        return partition if self._baseline.covers(partition.subject) else None

    async def _gain(self, partitions: Sequence[Partition]) -> None:
        """Find unfinished messages of these partitions that the consumer has passed: it must go back for them."""
        if not partitions or not self._existed:
            return
        lanes, end = self._ports.lanes, 0
        if self._settings.start == "new":
            end = (await self._ports.api.stream_info(self._stream.name)).last_seq + 1
        oldest = await self._probe(partitions, end=end)
        for partition, seq in zip(partitions, oldest, strict=True):
            if seq is not None and seq < lanes.next_seq:
                lanes.gain(partition, seq)

    async def _probe(self, partitions: Sequence[Partition], *, end: int) -> list[int | None]:
        """The first unfinished message of each partition; `end` is where those begin that want only new ones."""
        room = asyncio.Semaphore(_PROBES_AT_ONCE)

        async def probe(partition: Partition) -> int | None:
            async with room:
                return await self._first_unfinished(partition)

        if self._settings.start == "new":
            self._starts |= {p.id: end for p in partitions if not self._position(p.id, p.subject)}
        return await asyncio.gather(*(probe(p) for p in partitions))

    async def _first_unfinished(self, partition: Partition) -> int | None:
        """Sequence of the first message at or after the partition's position, or None."""
        start = self._position(partition.id, partition.subject)
        message = await self._ports.api.next_on_subject(self._stream.name, partition.subject, start)
        return message.seq if message else None

    def _own(self, filters: FilterSet) -> None:
        self._ports.lanes.own(filters.partitions, self._position)

    def _position(self, partition_id: str, subject: str) -> int:
        known = self._ports.lanes.known_position(partition_id)
        if self._granted and self._granted_in == self._stream.created:
            known = max(known, self._granted.get(partition_id, 0))
        return max(known, self._starts.get(partition_id, 0), self._baseline.position(partition_id, subject))

    def _placeholder(self) -> str:
        """A subject inside the stream that nobody publishes: an empty filter would mean every subject."""
        keys = dict.fromkeys(self._template.keys, f"_none_{self._name}")
        return self._template.partition(keys).subject

    def _tuning(self) -> ConsumerTuning:
        s = self._settings
        return ConsumerTuning(s.ack_wait_s, s.max_ack_pending, s.max_waiting, s.inactive_threshold_s)


def _pull_tuning(settings: Settings) -> PullTuning:
    return PullTuning(
        batch=settings.pull_batch,
        max_bytes=settings.pull_max_bytes,
        expires_s=settings.pull_expires_s,
        heartbeat_s=settings.pull_heartbeat_s,
        limit=max(1, int(settings.backpressure * settings.max_ack_pending)),
    )
