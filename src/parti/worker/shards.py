"""The consumers of a worker: one, or as many as its subjects need (`consumer_shards`).

What is on which of them is decided in `parti.core.shards`, what it takes to change that in `parti.worker.consumer`. A
subject is on one of them at a time and never goes from one to another. One that has run empty keeps a filter that
matches nothing: it costs nothing, and on no kind of stream does that cost a message.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import structlog

from parti.config import Settings
from parti.core.consumer_config import shard_number
from parti.core.filters import FilterSet
from parti.core.retention import INTEREST, retention_named
from parti.core.shards import place
from parti.jetstream.api import ConsumerInfo
from parti.jetstream.pull import PullEngine
from parti.model.partition import Partition, Template
from parti.worker.intake import ShardIntake
from parti.worker.starts import Starts
from parti.worker.vehicle import NOTHING, ConsumerPorts, Vehicle

_log = structlog.get_logger("parti.shards")


class Shards:
    """The consumers of one worker, and what each carries. `prepare` is asked before each session of one."""

    def __init__(
        self,
        ports: ConsumerPorts,
        settings: Settings,
        template: Template,
        starts: Starts,
        prepare: Callable[[Vehicle, str], Awaitable[bool]],
        *,
        one_filter: bool = False,
    ) -> None:
        """`one_filter`: every subject is read, through one wildcard."""
        self.alone = settings.consumer_shards == 1 or one_filter
        """There is one consumer, and will not be another."""
        self.vehicles: list[Vehicle] = []
        self.engines: tuple[PullEngine, ...] = ()
        self.carried = NOTHING
        """What all of them carry."""
        self._ports = ports
        self._settings = settings
        self._template = template
        self._starts = starts
        self._prepare = prepare
        self._suspended = False
        self._soon: dict[str, Vehicle] = {}
        """What is on its way to which consumer."""
        self._add(self._make(1))

    def _make(self, number: int) -> Vehicle:
        return Vehicle(
            self._ports, self._settings, self._template, self._starts, self._prepare, number, alone=self.alone
        )

    def _add(self, vehicle: Vehicle) -> None:
        self.vehicles.append(vehicle)
        self.engines = tuple(v.engine for v in self.vehicles)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the consumers."""
        return tuple(vehicle.name for vehicle in self.vehicles)

    @property
    def placeholders(self) -> frozenset[str]:
        """What those carry that carry nothing."""
        return frozenset(vehicle.placeholder() for vehicle in self.vehicles)

    @property
    def kept(self) -> frozenset[str]:
        """Subjects that nobody owns and that holds keep the messages of."""
        return frozenset(s for v in self.vehicles for subjects in v.holds.kept.values() for s in subjects)

    @property
    def filters(self) -> int:
        """How many filters the server has to look at."""
        return sum(len(vehicle.told) for vehicle in self.vehicles)

    @property
    def cursor(self) -> int:
        """Everything before it has been delivered, by all consumers that carry something, in their sessions."""
        lanes = self._ports.lanes
        return min((reached.cursor for reached in lanes.floors.carriers), default=lanes.cursor)

    @property
    def changing(self) -> bool:
        """Whether the filter of one, or its place in the stream, is being changed."""
        return any(vehicle.lock.locked() for vehicle in self.vehicles)

    @property
    def healthy(self) -> bool:
        """Whether all pulls stand, or deliberately do not."""
        return all(engine.healthy for engine in self.engines)

    def refill(self) -> None:
        """Send pulls for the room there is."""
        for engine in self.engines:
            engine.refill()

    def new_session(self, reason: str) -> None:
        """Begin anew everywhere."""
        for engine in self.engines:
            engine.new_session(reason)

    def carrier(self, subject: str) -> Vehicle:
        """The consumer that brings a subject."""
        return next((v for v in self.vehicles if subject in v.carried.partitions), self.vehicles[0])

    def suspend(self) -> None:
        """Stop pulling until `unsuspend`, whatever else happens."""
        self._suspended = True
        for engine in self.engines:
            engine.suspend()

    def unsuspend(self, reason: str) -> None:
        """Go on."""
        self._suspended = False
        for engine in self.engines:
            engine.unsuspend(reason)

    def widen(self, pattern: str, reason: str) -> None:
        """Read through one wide filter (empty: through one for each subject); what is not carried is let go.

        Only for a worker with one consumer: of several, each would bring everything.
        """
        assert self.alone
        self.vehicles[0].wide = pattern
        self.new_session(f"filter: {reason}")

    # ── what is on which ──────────────────────────────────────────────────────────────────────────────────────

    def begin_with(self, carried: FilterSet, infos: Mapping[int, ConsumerInfo]) -> None:
        """Share out what is to be carried from the start, given what an earlier run has left."""
        parts = self._parts(carried, {s: number for number, info in infos.items() for s in info.subjects})
        for number in sorted(parts.keys() - {v.number for v in self.vehicles}):
            self._add(self._make(number))
        for vehicle in self.vehicles:
            self.carries(vehicle, parts.get(vehicle.number, NOTHING))

    def _parts(self, carried: FilterSet, now: Mapping[str, int]) -> dict[int, FilterSet]:
        """What each consumer is to carry, by its number."""
        if self.alone:
            return {1: carried}
        s = self._settings
        parts: dict[int, dict[str, Partition]] = {}
        for subject, number in place(carried.partitions, now, cap=s.max_subjects, shards=s.consumer_shards).items():
            parts.setdefault(number, {})[subject] = carried.partitions[subject]
        return {number: FilterSet(partitions, 0) for number, partitions in parts.items()}

    async def share_out(self, carried: FilterSet) -> list[tuple[Vehicle, FilterSet]]:
        """What each consumer is to carry; further ones are made as they are needed."""
        parts = self._parts(carried, {s: v.number for v in self.vehicles for s in v.carried.partitions})
        for number in sorted(parts.keys() - {v.number for v in self.vehicles}):
            await self._open(number)
        for vehicle in self.vehicles:
            if vehicle.number in parts and not vehicle.carried.partitions:
                await self._begin_at_the_end(vehicle)
        shared = [(vehicle, parts.get(vehicle.number, NOTHING)) for vehicle in self.vehicles]
        # Before anything is gained: it is gained on the consumer that is going to bring it.
        self._soon = {s: vehicle for vehicle, part in shared for s in part.partitions}
        self._tell_lanes()
        return shared

    def shared_out(self) -> None:
        """All consumers carry their parts, or are not going to."""
        self._soon = {}
        self._tell_lanes()

    async def _open(self, number: int) -> None:
        """Make a further consumer, with nothing to carry yet."""
        vehicle = self._make(number)
        if info := await vehicle.find():
            vehicle.check_owner(info)
        await self._begin_at_the_end(vehicle)
        if self._suspended:
            vehicle.engine.suspend()
        try:
            await vehicle.engine.start()
        except BaseException:
            await vehicle.engine.stop()
            raise
        self._add(vehicle)
        _log.info("this worker has a further consumer", consumer=vehicle.name)

    async def _begin_at_the_end(self, vehicle: Vehicle) -> None:
        """A consumer that carries nothing has delivered all there is.

        Older messages of what it is given are gained, like those of any partition that is added.
        """
        if isinstance(vehicle.reached, ShardIntake):
            vehicle.reached.begin_at(await self._starts.last_seq() + 1)

    def owned_with(self, vehicle: Vehicle, part: FilterSet, before: FilterSet, owned: FilterSet) -> FilterSet:
        """What is owned once one consumer has got its part and the others have what they had before."""
        if self.alone:
            return owned
        changing = vehicle.carried.partitions.keys() | part.partitions.keys()
        others = {s: p for s, p in before.partitions.items() if s not in changing}
        return FilterSet(others | {s: p for s, p in owned.partitions.items() if s in part.partitions}, 0)

    def carried_with(self, vehicle: Vehicle, part: FilterSet) -> dict[str, Partition]:
        """What is carried once one consumer has got its part."""
        others = [v.carried.partitions for v in self.vehicles if v is not vehicle]
        return {s: p for carried in (*others, part.partitions) for s, p in carried.items()}

    def carries(self, vehicle: Vehicle, part: FilterSet) -> None:
        """A consumer carries its part from now on."""
        vehicle.carried = part
        self.carried = part if self.alone else FilterSet(self.carried_with(vehicle, part), 0)
        self._tell_lanes()

    def _tell_lanes(self) -> None:
        """Say which consumer brings what, and what is about to be brought by it."""
        if not self.alone:
            now = {s: v.reached for v in self.vehicles for s in v.carried.partitions}
            self._ports.lanes.floors.carry(now | {s: v.reached for s, v in self._soon.items()})

    # ── of an earlier run ─────────────────────────────────────────────────────────────────────────────────────

    async def find(self) -> dict[int, ConsumerInfo]:
        """Take up the consumers that an earlier run has left; returns them by number."""
        first = self.vehicles[0]
        info = await first.find()
        infos = {1: info} if info else {}
        # Subjects that the record speaks for and the first consumer does not carry may have been on others.
        if not self.alone or set(self._starts.record.covered) - set(info.subjects if info else ()):
            infos |= await self._find_others()
        if self.alone and infos.keys() - {1}:
            _log.warning("this worker goes on with more consumers than consumer_shards until they have run empty")
            self.alone, self.vehicles = False, []
            self._add(self._make(1))
        for number in sorted(infos.keys() - {1}):
            self._add(self._make(number))
        for vehicle in self.vehicles:
            if vehicle.number in infos:
                vehicle.check_owner(infos[vehicle.number])
                vehicle.existed = True
        return infos

    async def _find_others(self) -> dict[int, ConsumerInfo]:
        """The further consumers of an earlier run; those that are too many by now are deleted where possible.

        On an interest stream the server would delete with a consumer what only that consumer needs. So it is read
        until it has run empty.
        """
        api, first, stream = self._ports.api, self.vehicles[0], self._starts.stream.name
        most, found = self._settings.consumer_shards, dict[int, ConsumerInfo]()
        numbers = [shard_number(name, first.name) for name in await api.consumer_names(stream)]
        for number in sorted(filter(None, numbers)):
            vehicle = self._make(number)
            info = await vehicle.find(stream)
            if info is None or (number > most and not vehicle.is_ours(info)):
                continue
            empty = set(info.subjects) <= {vehicle.placeholder()}
            if number > most and (empty or retention_named(self._starts.stream.retention) is not INTEREST):
                _log.info("removing a consumer that is one too many", consumer=vehicle.name, consumer_shards=most)
                await api.delete_consumer(stream, vehicle.name)
            else:
                found[number] = info
        return found
