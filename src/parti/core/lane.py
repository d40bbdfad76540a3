"""A lane: the messages of one partition, handled strictly in stream order.

The head of `waiting` is the message that runs (or waits for its next attempt); it leaves only when it is
finished. `position` is the promise of the whole system: every message of the partition with a lower sequence is
finished. Guards Order and NoLoss: a delivery below the position is skipped, one that already waits is a
duplicate, one that was overtaken is put where it belongs.
"""

from __future__ import annotations

import enum
from collections import deque
from itertools import islice

from parti.model.message import Message, Ownership


class Verdict(enum.Enum):
    """What a lane says of a delivery."""

    ACCEPTED = "accepted"
    FINISHED = "finished"
    DUPLICATE = "duplicate"
    OVERTAKEN = "overtaken"


class Phase(enum.Enum):
    """What a lane is doing."""

    IDLE = "idle"
    READY = "ready"
    RUNNING = "running"
    BACKOFF = "backoff"
    CLOSED = "closed"


_ACCEPTED = Verdict.ACCEPTED


class Lane:
    """The queue and the position of one partition."""

    __slots__ = ("ownership", "phase", "position", "started_s", "waiting")

    def __init__(self, ownership: Ownership, position: int = 0) -> None:
        self.ownership = ownership
        self.position = position
        self.waiting: deque[Message] = deque()
        self.phase = Phase.IDLE
        self.started_s = 0.0

    def offer(self, message: Message) -> Verdict:
        """Take in a delivery. Only ACCEPTED and OVERTAKEN put it into the lane."""
        seq = message.seq
        if seq < self.position:
            return Verdict.FINISHED
        waiting = self.waiting
        if not waiting or seq > waiting[-1].seq:
            waiting.append(message)
            return _ACCEPTED
        return self._offer_late(message)

    def _offer_late(self, message: Message) -> Verdict:
        seqs = [other.seq for other in self.waiting]
        if message.seq in seqs:
            return Verdict.DUPLICATE
        index = sum(seq < message.seq for seq in seqs)
        if index == 0 and self.phase in {Phase.RUNNING, Phase.BACKOFF}:
            # The head has been started already; the late one can only come next.
            self.waiting.insert(1, message)
            return Verdict.OVERTAKEN
        self.waiting.insert(index, message)
        return _ACCEPTED

    def finish(self) -> Message:
        """The head is handled or dead-lettered: move the position past it, but not past one that it overtook."""
        waiting = self.waiting
        message = waiting.popleft()
        position = message.seq + 1
        if waiting and waiting[0].seq < position:
            position = waiting[0].seq
        if position > self.position:  # noqa: PLR1730 - max() costs a call on the hot path
            self.position = position
        return message

    @property
    def floor(self) -> int | None:
        """The lowest sequence that is not finished, or None when nothing waits."""
        # Only the second can be lower than the head, after it was overtaken.
        return min((message.seq for message in islice(self.waiting, 2)), default=None)
