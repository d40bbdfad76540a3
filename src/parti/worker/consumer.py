"""The durable pull consumer of a worker, and the subjects it carries.

The consumer only delivers; where a partition begins is said by its position. This is what others see of it; the work
is done by its parts, each in a module of its own:

- `cargo`: what is wanted, and what has to be carried besides;
- `handling`: what is owned, and how older messages of what is gained come;
- `sessions`: how a consumer gets to its place and its filter;
- `updates`: changes, coalesced and tried again;
- `succession`: going on where an earlier run has ended.

A worker may carry partitions that it does not own: those that it is to get ready for (`incoming`). Their messages are
let go (limits) or held unacknowledged and unhandled (interest) until they are granted.

A worker with more subjects than one consumer may carry has several (`consumer_shards`), each with its own filter,
session and place in the stream (`parti.worker.shards`). What one has delivered says nothing of the others: wherever
it matters how far reading has got, the consumer is asked that brings the partition (`Floors.reached`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import structlog

from parti.config import Settings
from parti.core.filters import FilterSet, diff_filters
from parti.core.progress import Progress, summarise
from parti.core.retention import INTEREST, retention_named
from parti.errors import ConfigError, PartiError
from parti.jetstream.api import StreamInfo
from parti.model.partition import PartitionLike, Template
from parti.worker.cargo import Cargo
from parti.worker.floors import Reached
from parti.worker.handling import Handling
from parti.worker.sessions import Sessions
from parti.worker.shards import Shards
from parti.worker.standby import can_be_pinned
from parti.worker.starts import Granted, Starts
from parti.worker.succession import Succession
from parti.worker.unowned import Unowned
from parti.worker.updates import Updates
from parti.worker.vehicle import ConsumerPorts, Vehicle

_log = structlog.get_logger("parti.consumer")

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
        self.begun = False
        """It is known where each partition begins; before, the lanes' floor means nothing."""
        self._ports = ports
        self._worker_id = settings.worker_id
        self._look_s = settings.stall_after_s
        self._retention = retention_named(stream.retention)
        only_new = settings.start == "new"
        self._starts = starts = Starts(
            ports.api, ports.lanes, template, stream, progress, only_new=only_new, each_subject=each_subject
        )
        self.shards = shards = Shards(ports, settings, template, starts, self._prepare, one_filter=each_subject)
        self._cargo = cargo = Cargo(ports, settings, template, starts, shards)
        self._unowned = Unowned(ports, template, starts, shards, cargo)
        feeds = self._retention.keeps and settings.ordered
        self._handling = handling = Handling(ports, starts, shards, cargo, feeds=feeds, each_subject=each_subject)
        self._sessions = Sessions(ports, starts, shards, cargo, handling, each_subject=each_subject)
        self._updates = Updates(ports, settings, starts, shards, cargo, handling, self._sessions)
        self._succession = Succession(
            ports,
            starts,
            shards,
            cargo,
            handling,
            only_new=only_new,
            each_subject=each_subject,
            takes_over=can_be_pinned(settings, stream),
        )
        ports.lanes.lets_go = feeds

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
        return self._handling.owned.subjects

    def follow(self, stream: StreamInfo) -> None:
        """Learn which subjects the stream has now; one that was made anew is noticed elsewhere."""
        if stream.created == self._starts.stream.created:
            self._starts.stream = stream

    def grant(self, granted: Granted) -> None:
        """Say where partitions begin that others have had, and which ones to get ready for."""
        self._starts.grant(granted)

    async def _prepare(self, vehicle: Vehicle, reason: str) -> bool:
        return await self._sessions.prepare(vehicle, reason)

    # ── from start to stop ────────────────────────────────────────────────────────────────────────────────────

    async def start(self, partitions: Iterable[PartitionLike]) -> None:
        """Create or take up the consumer with these partitions and begin to pull."""
        cargo, handling = self._cargo, self._handling
        owned = cargo.build(partitions)
        # A state may be restored sooner than it is known where the stream ends: nothing begins before that.
        handling.own(owned, begin=False)
        infos = await self.shards.find()
        await self._succession.heed(infos)
        cargo.want(owned)
        self.shards.begin_with(cargo.to_carry(), infos)
        await self._succession.take_up(FilterSet(handling.handled, 0))
        if self._ports.stateful:
            await self._starts.begin_with_news(owned.partitions.values())
        carried = self.shards.carried
        cargo.taken = cargo.to_take(carried)
        incoming = handling.expect(carried.partitions)
        if not handling.feeds:
            await handling.gain(incoming)
        for vehicle in self.shards.vehicles:
            if self._retention is INTEREST and vehicle.existed:
                await vehicle.holds.find(await self._starts.last_seq())
        self.begun = True
        for engine in self.shards.engines:
            await engine.start()
        handling.bounds = dict.fromkeys((p.id for p in carried.partitions.values()), 0)
        self._updates.applied(diff_filters((), carried.subjects))
        handling.own(handling.owned)

    async def stop(self) -> None:
        """Stop pulling; the consumer stays on the server, where the next start finds it."""
        await self._updates.stop()
        for engine in self.shards.engines:
            await engine.stop()

    def let_go(self, keep: Iterable[PartitionLike]) -> bool:
        """Handle nothing more of partitions that are not in `keep`, and begin with those that are and are carried.

        Returns whether others may have what was let go; otherwise the consumer has to be updated first.
        """
        wanted = self._cargo.build(keep)
        # Also for an update that is under way: it must not bring back what is let go here.
        self._cargo.want(wanted)
        if not self._cargo.overlaps or self._updates.applying or self.shards.changing:
            return False
        ready = self.shards.carried.partitions.keys() if self._handling.feeds else self._cargo.taken
        self._handling.own(FilterSet({s: p for s, p in wanted.partitions.items() if s in ready}, 0))
        return True

    async def update_worker_consumer(self, worker_id: str, partitions: Iterable[PartitionLike]) -> None:
        """Make the consumer carry exactly these partitions.

        Returns when they, or a newer set, are in force. Raises `ConfigError` (too many subjects, overlap, outside
        the stream) before anything changes, or the last error when the server refused all attempts; the previous
        set stays active then.
        """
        if worker_id != self._worker_id:
            raise ConfigError(f"this consumer belongs to worker {self._worker_id!r}, not to {worker_id!r}")
        self._cargo.want(self._cargo.build(partitions))
        await self._updates.bring_about()

    def note_acknowledged(self, now_s: float) -> None:
        """Note how far all is acknowledged, on every consumer."""
        for vehicle in self.shards.vehicles:
            vehicle.note_acknowledged(now_s)

    async def watch(self) -> None:
        """Look from time to time whether the consumers are still as they should be, until cancelled."""
        while True:
            await asyncio.sleep(self._look_s)
            for vehicle in list(self.shards.vehicles):
                try:
                    await self._sessions.verify(vehicle)
                except PartiError as error:
                    _log.debug("cannot look at a consumer, will try again", consumer=vehicle.name, error=str(error))

    async def tidy_up(self) -> None:
        """Give up holds and partitions of an earlier process that are no longer needed here."""
        for vehicle in self.shards.vehicles:
            await vehicle.release_holds()
        await self._unowned.release()
        dropped = await self._cargo.drop_leftovers()
        if await self._unowned.keep() or dropped:
            await self.update_worker_consumer(self._worker_id, self._cargo.wanted.partitions.values())

    # ── the record ────────────────────────────────────────────────────────────────────────────────────────────

    def summarise(self, writer: str) -> Progress:
        """The positions as of now, to be stored; `Lanes.stored` is called when they are."""
        lanes, stream = self._ports.lanes, self._starts.stream
        lanes.summarised()
        # Not before the server has been told: until its old messages are known, the floor must not speak for a
        # partition.
        covered = self._handling.handled.keys() & self.shards.carried.partitions.keys()
        floor = lanes.floors.floor
        # Partitions without a lane have not moved since the record was read.
        positions = self._starts.record.ahead | dict(lanes.roster.positions())
        for reached in lanes.floors.carriers:
            if lanes.floors.floor_of(reached) > floor + _FAR_AHEAD:
                self._note_ahead(positions, reached, covered)
        return summarise(
            stream=stream.name,
            stream_created=stream.created,
            floor=floor,
            covered=tuple(sorted(covered)),
            positions=positions.items(),
            behind=lanes.roster.behind(),
            needs=lanes.floors.resume_at,
            trying=lanes.trying,
            failed=lanes.roster.still_failed(),
            writer=writer,
        )

    def _note_ahead(self, positions: dict[str, int], reached: Reached, covered: Iterable[str]) -> None:
        """Say of each partition how far a shard is that is far ahead of the floor, which a slower one holds back.

        Without it nothing would be lost, but after a restart the shard would deliver again all that it has finished.
        """
        floors = self._ports.lanes.floors
        floor = floors.floor_of(reached)
        for subject in covered:
            if floors.reached(subject) is reached:
                partition_id = self.shards.carried.partitions[subject].id
                positions[partition_id] = max(positions.get(partition_id, 0), floor)
