"""The durable pull consumer of a worker, and the subjects it carries.

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

A worker with more subjects than one consumer may carry has several (`consumer_shards`), each with its own filter,
session and place in the stream (`parti.worker.shards`). What one has delivered says nothing of the others: wherever
it matters how far reading has got, the consumer is asked that brings the partition (`Lanes.reached`). A change of the
set is brought into force one consumer after the other, each of them wholly or not at all.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable, Mapping
from functools import partial

import structlog

from parti.config import Settings
from parti.core.filters import FilterDiff, FilterSet, build_filters, diff_filters
from parti.core.progress import Progress, summarise
from parti.core.retention import INTEREST, retention_named
from parti.errors import ConfigError, LeaseLost, NotFound, PartiError, RequestTimeout, SubjectMismatch
from parti.jetstream.api import ConsumerInfo, StreamInfo
from parti.model.partition import Partition, PartitionLike, Template
from parti.model.subjects import within
from parti.worker.lanes import Reached
from parti.worker.shards import Shards
from parti.worker.starts import Granted, Starts
from parti.worker.vehicle import NOTHING, ConsumerPorts, Vehicle

_log = structlog.get_logger("parti.consumer")

_RETRY_MIN_S, _RETRY_MAX_S = 0.1, 2.0
_SIGNAL = "consumer-update"
_FAR_AHEAD = 10_000
"""Sequences by which a shard is ahead of the slowest one when that is worth a place in the record."""


class WorkerConsumer:
    """Owns the consumer `<prefix>-<workerID>`, its shards where there are more, and the pull engines on them.

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
        self._owned = NOTHING
        """What may be handled."""
        self._bounds: dict[str, int] = {}
        """The stream's last sequence after a partition was added: what is newer is delivered."""
        self._taken: frozenset[str] = frozenset()
        """Subjects that are carried, and whose messages have been taken in from their position on."""
        self._leftovers: dict[str, Partition] = {}
        """Carried only because nobody else does yet, by subject; their messages are not taken in."""
        self._wanted = NOTHING
        self._wanted_incoming = NOTHING
        """Belongs to `_wanted`: one assignment says both."""
        self._wanted_version = 0
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._updater: asyncio.Task[None] | None = None
        self._last_update_s = float("-inf")
        self._failures = 0
        self._lock = asyncio.Lock()
        """Held for the whole of an update; each consumer has a lock of its own."""
        ports.lanes.lets_go = self._feeds
        self.shards = Shards(ports, settings, template, self._starts, self._prepare, one_filter=each_subject)

    @property
    def _carried(self) -> FilterSet:
        """What the server has been told, incoming partitions included."""
        return self.shards.carried

    @property
    def name(self) -> str:
        """Name and durable name of the (first) consumer."""
        return self.shards.vehicles[0].name

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
        infos = await self.shards.find()
        self._heed(infos)
        self._want(owned)
        self.shards.begin_with(self._to_carry(), infos)
        await self._take_up(FilterSet(self._handled, 0))
        if self._ports.stateful:
            await self._starts.begin_with_news(owned.partitions.values())
        carried = self._carried
        self._taken = frozenset(carried.partitions.keys() - self._leftovers.keys())
        incoming = self._expect(carried.partitions)
        if not self._feeds:
            await self._gain(incoming)
        for vehicle in self.shards.vehicles:
            if self._retention is INTEREST and vehicle.existed:
                await vehicle.holds.find(await self._starts.last_seq())
        for engine in self.shards.engines:
            await engine.start()
        self._bounds = dict.fromkeys((p.id for p in carried.partitions.values()), 0)
        self._applied_ok(diff_filters((), carried.subjects))
        self._own(self._owned)

    async def stop(self) -> None:
        """Stop pulling; the consumer stays on the server, where the next start finds it."""
        if self._updater:
            self._updater.cancel()
            await asyncio.gather(self._updater, return_exceptions=True)
        for engine in self.shards.engines:
            await engine.stop()

    def summarise(self, writer: str) -> Progress:
        """The positions as of now."""
        lanes, stream = self._ports.lanes, self._starts.stream
        # Not before the server has been told: until its old messages are known, the floor must not speak for a
        # partition.
        covered = self._handled.keys() & self._carried.partitions.keys()
        floor = lanes.floor
        # Partitions without a lane have not moved since the record was read.
        positions = self._starts.record.ahead | dict(lanes.positions())
        for reached in lanes.carriers:
            if lanes.floor_of(reached) > floor + _FAR_AHEAD:
                self._note_ahead(positions, reached, covered)
        return summarise(
            stream=stream.name,
            stream_created=stream.created,
            floor=floor,
            covered=tuple(sorted(covered)),
            positions=positions.items(),
            behind=lanes.behind(),
            trying=lanes.trying,
            writer=writer,
        )

    def _note_ahead(self, positions: dict[str, int], reached: Reached, covered: Iterable[str]) -> None:
        """Say of each partition how far a shard is that is far ahead of the floor, which a slower one holds back.

        Without it nothing would be lost, but after a restart the shard would deliver again all that it has finished.
        """
        floor = self._ports.lanes.floor_of(reached)
        for subject in covered:
            if self._ports.lanes.reached(subject) is reached:
                partition_id = self._carried.partitions[subject].id
                positions[partition_id] = max(positions.get(partition_id, 0), floor)

    # ── updates ───────────────────────────────────────────────────────────────────────────────────────────────

    def let_go(self, keep: Iterable[PartitionLike]) -> bool:
        """Handle nothing more of partitions that are not in `keep`, and begin with those that are and are carried.

        Returns whether others may have what was let go; otherwise the consumer has to be updated first.
        """
        wanted = self._build(keep)
        # Also for an update that is under way: it must not bring back what is let go here.
        self._want(wanted)
        if not self.overlaps or self._lock.locked() or self.shards.changing:
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
        granted, self._wanted, self._wanted_incoming = self._starts.granted, owned, NOTHING
        if granted and self.overlaps:
            self._wanted_incoming = FilterSet({p.subject: p for p in self._template.partitions(granted.incoming)}, 0)
        wanted = owned.partitions.keys() | self._wanted_incoming.partitions.keys()
        self._leftovers = {s: p for s, p in self._leftovers.items() if s not in wanted}

    def _differs(self) -> bool:
        same = diff_filters(self._carried.subjects, self._to_carry().subjects).empty
        return not same or not diff_filters(self._owned.subjects, self._wanted.subjects).empty

    def _build(self, partitions: Iterable[PartitionLike]) -> FilterSet:
        s = self._settings
        filters = build_filters(
            self._template.partitions(partitions), max_subjects=s.max_subjects, shards=s.consumer_shards
        )
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
            try:
                for vehicle, part in await self.shards.share_out(carried):
                    await self._apply_to(vehicle, owned, part)
            finally:
                self.shards.shared_out()
        self._last_update_s = time.monotonic()
        self._ports.metrics.update_duration.observe(self._last_update_s - started)
        self._applied_ok(diff)

    async def _apply_to(self, vehicle: Vehicle, owned: FilterSet, part: FilterSet) -> None:
        """Bring the part of one consumer into force, or leave its previous one in force and raise."""
        mine = self.shards.owned_with(vehicle, part, self._owned, owned)
        diff = diff_filters(vehicle.carried.subjects, part.subjects)
        if diff.empty and mine.partitions.keys() == self._owned.partitions.keys():
            return
        async with vehicle.lock:
            if self._feeds:
                await self._refilter(vehicle, mine, part, diff)
            else:
                await self._set_back(vehicle, mine, part, diff)

    async def _refilter(self, vehicle: Vehicle, owned: FilterSet, carried: FilterSet, diff: FilterDiff) -> None:
        """Change the filter under standing pulls; what an added partition has already is fed to it."""
        self._expect(self.shards.carried_with(vehicle, carried))
        if not diff.empty:
            try:
                await vehicle.refilter(carried)
            except NotFound:
                # Pulls would have told the engine too, but where nothing was carried there are none.
                vehicle.engine.new_session("the consumer is gone")
                raise
            bound = await self._starts.last_seq() if diff.added else 0
            self._bounds |= {carried.partitions[s].id: bound for s in diff.added}
            await self._starts.begin_with_news([carried.partitions[s] for s in diff.added])
        wakes = bool(carried.partitions) and not vehicle.carried.partitions
        self.shards.carries(vehicle, carried)
        self._own(owned)
        if wakes:
            vehicle.engine.new_session("has something to read now")

    async def _set_back(self, vehicle: Vehicle, owned: FilterSet, carried: FilterSet, diff: FilterDiff) -> None:
        """Change the filter with no pull standing, and begin anew where the lowest unfinished message is."""
        previous, engine = self._owned, vehicle.engine
        engine.pause()
        try:
            self._own(owned)
            self._expect(self.shards.carried_with(vehicle, carried))
            taken = frozenset(carried.partitions.keys() - self._leftovers.keys())
            gained = [carried.partitions[s] for s in sorted(taken - self._taken)]
            pull = await self._settle_on(vehicle, carried, gained, reason="update")
        except BaseException:
            self._own(previous)
            self._expect(self._carried.partitions)
            self._take_back([previous.partitions[s] for s in diff.removed if s in previous.partitions])
            engine.resume(prepared=False, reason="update failed")
            raise
        self._taken = (self._taken - vehicle.carried.partitions.keys()) | taken
        self.shards.carries(vehicle, carried)
        engine.resume(prepared=True, pull=pull)

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
                self._feed(partition, max(bound, lanes.reached(subject).next_seq - 1))

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
        bound = max(self._bounds.get(partition.id, 0), lanes.reached(subject).next_seq - 1)
        lanes.forget_position(partition.id)
        self._starts.begin_at(partition.id, position)
        if position <= bound:
            lanes.gain(partition, position, feed_to=bound)

    def _feed(self, partition: Partition, bound: int) -> None:
        """Have a partition read from the stream, from its position to what has been delivered; later ones come."""
        position = self._starts.position(partition.id, partition.subject)
        if position <= bound:
            self._ports.lanes.gain(partition, position, feed_to=bound)

    def _expect(self, carried: Mapping[str, Partition]) -> list[Partition]:
        """Tell the lanes which of what is carried to get ready for; returns these."""
        kept = self._handled.keys() | self._leftovers.keys()
        incoming = {s: p for s, p in carried.items() if s not in kept}
        self._ports.lanes.expect(incoming)
        return list(incoming.values())

    async def _prepare(self, vehicle: Vehicle, reason: str) -> bool:
        """Verify a consumer and put it to the position; its engine calls this before each session."""
        async with vehicle.lock:
            return await self._settle_on(vehicle, vehicle.carried, [], reason=reason)

    async def _settle_on(self, vehicle: Vehicle, carried: FilterSet, gained: list[Partition], *, reason: str) -> bool:
        """RESET to the lowest unfinished position, then set the filter; False when there is nothing to pull."""
        if not self._ports.entitled():
            raise LeaseLost(f"the worker id is not held at present; consumer {vehicle.name!r} is left alone")
        lanes, stream, reached = self._ports.lanes, vehicle.stream, vehicle.reached
        subjects = vehicle.filter_of(carried, stream)
        info, moves = await vehicle.find_unpulled(stream), vehicle.moves_to(stream)
        if info is None:
            await self._check_stream(vehicle)
        elif not moves and reason not in {"start", "update"} and info.subjects not in {subjects, vehicle.told}:
            await self._mistrust(vehicle, info)
        oldest = await self._gain(gained)
        target = min(lanes.resume_of(reached), oldest or lanes.resume_of(reached))
        if self._ports.durable and not await self._ports.durable():
            raise RequestTimeout(
                f"consumer {vehicle.name!r} waits for the ledger, which does not take rows at present"
            )
        if self._ports.hot and vehicle.on_mirror(stream):
            target = max(target, await self._ports.hot.entrance(self._starts.stream.created))
            lanes.begin_at(target, self._brought_by(vehicle), reached)
        await vehicle.put_at(target, stream, subjects, info, reason=reason, unread=self._leftovers)
        return bool(carried.partitions)

    def _brought_by(self, vehicle: Vehicle) -> list[Partition]:
        """What is handled of what a consumer carries."""
        reached = self._ports.lanes.reached
        return [p for s, p in self._handled.items() if reached(s) is vehicle.reached]

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
            if subject not in self.shards.placeholders:
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
        for vehicle in self.shards.vehicles:
            await vehicle.release_holds()
        ask = self._ports.safe_elsewhere
        if self._leftovers and ask:
            safe = await ask([partition.id for partition in self._leftovers.values()])
            left = {s: p for s, p in self._leftovers.items() if p.id not in safe}
            if left != self._leftovers:
                self._leftovers = left
                assert self._settings.worker_id
                await self.update_worker_consumer(self._settings.worker_id, self._wanted.partitions.values())

    async def _check_stream(self, vehicle: Vehicle) -> None:
        """The consumer is gone; if the stream went with it and is another one now, nothing we know holds."""
        lanes = self._ports.lanes
        stream = await self._ports.api.stream_info(self._starts.stream.name)
        # Looked up only now: another consumer of ours may have found out in the meantime.
        same = stream.created == self._starts.stream.created
        if same and stream.last_seq + 1 >= lanes.resume_of(vehicle.reached):
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
        for other in self.shards.vehicles:
            if other is not vehicle:
                other.engine.new_session("the stream was made anew")

    async def _mistrust(self, vehicle: Vehicle, info: ConsumerInfo) -> None:
        """Somebody else changed the filter: messages may have been passed over, so look for them."""
        _log.error("the consumer's filter was changed by somebody else; putting it right", found=info.subjects[:20])
        reached = vehicle.reached
        if self._each_subject:
            reached.next_seq = min(reached.next_seq, self._starts.record.floor)
            return
        carried = {p.id for p in vehicle.carried.partitions.values()}
        if self._bounds.keys() & carried:
            bound = await self._starts.last_seq()
            self._bounds |= dict.fromkeys(self._bounds.keys() & carried, bound)
        await self._gain([p for s, p in self._owned.partitions.items() if self._ports.lanes.reached(s) is reached])

    async def _gain(self, partitions: list[Partition]) -> int:
        """Find messages of these partitions that their consumer has passed: it must go back for them.

        Returns the sequence of the oldest one, or 0.
        """
        lanes, oldest = self._ports.lanes, 0
        passed = [p for p in partitions if lanes.reached(p.subject).next_seq > 1]
        if not passed:
            return 0
        for partition, seq in zip(passed, await self._starts.probe(passed), strict=True):
            if seq is not None and seq < lanes.reached(partition.subject).next_seq:
                oldest = min(seq, oldest or seq)
                lanes.gain(partition, max(seq, self._starts.position(partition.id, partition.subject)))
        return oldest

    # ── at the start ──────────────────────────────────────────────────────────────────────────────────────────

    def _heed(self, infos: Mapping[int, ConsumerInfo]) -> None:
        """Take in what the consumers of an earlier run have acknowledged, and what they carry."""
        starts = self._starts
        # In a fleet, and where there are states to restore, messages are acknowledged that are still to be handled:
        # only a record that speaks for the same subjects shows that this was not so.
        if infos and not (starts.record.fresh and (starts.granted is not None or self._ports.stateful)):
            starts.raise_by(infos.values(), nobodys=self.shards.placeholders)
        self._keep_leftovers(s for info in infos.values() for s in info.subjects if s not in self._owned.partitions)

    async def _take_up(self, filters: FilterSet) -> None:
        """Work out where each partition starts, from the progress record and existing consumers."""
        lanes, starts = self._ports.lanes, self._starts
        record = starts.record
        if starts.granted is not None or self._ports.stateful:
            await self._take_up_granted(filters)
            return
        if record.fresh:
            self._reach(starts.stream.last_seq + 1 if self._settings.start == "new" else 1)
            return
        self._reach(record.floor)
        if not self.shards.alone:
            self._reach_by_record()
        self._remember(filters)
        for partition in starts.parked(filters) if self._feeds else ():
            self._feed(partition, starts.stream.last_seq)
        uncovered = [p for s, p in filters.partitions.items() if not record.covers(s) and not lanes.has(p.id)]
        if self._each_subject and uncovered:
            # A list of partitions became "every subject": what was not listed starts at its first message.
            first = await starts.first_unfinished(uncovered[0])
            self._reach(min(record.floor, first or record.floor))
            return
        # Those that were behind are not spoken for by the floor either; from the stream they are fed already.
        behind = [p for p in filters.partitions.values() if p.id in record.behind and not lanes.has(p.id)]
        await self._gain(list(dict.fromkeys([*uncovered, *behind])))

    async def _take_up_granted(self, filters: FilterSet) -> None:
        """Others may have had these partitions since the record was written: look where each of them stands."""
        lanes, starts = self._ports.lanes, self._starts
        last_seq = await starts.last_seq()
        self._reach(last_seq + 1)
        self._remember(filters)
        for partition in starts.parked(filters) if self._feeds else ():
            self._feed(partition, last_seq)
        others = [p for p in filters.partitions.values() if not lanes.has(p.id)]
        for partition, seq in zip(others, await starts.probe(others), strict=True):
            reached = lanes.reached(partition.subject)
            reached.next_seq = min(reached.next_seq, seq or reached.next_seq)

    def _reach(self, seq: int) -> None:
        """All consumers have delivered what lies below."""
        for reached in (self._ports.lanes, *(vehicle.reached for vehicle in self.shards.vehicles)):
            reached.next_seq = seq

    def _reach_by_record(self) -> None:
        """Each shard goes on at the lowest position of its own partitions: the floor is that of the slowest shard."""
        record, end = self._starts.record, self._starts.stream.last_seq + 1
        for vehicle in self.shards.vehicles:
            carried = vehicle.carried.partitions.items()
            known = (record.position(p.id, s) for s, p in carried if record.covers(s) and p.id not in record.behind)
            vehicle.reached.next_seq = min(known, default=end)

    def _remember(self, filters: FilterSet) -> None:
        """Keep the positions of partitions that an earlier run had released, parked or owned."""
        lanes, record = self._ports.lanes, self._starts.record
        lanes.restore(record.behind)
        lanes.restore({p.id: record.position(p.id, p.subject) for p in self._starts.no_longer_owned(filters)})
