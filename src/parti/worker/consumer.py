"""The one durable pull consumer of a worker, and the subjects it carries.

The consumer only delivers; where a partition begins is said by its position. There are two ways to the messages that
a partition has below what the consumer has delivered already:

- From the stream itself, where finished messages stay (limits retention): the subject is added, the stream's last
  sequence U is read *after* the update has returned, and the lane is fed from the position to U and to whatever was
  delivered and let go meanwhile. Nothing else that the consumer carries is disturbed.
- By RESET, where acknowledged messages are gone (interest, work-queue), at a start, and whenever a session has to
  begin anew: with no pull standing, the consumer is put back to the lowest position that is not finished, then it
  gets its filter, then it pulls. RESET comes first, so that a crash in between leaves a consumer that starts too
  early (its messages are recognised as finished) and never one that starts too late, whose server would take
  unfinished messages for acknowledged.

A worker may carry partitions that it does not own: those that it is to get ready for (`incoming`). Their messages are
let go (limits) or held unacknowledged and unhandled (interest) until they are granted.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from parti.config import Settings
from parti.core.consumer_config import ConsumerTuning, build_config, consumer_name
from parti.core.filters import FilterDiff, FilterSet, build_filters, diff_filters
from parti.core.progress import Progress, summarise
from parti.core.retention import INTEREST, retention_named
from parti.errors import ApiError, ConfigError, LeaseLost, NotFound, PartiError, RequestTimeout, SubjectMismatch
from parti.jetstream.api import ConsumerInfo, JetStreamApi, StreamInfo
from parti.jetstream.connection import Connection
from parti.jetstream.pull import PullEngine, PullTuning
from parti.jetstream.wire import Wire
from parti.model.partition import Partition, PartitionLike, Template
from parti.model.subjects import within
from parti.telemetry.health import Health
from parti.telemetry.metrics import Metrics
from parti.worker.holds import Holds
from parti.worker.lanes import Lanes
from parti.worker.starts import Granted, Starts
from parti.worker.stateful import StatefulPartitions

_log = structlog.get_logger("parti.consumer")

_RETRY_MIN_S, _RETRY_MAX_S = 0.1, 2.0
_SIGNAL = "consumer-update"
_NOTHING = FilterSet({}, 0)
_UNPULLED_WAITS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class ConsumerPorts:
    """What the consumer works with."""

    api: JetStreamApi
    connection: Connection
    wire: Wire
    lanes: Lanes
    metrics: Metrics
    health: Health
    entitled: Callable[[], bool] = lambda: True
    """Whether this process still holds the worker id that the consumer belongs to."""
    on_new_stream: Callable[[StreamInfo], None] = lambda stream: None
    """Called when the stream was made anew."""
    safe_elsewhere: Callable[[Iterable[str]], Awaitable[set[str]]] | None = None
    """Tells which of these partitions are carried by the consumer of their owner."""
    stateful: StatefulPartitions | None = None
    """Partitions have a state, which is restored before they begin and saved when they end."""
    durable: Callable[[], Awaitable[bool]] | None = None
    """Asked before the consumer is set back, which acknowledges: whether all that has to be stored before is."""


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
        self._retention = retention_named(stream.retention)
        self._feeds = self._retention.keeps and settings.ordered
        """Older messages are read from the stream; otherwise the consumer is set back for them."""
        self.overlaps = self._retention.overlap and settings.ordered
        """It can get ready for partitions that somebody else still handles."""
        self._starts = Starts(
            ports.api,
            ports.lanes,
            template,
            stream,
            progress,
            only_new=settings.start == "new",
            each_subject=each_subject,
        )
        self._name = consumer_name(settings.prefix, settings.worker_id)
        self._owned = _NOTHING
        """What may be handled."""
        self._carried = _NOTHING
        """What the server has been told, incoming partitions included."""
        self._bounds: dict[str, int] = {}
        """The stream's last sequence after a partition was added: what is newer is delivered."""
        self._taken: frozenset[str] = frozenset()
        """Subjects that are carried, and whose messages have been taken in from their position on."""
        self._leftovers: dict[str, Partition] = {}
        """Carried only because nobody else does yet, by subject; their messages are not taken in."""
        self._wanted = _NOTHING
        self._wanted_incoming = _NOTHING
        """Belongs to `_wanted`: one assignment says both."""
        self._wanted_version = 0
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._updater: asyncio.Task[None] | None = None
        self._last_update_s = float("-inf")
        self._failures = 0
        self._existed = False
        self._lock = asyncio.Lock()
        self._holds = Holds(ports.api, stream.name, self._name, keep_s=settings.inactive_threshold_s)
        ports.lanes.lets_go = self._feeds
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
        return self._starts.stream.created

    @property
    def subjects(self) -> tuple[str, ...]:
        """The subjects that are being handled."""
        return self._owned.subjects

    def grant(self, granted: Granted) -> None:
        """Say where partitions begin that others have had, and which ones to get ready for."""
        self._starts.granted = granted

    async def start(self, partitions: Iterable[PartitionLike]) -> None:
        """Create or take up the consumer with these partitions and begin to pull."""
        owned = self._build(partitions)
        # A state may be restored sooner than it is known where the stream ends: nothing begins before that.
        self._own(owned, begin=False)
        await self._take_up(FilterSet(self._handled, 0))
        if self._ports.stateful:
            await self._starts.begin_with_news(owned.partitions.values())
        self._want(owned)
        carried = self._carried = self._to_carry()
        self._taken = frozenset(carried.partitions.keys() - self._leftovers.keys())
        incoming = self._expect(carried)
        if not self._feeds:
            await self._gain(incoming)
        if self._retention is INTEREST and self._existed:
            await self._holds.find(await self._starts.last_seq())
        await self.engine.start()
        self._bounds = dict.fromkeys((p.id for p in carried.partitions.values()), 0)
        self._applied_ok(diff_filters((), carried.subjects))
        self._own(self._owned)

    async def stop(self) -> None:
        """Stop pulling; the consumer stays on the server, where the next start finds it."""
        if self._updater:
            self._updater.cancel()
            await asyncio.gather(self._updater, return_exceptions=True)
        await self.engine.stop()

    def summarise(self, writer: str) -> Progress:
        """The positions as of now."""
        lanes, stream = self._ports.lanes, self._starts.stream
        return summarise(
            stream=stream.name,
            stream_created=stream.created,
            floor=lanes.floor,
            # Not before the server has been told: until its old messages are known, the floor must not speak for a
            # partition.
            covered=tuple(sorted(self._handled.keys() & self._carried.partitions.keys())),
            # Partitions without a lane have not moved since the record was read.
            positions=(self._starts.record.ahead | dict(lanes.positions())).items(),
            behind=lanes.behind(),
            trying=lanes.trying,
            writer=writer,
        )

    # ── updates ───────────────────────────────────────────────────────────────────────────────────────────────

    def let_go(self, keep: Iterable[PartitionLike]) -> bool:
        """Handle nothing more of partitions that are not in `keep`, and begin with those that are and are carried.

        Returns whether others may have what was let go; otherwise the consumer has to be updated first.
        """
        wanted = self._build(keep)
        # Also for an update that is under way: it must not bring back what is let go here.
        self._want(wanted)
        if not self.overlaps or self._lock.locked():
            return False
        ready = self._carried.partitions.keys() if self._feeds else self._taken
        self._own(FilterSet({s: p for s, p in wanted.partitions.items() if s in ready}, 0))
        return True

    async def update_worker_consumer(self, worker_id: str, partitions: Iterable[PartitionLike]) -> None:
        """Make the consumer carry exactly these partitions.

        Returns when they, or a newer set, are in force. Raises `ConfigError` (too many subjects, overlap, outside
        the stream) before anything changes, or the last error when the server refused all attempts; the previous
        set stays active then.
        """
        if worker_id != self._settings.worker_id:
            raise ConfigError(f"this consumer belongs to worker {self._settings.worker_id!r}, not to {worker_id!r}")
        self._want(self._build(partitions))
        if self._updater is None and not self._differs():
            self._ports.metrics.update_skipped.inc()
            return
        self._wanted_version += 1
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((self._wanted_version, done))
        if self._updater is None:
            self._updater = asyncio.create_task(self._update())
        await done

    def _want(self, owned: FilterSet) -> None:
        """From now on these are to be owned, with what the newest grants name as incoming."""
        granted, self._wanted, self._wanted_incoming = self._starts.granted, owned, _NOTHING
        if granted and self.overlaps:
            self._wanted_incoming = FilterSet({p.subject: p for p in self._template.partitions(granted.incoming)}, 0)
        wanted = owned.partitions.keys() | self._wanted_incoming.partitions.keys()
        self._leftovers = {s: p for s, p in self._leftovers.items() if s not in wanted}

    def _differs(self) -> bool:
        same = diff_filters(self._carried.subjects, self._to_carry().subjects).empty
        return not same or not diff_filters(self._owned.subjects, self._wanted.subjects).empty

    def _build(self, partitions: Iterable[PartitionLike]) -> FilterSet:
        filters = build_filters(self._template.partitions(partitions), max_subjects=self._settings.max_subjects)
        stream = self._starts.stream
        for subject in filters.partitions:
            if not within(subject, stream.stored_subjects):
                raise SubjectMismatch(
                    f"subject {subject!r} is outside stream {stream.name!r}, which takes "
                    f"{', '.join(stream.stored_subjects) or 'nothing'}; correct the template or the stream"
                )
        if filters.duplicates:
            self._ports.metrics.duplicate_subjects.inc(filters.duplicates)
            _log.warning("partitions were named more than once", duplicates=filters.duplicates)
        return filters

    def _to_carry(self) -> FilterSet:
        """What is wanted, what to get ready for, and what an earlier process carried and nobody else does yet."""
        others = self._leftovers | self._wanted_incoming.partitions
        return FilterSet(others | self._wanted.partitions, 0) if others else self._wanted

    async def _update(self) -> None:
        """Apply the newest wanted set until there is no newer one."""
        applied_version = 0
        try:
            while applied_version < self._wanted_version:
                pause_s = self._last_update_s + self._settings.update_min_interval_s - time.monotonic()
                if pause_s > 0 and not self._urgent:
                    await asyncio.sleep(pause_s)
                applied_version, error = await self._apply_newest()
                self._answer(applied_version, error)
        finally:
            self._updater = None
            self._answer(self._wanted_version, ConfigError("the worker is stopping"))

    @property
    def _urgent(self) -> bool:
        """Whether partitions wait for this update: nobody handles them."""
        added = diff_filters(self._carried.subjects, self._wanted.subjects).added
        return bool(self._starts.granted) and (bool(added) or not self._feeds)

    async def _apply_newest(self) -> tuple[int, PartiError | None]:
        delay = _RETRY_MIN_S
        failure: PartiError | None = None
        version = 0
        for attempt in range(1, self._settings.update_attempts + 1):
            # Re-read at each attempt: a newer set wins over one that is still being tried.
            await self._keep_unsafe()
            version, owned, carried = self._wanted_version, self._wanted, self._to_carry()
            diff = diff_filters(self._carried.subjects, carried.subjects)
            if not self._differs():
                self._ports.metrics.update_skipped.inc()
                return version, None
            try:
                await self._apply(owned, carried, diff)
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

    async def _apply(self, owned: FilterSet, carried: FilterSet, diff: FilterDiff) -> None:
        """Bring one set into force, or leave the previous one in force and raise."""
        started = time.monotonic()
        self._last_update_s = started
        async with self._lock:
            if self._feeds:
                await self._refilter(owned, carried, diff)
            else:
                await self._set_back(owned, carried, diff)
        self._last_update_s = time.monotonic()
        self._ports.metrics.update_duration.observe(self._last_update_s - started)
        self._applied_ok(diff)

    async def _refilter(self, owned: FilterSet, carried: FilterSet, diff: FilterDiff) -> None:
        """Change the filter under standing pulls; what an added partition has already is fed to it."""
        api, stream = self._ports.api, self._starts.stream.name
        self._expect(carried)
        if not diff.empty:
            info = await self._find()
            if info is None:
                # The pull engine finds out too, and makes it anew.
                raise NotFound(10014, f"consumer {self._name!r} is gone")
            subjects = carried.subjects or (self._placeholder(),)
            config = build_config(self._name, subjects, self._tuning(), existing=info.config)
            await api.put_consumer(stream, config, action="update")
            bound = await self._starts.last_seq() if diff.added else 0
            self._bounds |= {carried.partitions[s].id: bound for s in diff.added}
            await self._starts.begin_with_news([carried.partitions[s] for s in diff.added])
        wakes = bool(carried.partitions) and not self._carried.partitions
        self._carried = carried
        self._own(owned)
        if wakes:
            self.engine.new_session("has something to read now")

    async def _set_back(self, owned: FilterSet, carried: FilterSet, diff: FilterDiff) -> None:
        """Change the filter with no pull standing, and begin anew where the lowest unfinished message is."""
        previous = self._owned
        self.engine.pause()
        try:
            self._own(owned)
            self._expect(carried)
            taken = frozenset(carried.partitions.keys() - self._leftovers.keys())
            gained = [carried.partitions[s] for s in sorted(taken - self._taken)]
            pull = await self._settle_on(carried, gained, reason="update")
        except BaseException:
            self._own(previous)
            self._expect(self._carried)
            self._take_back([previous.partitions[s] for s in diff.removed if s in previous.partitions])
            self.engine.resume(prepared=False, reason="update failed")
            raise
        self._carried, self._taken = carried, taken
        self.engine.resume(prepared=True, pull=pull)

    def _take_back(self, partitions: Iterable[Partition]) -> None:
        """Partitions that were let go for an update that failed: what waited in their lanes must come again."""
        lanes = self._ports.lanes
        for partition in partitions:
            lanes.gain(partition, self._starts.position(partition.id, partition.subject))

    def _applied_ok(self, diff: FilterDiff) -> None:
        metrics = self._ports.metrics
        self._failures = 0
        self._ports.health.clear(_SIGNAL)
        metrics.subject_count.value = len(self._carried.partitions)
        metrics.update_changes.inc("added", len(diff.added))
        metrics.update_changes.inc("removed", len(diff.removed))
        _log.info(
            "consumer carries",
            subjects=len(self._carried.partitions),
            added=len(diff.added),
            removed=len(diff.removed),
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

    # ── gaining partitions ────────────────────────────────────────────────────────────────────────────────────

    def _own(self, owned: FilterSet, *, begin: bool = True) -> None:
        """Handle exactly these; partitions that are new are fed, or what was held for them is let through.

        `begin`: those with a state are restored.
        """
        lanes, before = self._ports.lanes, self._handled
        stateful, gone = (
            self._ports.stateful,
            [p for s, p in self._owned.partitions.items() if s not in owned.partitions],
        )
        self._owned = owned
        lanes.own(self._handled, self._starts.position)
        if stateful:
            for partition in gone:
                stateful.end(partition)
            for partition in owned.partitions.values():
                if begin and not stateful.has_begun(partition.id):
                    start = partial(self._starts.position, partition.id, partition.subject)
                    stateful.begin(partition, start, partial(self._restored, partition))
        if not self._feeds:
            return
        for subject, partition in self._handled.items():
            bound = self._bounds.get(partition.id)
            if subject not in before and bound is not None and not self._each_subject:
                self._feed(partition, max(bound, lanes.next_seq - 1))

    @property
    def _handled(self) -> dict[str, Partition]:
        """What is owned and, where there is a state to restore, has it."""
        stateful = self._ports.stateful
        if stateful is None:
            return self._owned.partitions
        return {s: p for s, p in self._owned.partitions.items() if stateful.has_begun(p.id)}

    def _restored(self, partition: Partition, position: int) -> None:
        """The handler has the state of a partition: it begins where the state was saved."""
        lanes, subject = self._ports.lanes, partition.subject
        if subject not in self._owned.partitions:
            return
        lanes.own(self._handled, self._starts.position)
        bound = max(self._bounds.get(partition.id, 0), lanes.next_seq - 1)
        lanes.forget_position(partition.id)
        self._starts.begin_at(partition.id, position)
        if position <= bound:
            lanes.gain(partition, position, feed_to=bound)

    def _feed(self, partition: Partition, bound: int) -> None:
        """Have a partition read from the stream, from its position to what has been delivered; later ones come."""
        position = self._starts.position(partition.id, partition.subject)
        if position <= bound:
            self._ports.lanes.gain(partition, position, feed_to=bound)

    def _expect(self, carried: FilterSet) -> list[Partition]:
        """Tell the lanes which partitions to get ready for; returns them."""
        kept = self._handled.keys() | self._leftovers.keys()
        incoming = {s: p for s, p in carried.partitions.items() if s not in kept}
        self._ports.lanes.expect(incoming)
        return list(incoming.values())

    async def _prepare(self, reason: str) -> bool:
        """Verify the consumer and put it to the position; the engine calls this before each session."""
        async with self._lock:
            return await self._settle_on(self._carried, [], reason=reason)

    async def _settle_on(self, carried: FilterSet, gained: list[Partition], *, reason: str) -> bool:
        """RESET to the lowest unfinished position, then set the filter; False when there is nothing to pull."""
        if not self._ports.entitled():
            raise LeaseLost(f"the worker id is not held at present; consumer {self._name!r} is left alone")
        lanes, api, stream = self._ports.lanes, self._ports.api, self._starts.stream.name
        subjects = carried.subjects or (self._placeholder(),)
        info = await self._find_unpulled()
        if info is None:
            await self._check_stream()
        elif reason not in {"start", "update"} and info.subjects != tuple(sorted(subjects)):
            await self._mistrust(info)
        oldest = await self._gain(gained)
        target = min(lanes.resume_at, oldest or lanes.resume_at)
        if self._ports.durable and not await self._ports.durable():
            raise RequestTimeout(f"consumer {self._name!r} waits for the ledger, which does not take rows at present")
        if info is None:
            if self._existed:
                self._ports.metrics.recreated.inc()
                _log.warning("consumer was gone and is made again", consumer=self._name, at=target, reason=reason)
            config = build_config(self._name, subjects, self._tuning())
            info = await api.put_consumer(stream, config, action="create")
            self._existed = True
        elif not self._retention.keeps and set(info.subjects) - (set(subjects) - self._leftovers.keys()):
            # A subject is in the filter that is not read here: its messages must not get below the ack floor.
            target = min(target, info.ack_floor + 1)
        hold = await self._hold(info, subjects, target)
        await api.reset_consumer(stream, self._name, target)
        lanes.cursor = target
        self._ports.metrics.resets.inc("update" if reason == "update" else "session")
        config = build_config(self._name, subjects, self._tuning(), existing=info.config)
        if info.subjects != tuple(sorted(subjects)) or any(info.config.get(k) != v for k, v in config.items()):
            await api.put_consumer(stream, config, action="update")
        if hold:
            self._holds.until(hold, await self._starts.last_seq())
        return bool(carried.partitions)

    async def _hold(self, info: ConsumerInfo, subjects: Sequence[str], seq: int) -> str:
        """Where needed, keep messages of added subjects that the consumer has told the server to need no more."""
        added = set(subjects) - set(info.subjects)
        if self._retention.keeps or not self._retention.overlap or not added or seq > info.ack_floor:
            return ""
        return await self._holds.take(sorted(added), seq)

    def _keep_leftovers(self, subjects: Iterable[str]) -> None:
        """On an interest stream the server deletes what the last consumer drops, so drop nothing before it is safe.

        Others may have been given these partitions and not carry them yet.
        """
        if self._retention is not INTEREST or self._ports.safe_elsewhere is None:
            return
        for subject in subjects:
            try:
                partition = self._template.parse(subject)
            except SubjectMismatch:
                continue
            if subject != self._placeholder():
                self._leftovers[subject] = partition
        # Their messages are let pass from now on: whoever owns them next, be it this worker, goes back for them.
        self._taken -= self._leftovers.keys()

    async def _keep_unsafe(self) -> None:
        """Go on carrying what is no longer wanted here, until somebody else does."""
        ask, going = self._ports.safe_elsewhere, self._carried.partitions.keys() - self._to_carry().partitions.keys()
        if self._retention is not INTEREST or ask is None or not going:
            return
        partitions = {s: self._carried.partitions[s].id for s in going}
        try:
            safe = await ask(partitions.values())
        except PartiError as error:
            _log.warning("it is not known yet whether others carry what was let go", error=str(error))
            safe = set()
        self._keep_leftovers(s for s, partition in partitions.items() if partition not in safe)

    async def tidy_up(self) -> None:
        """Give up holds and partitions of an earlier process that are no longer needed here."""
        if self._holds.any and (info := await self._find()):
            await self._holds.release(info)
        ask = self._ports.safe_elsewhere
        if self._leftovers and ask:
            safe = await ask([partition.id for partition in self._leftovers.values()])
            left = {s: p for s, p in self._leftovers.items() if p.id not in safe}
            if left != self._leftovers:
                self._leftovers = left
                assert self._settings.worker_id
                await self.update_worker_consumer(self._settings.worker_id, self._wanted.partitions.values())

    async def _check_stream(self) -> None:
        """The consumer is gone; if the stream went with it and is another one now, nothing we know holds."""
        known, lanes = self._starts.stream, self._ports.lanes
        stream = await self._ports.api.stream_info(known.name)
        if stream.created == known.created and stream.last_seq + 1 >= lanes.resume_at:
            return
        _log.warning(
            "the stream was made anew or restored; starting over", stream=stream.name, created=stream.created
        )
        self._starts.start_over(stream)
        self._ports.on_new_stream(stream)
        self._bounds = dict.fromkeys(self._bounds, 0)
        lanes.start_over()
        if self._ports.stateful:
            self._ports.stateful.start_over()
            self._own(self._owned)

    async def _mistrust(self, info: ConsumerInfo) -> None:
        """Somebody else changed the filter: messages may have been passed over, so look for them."""
        _log.error("the consumer's filter was changed by somebody else; putting it right", found=info.subjects[:20])
        lanes = self._ports.lanes
        if self._each_subject:
            lanes.next_seq = min(lanes.next_seq, self._starts.record.floor)
            return
        if self._bounds:
            bound = await self._starts.last_seq()
            self._bounds = dict.fromkeys(self._bounds, bound)
        await self._gain(list(self._owned.partitions.values()))

    async def _find(self) -> ConsumerInfo | None:
        try:
            return await self._ports.api.consumer_info(self._starts.stream.name, self._name)
        except NotFound:
            return None

    async def _find_unpulled(self) -> ConsumerInfo | None:
        """The consumer, once no pull of an earlier session stands at the server.

        Such a pull would run the cursor past the messages of an added subject between RESET and the new filter; where
        finished messages are deleted, these would be too. Raises when somebody else keeps pulling.
        """
        info = await self._find()
        for wait_s in _UNPULLED_WAITS_S:
            if info is None or not info.waiting or self._retention.keeps:
                return info
            await asyncio.sleep(wait_s)
            info = await self._find()
        if info and info.waiting:
            raise ApiError(
                0,
                f"{info.waiting} pulls of somebody else stand on consumer {self._name!r}; end the other process, or "
                f"give it another worker_id",
            )
        return info

    async def _gain(self, partitions: list[Partition]) -> int:
        """Find messages of these partitions that the consumer has passed: it must go back for them.

        Returns the sequence of the oldest one, or 0.
        """
        if not partitions or not self._existed:
            return 0
        lanes, oldest = self._ports.lanes, 0
        for partition, seq in zip(partitions, await self._starts.probe(partitions), strict=True):
            if seq is not None and seq < lanes.next_seq:
                oldest = min(seq, oldest or seq)
                lanes.gain(partition, max(seq, self._starts.position(partition.id, partition.subject)))
        return oldest

    async def _take_up(self, filters: FilterSet) -> None:
        """Work out where each partition starts, from the progress record and an existing consumer."""
        lanes, starts, info = self._ports.lanes, self._starts, await self._find()
        self._existed = info is not None
        # In a fleet, and where there are states to restore, messages are acknowledged that are still to be handled:
        # only a record that speaks for the same subjects shows that this was not so.
        if info is not None and not (starts.record.fresh and (starts.granted is not None or self._ports.stateful)):
            starts.raise_by(info)
        if info is not None:
            self._keep_leftovers(s for s in info.subjects if s not in self._owned.partitions)
        record = starts.record
        if starts.granted is not None or self._ports.stateful:
            await self._take_up_granted(filters)
            return
        if record.fresh:
            lanes.next_seq = starts.stream.last_seq + 1 if self._settings.start == "new" else 1
            return
        lanes.next_seq = record.floor
        self._remember(filters)
        for partition in starts.parked(filters) if self._feeds else ():
            self._feed(partition, starts.stream.last_seq)
        uncovered = [p for s, p in filters.partitions.items() if not record.covers(s) and not lanes.has(p.id)]
        if self._each_subject and uncovered:
            # A list of partitions became "every subject": what was not listed starts at its first message.
            first = await starts.first_unfinished(uncovered[0])
            lanes.next_seq = min(record.floor, first or record.floor)
            return
        await self._gain(uncovered)

    async def _take_up_granted(self, filters: FilterSet) -> None:
        """Others may have had these partitions since the record was written: look where each of them stands."""
        lanes, starts = self._ports.lanes, self._starts
        last_seq = await starts.last_seq()
        lanes.next_seq = last_seq + 1
        self._remember(filters)
        for partition in starts.parked(filters) if self._feeds else ():
            self._feed(partition, last_seq)
        others = [p for p in filters.partitions.values() if not lanes.has(p.id)]
        firsts = await starts.probe(others)
        lanes.next_seq = min([lanes.next_seq, *(seq for seq in firsts if seq is not None)])

    def _remember(self, filters: FilterSet) -> None:
        """Keep the positions of partitions that an earlier run had released, parked or owned."""
        lanes, record = self._ports.lanes, self._starts.record
        lanes.restore(record.behind)
        lanes.restore({p.id: record.position(p.id, p.subject) for p in self._starts.no_longer_owned(filters)})

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
