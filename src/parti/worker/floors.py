"""How far a worker has got: below which sequence all is finished, and where each of its consumers has to go on.

A lane knows the position of its own partition. What holds for all of them is the floor, which a record can state in
one number; lanes that the floor does not speak for are `behind` and stand for themselves.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Protocol

import structlog

from parti.core.lane import Lane

_log = structlog.get_logger("parti.lanes")


class Reached(Protocol):
    """How far a consumer has got. A worker's only consumer has it in its lanes, several have it each for itself."""

    next_seq: int
    """One past the highest sequence that was ever delivered."""
    cursor: int
    """One past the last sequence that was delivered in this session."""


class Floors:
    """The floor of all lanes, and of those that one consumer brings; never above a message that is unfinished.

    `alone` is how far a worker's only consumer has got. `lanes` are by partition id, and `keeping` are parked ones
    whose position is not stored yet: the floor still speaks for them. Both are looked at, never changed.
    """

    def __init__(self, alone: Reached, lanes: Mapping[str, Lane], keeping: Container[Lane]) -> None:
        self.carriers: tuple[Reached, ...] = ()
        """With several consumers: those that carry something. What each has delivered says nothing of the others."""
        self._alone = alone
        self._lanes = lanes
        self._keeping = keeping
        self._carrier_of: Mapping[str, Reached] = {}

    def carry(self, carrier_of: Mapping[str, Reached]) -> None:
        """Say which of several consumers carries a subject; one alone needs no saying."""
        self._carrier_of = carrier_of
        self.carriers = tuple(dict.fromkeys(carrier_of.values()))

    def reached(self, subject: str) -> Reached:
        """How far the consumer has got that brings a partition."""
        return self._carrier_of.get(subject, self._alone)

    def reached_for(self, lane: Lane) -> Reached:
        """How far the consumer has got that brings what is in a lane."""
        return self.reached(lane.ownership.partition.subject)

    @property
    def floor(self) -> int:
        """Every message of an owned partition that is not `behind` is finished below this sequence.

        With several consumers, a slow one has undelivered messages below what a fast one has delivered: the floor is
        never above the lowest of them.
        """
        return min([self._lowest(self._lanes.values(), self._alone.next_seq), *(r.next_seq for r in self.carriers)])

    def floor_of(self, reached: Reached) -> int:
        """The floor of what one consumer brings."""
        return self._lowest(self._brought_by(reached), reached.next_seq)

    def _lowest(self, lanes: Iterable[Lane], default: int) -> int:
        keeping = self._keeping
        floors = (lane.floor for lane in lanes if lane.waiting and (not lane.behind or lane in keeping))
        return min((f for f in floors if f is not None), default=default)

    def _brought_by(self, reached: Reached) -> Iterable[Lane]:
        lanes = self._lanes.values()
        return [lane for lane in lanes if self.reached_for(lane) is reached] if self.carriers else lanes

    @property
    def resume_at(self) -> int:
        """The lowest sequence that has to be delivered (again), by whichever consumer."""
        return self._resume(self._lanes.values(), self.floor)

    def resume_of(self, reached: Reached) -> int:
        """The lowest sequence that one consumer has to deliver (again) in a new session."""
        return self._resume(self._brought_by(reached), self.floor_of(reached))

    def _resume(self, lanes: Iterable[Lane], floor: int) -> int:
        behind = [lane.position for lane in lanes if lane.behind and not lane.parked]
        return max(1, min([floor, *behind]))

    def catch_up(self) -> None:
        """Let the floor speak again for lanes that have nothing left below it."""
        lanes = self._lanes.values()
        done = [lane for lane in lanes if lane.behind and lane.caught_up(self.reached_for(lane).cursor)]
        for lane in done:
            lane.behind = False
            _log.debug("partition has caught up", partition=lane.ownership.partition.id, position=lane.position)
        if done:
            _log.info("partitions have caught up", partitions=len(done))

    def start_over(self) -> None:
        """The stream was made anew: nobody has delivered anything of it."""
        for reached in (self._alone, *self.carriers):
            reached.next_seq = reached.cursor = 1
