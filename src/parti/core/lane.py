"""A lane: the messages of one partition, handled strictly in stream order.

The head of `waiting` is the message that runs (or waits for its next attempt); it leaves only when it is
finished. `position` is the promise of the whole system: every message of the partition with a lower sequence is
finished. Guards Order and NoLoss: a delivery below the position is skipped, one that already waits is a
duplicate, one that was overtaken is put where it belongs.

A lane that holds up the others is *parked*: it keeps its head, lets go of what waits behind it, and is later fed
from the stream itself, from where it left off to the last message it let go.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable
from itertools import islice

from parti.core.loads import Effort
from parti.model.message import Message, Ownership


class Verdict(enum.Enum):
    """What a lane says of a delivery."""

    ACCEPTED = "accepted"
    FINISHED = "finished"
    DUPLICATE = "duplicate"
    OVERTAKEN = "overtaken"
    PARKED = "parked"


class Phase(enum.Enum):
    """What a lane is doing."""

    IDLE = "idle"
    HELD = "held"
    """Nothing may be started: the partition is not ours yet, or what is about to start is still being noted down."""
    READY = "ready"
    RUNNING = "running"
    BACKOFF = "backoff"
    CLOSED = "closed"


_ACCEPTED = Verdict.ACCEPTED


class Lane:
    """The queue and the position of one partition."""

    __slots__ = (
        "behind",
        "behind_until",
        "careful_to",
        "effort",
        "fed",
        "feed_from",
        "incoming",
        "ownership",
        "parked",
        "parked_to",
        "pausing",
        "phase",
        "position",
        "retry",
        "started_s",
        "taken_to",
        "waiting",
    )

    def __init__(self, ownership: Ownership, position: int = 0) -> None:
        self.ownership = ownership
        self.position = position
        self.waiting: deque[Message] = deque()
        self.phase = Phase.IDLE
        self.started_s = 0.0
        self.effort: Effort | None = None
        """What its handlers took, where loads are measured."""
        self.taken_to = 0
        """Last sequence that a runner holds; it will finish these whatever happens."""
        self.behind = False
        """The position stands for itself: neither the floor nor the server knows what is unfinished here."""
        self.behind_until = 0
        self.parked = False
        self.parked_to = 0
        self.feed_from = 0
        self.fed = False
        """It has been read from the stream before."""
        self.incoming = False
        """Somebody else still handles the partition."""
        self.careful_to = 0
        """The last owner died: up to this sequence, each message is noted down before it is started."""
        self.retry: tuple[int, int] | None = None
        """The head failed at an earlier owner: its sequence, and the attempts made. Held until it is there."""
        self.pausing = False
        """Nothing may be started for a moment: the handler's state is being saved."""

    def offer(self, message: Message) -> Verdict:
        """Take in a delivery. Only ACCEPTED and OVERTAKEN put it into the lane."""
        seq = message.seq
        if seq < self.position:
            return Verdict.FINISHED
        waiting = self.waiting
        # The last one is not the highest when the head has overtaken it.
        if (not waiting or (seq > waiting[-1].seq and seq > waiting[0].seq)) and not self.parked:
            waiting.append(message)
            return _ACCEPTED
        return self._offer_late(message)

    def _offer_late(self, message: Message) -> Verdict:
        seqs = [other.seq for other in self.waiting]
        if message.seq in seqs:
            return Verdict.DUPLICATE
        if self.parked:
            self.parked_to = max(self.parked_to, message.seq)
            return Verdict.PARKED
        # A head that has been started stays the head, whatever comes late; behind it the lane is sorted.
        head = self.waiting[0]
        started = self.phase in {Phase.RUNNING, Phase.BACKOFF} or head.attempt > 1
        rest = seqs[1:] if started else seqs
        self.waiting.insert(int(started) + sum(seq < message.seq for seq in rest), message)
        return Verdict.OVERTAKEN if started and message.seq < head.seq else _ACCEPTED

    def finish(self, message: Message | None = None) -> Message:
        """A message is handled or dead-lettered: move the position past it, but not past one that it overtook.

        It is the head unless it is named. A runner that takes several at once names its own, because a late one
        may have been put before it in the meantime.
        """
        waiting = self.waiting
        if message is not None and message is not waiting[0]:
            waiting.remove(message)
            self.position = max(self.position, min(message.seq + 1, self.floor or 0))
            return message
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

    def skip_to(self, position: int) -> list[Message]:
        """Somebody else has finished everything below `position`: drop what waits below it and was not started."""
        if position <= self.position:
            return []
        running = self.phase is Phase.RUNNING
        held = max(self.taken_to, self.waiting[0].seq) if running and self.waiting else 0
        dropped = [m for m in self.waiting if held < m.seq < position]
        if dropped:
            self.waiting = deque(m for m in self.waiting if not held < m.seq < position)
            if not running and self.phase is not Phase.HELD:
                self.phase = Phase.READY if self.waiting else Phase.IDLE
        self.position = position
        self.feed_from = max(self.feed_from, position)
        return dropped

    @property
    def starved(self) -> bool:
        """Whether nothing goes on here until it is fed from the stream."""
        return self.parked and not self.waiting and self.phase in {Phase.IDLE, Phase.HELD}

    # ── parking ───────────────────────────────────────────────────────────────────────────────────────────────

    def park(self) -> list[Message]:
        """Keep what a runner holds, let go of the rest and of what arrives from now on; returns what was let go."""
        let_go: list[Message] = []
        # What the head has overtaken lies below `feed_from`: it stays, or nobody would read it again.
        held = max(self.taken_to, self.waiting[0].seq)
        while self.waiting[-1].seq > held:
            let_go.append(self.waiting.pop())
        kept = max(message.seq for message in self.waiting)
        self.parked_to = let_go[0].seq if let_go else kept
        self.feed_from = kept + 1
        self.parked = self.behind = True
        return let_go[::-1]

    def start_behind(self, until: int, feed_to: int = 0) -> None:
        """Begin below the floor: with messages that the server delivers again, or (`feed_to`) from the stream."""
        self.behind = True
        self.behind_until = until
        if feed_to:
            self.parked = True
            self.feed_from = self.position
            self.parked_to = feed_to

    def feed(self, messages: Iterable[Message], exhausted: bool) -> None:
        """Take in messages read from the stream, in order; unparks when everything let go is back.

        `exhausted`: the stream holds nothing more of what was let go (it has expired or was deleted).
        """
        if self.phase is Phase.CLOSED:
            return
        # A handler that ran all along may have got further than where the feed was to begin.
        self.feed_from = max(self.feed_from, self.position)
        for message in messages:
            if message.seq >= self.feed_from:
                self.feed_from = message.seq + 1
                self.waiting.append(message)
        if exhausted or self.feed_from > self.parked_to:
            self.parked = False

    def caught_up(self, cursor: int) -> bool:
        """Whether nothing is left that only the position remembers; `cursor`: all before it has been delivered."""
        return not self.parked and cursor >= self.behind_until and (not self.waiting or bool(self.waiting[0].reply))


def hogs_among(lanes: Iterable[Lane], *, held: int, limit: int) -> list[Lane]:
    """Lanes that take a quarter of all room or more while three quarters of it are taken, though they move.

    More arrives for them than their handler gets done; without parking, the others would get what is left.
    """
    if held * 4 < limit * 3:
        return []
    return [
        lane
        for lane in lanes
        if not lane.parked and not lane.incoming and len(lane.waiting) * 4 >= limit and len(lane.waiting) > 1
    ]


def lanes_to_park(stuck: Iterable[Lane], *, held: int, limit: int) -> list[Lane]:
    """Choose among lanes whose head does not move those that must make room for the others.

    None while at least half of the room is free. Else the fullest first, until those that stay take less than a
    quarter of it.
    """
    if held * 2 < limit:
        return []
    fullest_first = sorted((lane for lane in stuck if len(lane.waiting) > 1), key=lambda lane: -len(lane.waiting))
    taken = sum(len(lane.waiting) for lane in fullest_first)
    chosen: list[Lane] = []
    for lane in fullest_first:
        if taken * 4 < limit:
            break
        taken -= len(lane.waiting) - 1
        chosen.append(lane)
    return chosen
