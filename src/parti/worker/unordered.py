"""The unordered mode: every message on its own, retried by the server's redelivery."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from parti.core.lane import Lane, Phase, Verdict
from parti.core.retry import TryAgain
from parti.core.scatter import Scatter
from parti.model.message import Message, Ownership
from parti.worker.floors import Floors, Reached
from parti.worker.lanes import Lanes


class UnorderedFloors(Floors):
    """Floors where messages finish in any order: the lowest message in hand, or given back, is the floor."""

    def __init__(
        self,
        alone: Reached,
        lanes: Mapping[str, Lane],
        scatter: Scatter,
        in_hand: Mapping[int, Lane],
        owed: Mapping[int, Ownership],
    ) -> None:
        super().__init__(alone, lanes, ())
        self._scatter = scatter
        self._in_hand = in_hand
        self._owed = owed

    @property
    def floor(self) -> int:
        """Every message of an owned partition below this sequence is finished."""
        return self._scatter.floor(min([r.next_seq for r in self.carriers] or [self._alone.next_seq]))

    def floor_of(self, reached: Reached) -> int:
        """The floor of what one consumer brings."""
        if not self.carriers:
            return self.floor
        mine = [seq for seq, lane in self._in_hand.items() if self.reached_for(lane) is reached]
        owed = [seq for seq, own in self._owed.items() if self.reached(own.partition.subject) is reached]
        return min([*mine, *owed], default=reached.next_seq)


class UnorderedLanes(Lanes):
    """A lane for each message: nothing waits for anything else.

    A failed message is given back with a delay and counted by the server; the attempt is its delivery count.
    """

    def __init__(self, **options: Any) -> None:
        self._scatter = Scatter()
        self._in_hand: dict[int, Lane] = {}
        self._owed: dict[int, Ownership] = {}
        self._attempts: dict[int, int] = {}
        super().__init__(**options)

    def _make_floors(self, lanes: Mapping[str, Lane]) -> Floors:
        return UnorderedFloors(self, lanes, self._scatter, self._in_hand, self._owed)

    def deliver(self, subject: bytes, reply: bytes, header: bytes | None, payload: bytes, seq: int) -> None:
        """Take in one delivery."""
        entry = self._by_subject.get(subject) or self._route(subject)
        if entry is None:
            return
        partition_lane, name = entry
        self.cursor = seq + 1
        self.next_seq = max(self.next_seq, seq + 1)
        message = Message(name, payload, seq, partition_lane.ownership, reply, header, time.time())
        # A RESET makes the server forget how often it delivered; what failed here is remembered here.
        message.attempt = max(message.deliveries, self._attempts.get(seq, 0) + 1)
        finished = seq < partition_lane.position
        verdict = Verdict.FINISHED if finished else self._scatter.offer(seq, behind=partition_lane.behind)
        if verdict is not Verdict.ACCEPTED:
            self._refuse(partition_lane, message, verdict)
            return
        if message.attempt > 1:
            self._metrics.redeliveries.value += 1
        self.held += 1
        self._owed.pop(seq, None)
        lane = self._in_hand[seq] = Lane(partition_lane.ownership)
        lane.effort = partition_lane.effort
        lane.waiting.append(message)
        lane.phase = Phase.READY
        self.ready.append(lane)

    def try_again(self, lane: Lane, message: Message, decision: TryAgain) -> None:
        """Give the message back: the server delivers it again after the delay."""
        self._acks.give_back(message.reply, decision.delay_s)
        self._scatter.give_back(message.seq)
        self._in_hand.pop(message.seq, None)
        self._owed[message.seq] = lane.ownership
        self._attempts[message.seq] = message.attempt
        self.held -= 1

    def still_fails(self, partition_id: str, seq: int) -> bool:
        """Whether a message that has failed is still to be handled here."""
        return seq in self._attempts

    def settle(
        self,
        lane: Lane,
        more: bool = False,
        message: Message | None = None,
        started_s: float = 0.0,
        finished_s: float = 0.0,
    ) -> None:
        """The message is finished."""
        if self._has(lane):
            seq = lane.waiting[0].seq
            del self._in_hand[seq]
            self._attempts.pop(seq, None)
            self._scatter.finish(seq)
        super().settle(lane, more, message)

    def _has(self, lane: Lane) -> bool:
        """Whether its message is in hand; after the stream was recreated, its sequence may be that of another one."""
        return bool(lane.waiting) and self._in_hand.get(lane.waiting[0].seq) is lane

    def closed(self, lane: Lane) -> int:
        """Drop what waits of a partition that is no longer ours; what runs finishes.

        The position is the lowest message that is not finished, running ones included: they may still fail.
        """
        position = super().closed(lane)
        mine = {seq: own for seq, own in self._in_hand.items() if own.ownership is lane.ownership}
        owed = [seq for seq, ownership in self._owed.items() if ownership is lane.ownership]
        # A lane that is still behind has only seen what was delivered in this session.
        reached = self.floors.reached_for(lane)
        seen = reached.cursor if lane.behind else reached.next_seq
        position = min([*mine, *owed, max(position, seen)])
        for seq, own in mine.items():
            with self.lock:
                waits = own.phase is Phase.READY
                own.phase = Phase.CLOSED
            if waits:
                self._forget(own, seq)
        for seq in owed:
            del self._owed[seq]
            self._scatter.forget(seq)
        return position

    def refence(self, lane: Lane, ownership: Ownership) -> None:
        """What has not been started carries this ownership, and so does what was given back."""
        before = lane.ownership
        super().refence(lane, ownership)
        for own in self._in_hand.values():
            if own.ownership is before:
                super().refence(own, ownership)
        self._owed.update({seq: ownership for seq, owed in self._owed.items() if owed is before})

    @property
    def leaving(self) -> tuple[str, ...]:
        """Partitions that were released and of which a handler still runs."""
        running = {lane.ownership.partition.id for lane in self._in_hand.values() if lane.phase is Phase.CLOSED}
        return tuple(running - self.roster.lanes.keys())

    def abandon(self, lane: Lane) -> None:
        """The handler of a released partition failed: its message is no longer ours, unless it came back."""
        if not self._has(lane):
            return
        message = lane.waiting[0]
        if lane.ownership.partition.id in self.roster.lanes:
            self.try_again(lane, message, TryAgain(0.0))
        else:
            self._forget(lane, message.seq)

    def _forget(self, lane: Lane, seq: int) -> None:
        lane.waiting.clear()
        self._in_hand.pop(seq, None)
        self._attempts.pop(seq, None)
        self._scatter.forget(seq)
        self.held -= 1

    def start_over(self) -> None:
        """The stream was made anew: forget everything."""
        super().start_over()
        for lane in self._in_hand.values():
            with self.lock:
                lane.phase = Phase.CLOSED
            for message in lane.waiting:
                message.reply = b""
        for kept in (self._in_hand, self._owed, self._attempts):
            kept.clear()
        self._scatter.start_over()

    def keep_alive(self, older_than_s: float) -> None:
        """Tell the server of everything that has waited or run this long that it is still in hand."""
        limit = time.time() - older_than_s
        for lane in self._in_hand.values():
            for message in lane.waiting:
                if message.received_s <= limit:
                    self._acks.in_progress(message.reply)

    def queued(self) -> Mapping[str, int]:
        """How many messages are in hand, by partition."""
        return Counter(lane.ownership.partition.id for lane in self._in_hand.values())

    def running_lanes(self) -> list[Lane]:
        """Messages that are with a runner."""
        return [lane for lane in self._in_hand.values() if lane.phase is Phase.RUNNING and lane.waiting]
