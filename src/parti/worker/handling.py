"""Which partitions a worker handles, and how the older messages of one that it gains come to its lane.

The consumer only delivers; where a partition begins is said by its position. What a partition has below that which
the consumer has delivered already is fed from the stream (`feeds`), or the consumer goes back for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from parti.core.filters import FilterSet
from parti.model.partition import Partition
from parti.worker.cargo import Cargo
from parti.worker.shards import Shards
from parti.worker.starts import Starts
from parti.worker.vehicle import NOTHING, ConsumerPorts, Vehicle


class Handling:
    """What is owned, told to the lanes; a partition with a state is handled only when its state is restored.

    No message of a partition that is gained is passed over: what lies between its position and that which has been
    delivered is fed to its lane, or is waited for.
    """

    def __init__(
        self, ports: ConsumerPorts, starts: Starts, shards: Shards, cargo: Cargo, *, feeds: bool, each_subject: bool
    ) -> None:
        self.feeds = feeds
        """Older messages are read from the stream; otherwise the consumer is set back for them."""
        self.owned = NOTHING
        """What may be handled."""
        self.bounds: dict[str, int] = {}
        """The stream's last sequence after a partition was added: what is newer is delivered."""
        self._ports = ports
        self._lanes = ports.lanes
        self._starts = starts
        self._shards = shards
        self._cargo = cargo
        self._each_subject = each_subject

    @property
    def handled(self) -> dict[str, Partition]:
        """What is owned and, where there is a state to restore, has it."""
        stateful = self._ports.stateful
        if stateful is None:
            return self.owned.partitions
        return {s: p for s, p in self.owned.partitions.items() if stateful.has_begun(p.id)}

    def brought_by(self, vehicle: Vehicle) -> list[Partition]:
        """What is handled of what a consumer carries."""
        reached = self._lanes.floors.reached
        return [p for s, p in self.handled.items() if reached(s) is vehicle.reached]

    def own(self, owned: FilterSet, *, begin: bool = True) -> None:
        """Handle exactly these; partitions that are new are fed, or what was held for them is let through.

        `begin`: those with a state are restored.
        """
        before, stateful = self.handled, self._ports.stateful
        gone = [p for s, p in self.owned.partitions.items() if s not in owned.partitions]
        self.owned = owned
        # What waited in their lanes is dropped with them: should they come back, somebody has to go back for it.
        self._cargo.taken -= {partition.subject for partition in gone}
        self._lanes.roster.own(self.handled, self._starts.position)
        if stateful:
            for partition in gone:
                stateful.end(partition)
            for partition in owned.partitions.values():
                if begin and not stateful.has_begun(partition.id):
                    start = partial(self._starts.position, partition.id, partition.subject)
                    stateful.begin(partition, start, partial(self._restored, partition))
        if not self.feeds:
            return
        gained = [
            (partition, max(bound, self._lanes.floors.reached(subject).next_seq - 1))
            for subject, partition in self.handled.items()
            if subject not in before
            and (bound := self.bounds.get(partition.id)) is not None
            and not self._each_subject
        ]
        self._feed_or_go_back(gained)

    def _restored(self, partition: Partition, position: int) -> None:
        """The handler has the state of a partition: it begins where the state was saved."""
        roster, subject = self._lanes.roster, partition.subject
        if subject not in self.owned.partitions:
            return
        roster.own(self.handled, self._starts.position)
        bound = max(self.bounds.get(partition.id, 0), self._lanes.floors.reached(subject).next_seq - 1)
        roster.forget_position(partition.id)
        self._starts.begin_at(partition.id, position)
        if position <= bound:
            roster.gain(partition, position, feed_to=bound)

    def _feed_or_go_back(self, gained: list[tuple[Partition, int]]) -> None:
        """Have partitions brought from their positions on: by the hot mirror if that is much, else by feeding.

        The stream is searched for what is fed, subject by subject, which takes the server ten times as long.
        """
        hot, starts = self._ports.hot, self._starts
        spans = [(p, max(1, starts.position(p.id, p.subject)), bound) for p, bound in gained]
        back = hot.worth_going_back([(position, bound) for _, position, bound in spans]) if hot else 0
        for partition, position, bound in spans:
            if back and back <= position <= bound:
                # Nothing may be delivered before the new session: it would overtake what is gone back for.
                self._lanes.roster.gain(partition, position)
                self._shards.carrier(partition.subject).engine.new_session("goes back on the hot mirror")
            else:
                self.feed(partition, bound)

    def feed(self, partition: Partition, bound: int) -> None:
        """Have a partition read from the stream, from its position to what has been delivered; later ones come."""
        position = self._starts.position(partition.id, partition.subject)
        if position <= bound:
            self._lanes.roster.gain(partition, position, feed_to=bound)

    def expect(self, carried: Mapping[str, Partition]) -> list[Partition]:
        """Tell the lanes which of what is carried to get ready for; returns these."""
        kept = self.handled.keys() | self._cargo.leftovers.keys()
        incoming = {s: p for s, p in carried.items() if s not in kept}
        self._lanes.roster.expect(incoming)
        return list(incoming.values())

    async def gain(self, partitions: list[Partition]) -> int:
        """Find messages of these partitions that their consumer has passed: it must go back for them.

        Returns the sequence of the oldest one, or 0.
        """
        reached, oldest = self._lanes.floors.reached, 0
        passed = [p for p in partitions if reached(p.subject).next_seq > 1]
        if not passed:
            return 0
        for partition, seq in zip(passed, await self._starts.probe(passed), strict=True):
            if seq is not None and seq < reached(partition.subject).next_seq:
                oldest = min(seq, oldest or seq)
                position = max(seq, self._starts.position(partition.id, partition.subject))
                self._lanes.roster.gain(partition, position)
        return oldest

    def take_back(self, partitions: Iterable[Partition]) -> None:
        """Partitions that were let go for an update that failed: what waited in their lanes must come again."""
        for partition in partitions:
            self._lanes.roster.gain(partition, self._starts.position(partition.id, partition.subject))

    def start_over(self) -> None:
        """The stream was made anew: all of it is going to be delivered."""
        self.bounds = dict.fromkeys(self.bounds, 0)
