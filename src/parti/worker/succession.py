"""At the start: going on where an earlier run has ended, by its record and by the consumers that it has left."""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from parti.core.filters import FilterSet
from parti.errors import PartiError
from parti.jetstream.api import ConsumerInfo
from parti.jetstream.unacknowledged import find_unacknowledged
from parti.model.subjects import has_wildcard
from parti.worker.cargo import Cargo
from parti.worker.handling import Handling
from parti.worker.shards import Shards
from parti.worker.starts import Starts
from parti.worker.vehicle import ConsumerPorts

_log = structlog.get_logger("parti.succession")


class Succession:
    """Works out how far each consumer has got before it pulls for the first time.

    Where that is not known for certain the lower sequence counts: it costs deliveries that are recognised as
    finished, and loses nothing. A partition that the record does not speak for is looked up in the stream.
    """

    def __init__(
        self,
        ports: ConsumerPorts,
        starts: Starts,
        shards: Shards,
        cargo: Cargo,
        handling: Handling,
        *,
        only_new: bool,
        each_subject: bool,
        takes_over: bool,
    ) -> None:
        """`takes_over`: the earlier run may have been another process that stopped in the middle of something."""
        self._ports = ports
        self._lanes = ports.lanes
        self._starts = starts
        self._shards = shards
        self._cargo = cargo
        self._handling = handling
        self._only_new = only_new
        self._each_subject = each_subject
        self._takes_over = takes_over

    async def heed(self, infos: Mapping[int, ConsumerInfo]) -> None:
        """Take in what the consumers of an earlier run have acknowledged, and what they carry."""
        starts, owned = self._starts, self._handling.owned.partitions
        # In a fleet, and where there are states to restore, messages are acknowledged that are still to be handled:
        # only a record that speaks for the same subjects shows that this was not so.
        if infos and not (starts.record.fresh and (starts.granted is not None or self._ports.stateful)):
            beyond = await self._acknowledged_beyond(infos) if self._takes_over and not starts.record.closed else {}
            starts.raise_by(infos.values(), nobodys=self._shards.placeholders, beyond=beyond)
        self._cargo.keep_leftovers(s for info in infos.values() for s in info.subjects if s not in owned)

    async def _acknowledged_beyond(self, infos: Mapping[int, ConsumerInfo]) -> dict[str, int]:
        """How far each subject is acknowledged, above the floor of its consumer; without those that are not known.

        Partitions are handled side by side: one that takes long holds back the floor, not the others, and what these
        have finished since the record was written must not be handled again.
        """
        found: dict[str, int] = {}
        for info in infos.values():
            subjects = self._starts.carried_by(info)
            if not info.ack_pending or any(map(has_wildcard, subjects)):
                continue
            try:
                delivered = await find_unacknowledged(self._ports.connection, self._starts.stream.name, info)
            except PartiError as error:
                delivered, why = None, str(error)
            else:
                why = "the server has not told all of it in time"
            if delivered is None:
                _log.warning(
                    "cannot tell what is acknowledged; what was finished last may be handled again",
                    consumer=info.name,
                    error=why,
                )
                continue
            _log.info(
                "found out what is acknowledged",
                consumer=info.name,
                in_flight=info.ack_pending,
                partitions=len(delivered.open_from),
            )
            found |= {subject: delivered.position(subject) for subject in subjects}
        return found

    async def take_up(self, filters: FilterSet) -> None:
        """Work out where each partition starts, from the progress record and existing consumers."""
        roster, starts = self._lanes.roster, self._starts
        record = starts.record
        if starts.granted is not None or self._ports.stateful:
            await self._take_up_granted(filters)
            return
        if record.fresh:
            self._reach(starts.stream.last_seq + 1 if self._only_new else 1)
            return
        self._reach(record.floor)
        if not self._shards.alone:
            self._reach_by_record()
        self._remember(filters)
        for partition in starts.parked(filters) if self._handling.feeds else ():
            self._handling.feed(partition, starts.stream.last_seq)
        uncovered = [p for s, p in filters.partitions.items() if not record.covers(s) and not roster.has(p.id)]
        if self._each_subject and uncovered:
            # A list of partitions became "every subject": what was not listed starts at its first message.
            first = await starts.first_unfinished(uncovered[0])
            self._reach(min(record.floor, first or record.floor))
            return
        # Those that were behind are not spoken for by the floor either; from the stream they are fed already.
        behind = [p for p in filters.partitions.values() if p.id in record.behind and not roster.has(p.id)]
        await self._handling.gain(list(dict.fromkeys([*uncovered, *behind])))

    async def _take_up_granted(self, filters: FilterSet) -> None:
        """Others may have had these partitions since the record was written: look where each of them stands."""
        lanes, starts = self._lanes, self._starts
        last_seq = await starts.last_seq()
        self._reach(last_seq + 1)
        self._remember(filters)
        for partition in starts.parked(filters) if self._handling.feeds else ():
            self._handling.feed(partition, last_seq)
        others = [p for p in filters.partitions.values() if not lanes.roster.has(p.id)]
        for partition, seq in zip(others, await starts.probe(others), strict=True):
            reached = lanes.floors.reached(partition.subject)
            reached.next_seq = min(reached.next_seq, seq or reached.next_seq)

    def _reach(self, seq: int) -> None:
        """All consumers have delivered what lies below."""
        for reached in (self._lanes, *(vehicle.reached for vehicle in self._shards.vehicles)):
            reached.next_seq = seq

    def _reach_by_record(self) -> None:
        """Each shard goes on at the lowest position of its own partitions: the floor is that of the slowest shard."""
        record, end = self._starts.record, self._starts.stream.last_seq + 1
        for vehicle in self._shards.vehicles:
            carried = vehicle.carried.partitions.items()
            known = (record.position(p.id, s) for s, p in carried if record.covers(s) and p.id not in record.behind)
            vehicle.reached.next_seq = min(known, default=end)

    def _remember(self, filters: FilterSet) -> None:
        """Keep the positions of partitions that an earlier run had released, parked or owned."""
        roster, record = self._lanes.roster, self._starts.record
        roster.restore(record.behind)
        gone = self._starts.no_longer_owned(filters)
        roster.restore({p.id: record.position(p.id, p.subject) for p in gone}, let_go=(p.subject for p in gone))
