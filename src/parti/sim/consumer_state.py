"""What a consumer of the model knows of its deliveries, and what is stored of it.

Like the server, a consumer keeps its state twice: what it works with, and what its store knows (`stored`). They
differ in one thing that matters: reading to the end of the stream moves the cursor that it works with, but not the
stored one, which `CONSUMER.INFO` reports and from which a restart goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from parti.sim.messages import SECOND_NS

_MOST_LOST = 2048
"""A restart takes back at most so many changes of a consumer."""
_Change = tuple[int, int, tuple[int, int, int, int], tuple[int, int] | None, int]
"""When, of which sequence, and how it was before: delivered and floor, in flight, redelivered."""


@dataclass(slots=True)
class Stored:
    """What is stored of a consumer: last delivery and ack floor, each as consumer and stream sequence."""

    delivered: int = 0
    delivered_seq: int = 0
    floor: int = 0
    floor_seq: int = 0
    pending: dict[int, list[int]] = field(default_factory=dict)
    """By stream sequence: delivery number, and the time from which its acknowledgement is waited for.

    That is when the message was stored, not when it was delivered: whoever goes on from here may find it overdue.
    """
    redelivered: dict[int, int] = field(default_factory=dict)

    def copy(self) -> Stored:
        """Another one, the same."""
        pending = {seq: list(entry) for seq, entry in self.pending.items()}
        return Stored(self.delivered, self.delivered_seq, self.floor, self.floor_seq, pending, dict(self.redelivered))

    def deliver(self, number: int, seq: int, count: int, stored_ns: int, *, acks: bool) -> None:
        """Note a delivery of a message that was stored at that time."""
        if not acks:
            self.delivered = self.floor = max(self.delivered, number)
            if seq > self.delivered_seq:
                self.delivered_seq = self.floor_seq = seq
        elif number > self.floor:
            if seq > self.delivered_seq:
                self.pending[seq] = [number, stored_ns]
                self.delivered_seq = seq
            elif seq in self.pending:
                self.pending[seq][1] = stored_ns
            self.delivered = max(self.delivered, number)
            if count > 1 and self.redelivered.get(seq, 0) < count - 1:
                self.redelivered[seq] = count - 1

    def acknowledge(self, number: int, seq: int) -> None:
        """Note an acknowledgement."""
        self.redelivered.pop(seq, None)
        if number <= self.floor or seq not in self.pending:
            return
        number = min(number, self.pending.pop(seq)[0])
        if not self.pending:
            self.floor, self.floor_seq = self.delivered, self.delivered_seq
        elif number == self.floor + 1:
            self.floor, self.floor_seq = number, seq
            if lowest := _next_pending(self.pending, seq, self.delivered_seq + 1):
                self.floor, self.floor_seq = self.pending[lowest][0] - 1, lowest - 1


class ConsumerState:
    """The working state of a consumer, and the stored one."""

    def __init__(self, cursor: int, *, durable: bool) -> None:
        self.durable = durable
        self.cursor = cursor
        """The next sequence to look at: the hidden cursor."""
        self.number = 1
        """Number of the next delivery."""
        self.floor, self.floor_seq = 0, cursor - 1
        self.pending: dict[int, list[int]] = {}
        self.redelivered: dict[int, int] = {}
        """By stream sequence: how often it was delivered again."""
        self.again: deque[int] = deque()
        """Sequences that wait for another delivery."""
        self.stored = Stored(delivered_seq=cursor - 1, floor_seq=cursor - 1)
        self._changes: deque[_Change] = deque(maxlen=_MOST_LOST)

    def put_to(self, seq: int) -> None:
        """Begin at a sequence and forget everything before; unlike other changes, this is stored at once."""
        self._changes.clear()
        self.pending, self.redelivered = {}, {}
        self.again.clear()
        self.cursor, self.number = seq, 1
        self.floor, self.floor_seq = 0, seq - 1
        self.stored = Stored(delivered_seq=seq - 1, floor_seq=seq - 1)

    def deliver(self, seq: int, count: int, stored_ns: int, now_ns: int, *, acks: bool) -> None:
        """Note a delivery of a message that was stored at that time."""
        number = self.number
        self.number = number + 1
        if self.durable:
            self._remember(seq, now_ns)
        self.stored.deliver(number, seq, count, stored_ns, acks=acks)
        if not acks:
            self.floor, self.floor_seq = number, seq
        elif seq in self.pending:
            self.pending[seq][1] = now_ns
        else:
            self.pending[seq] = [number, now_ns]

    def finish(self, seq: int, number: int, now_ns: int) -> None:
        """Note an acknowledgement, whether the message was in flight or not."""
        entry = self.pending.pop(seq, None)
        if entry is not None:
            number = entry[0]
            self._move_floor(number, seq)
        self.redelivered.pop(seq, None)
        if self.again and seq in self.again:
            self.again.remove(seq)
        if self.durable:
            self._remember(seq, now_ns)
        self.stored.acknowledge(number, seq)

    def _move_floor(self, number: int, seq: int) -> None:
        if not self.pending:
            self.floor, self.floor_seq = self.number - 1, self.cursor - 1
        elif number == self.floor + 1:
            self.floor, self.floor_seq = number, seq
            if lowest := _next_pending(self.pending, seq, self.cursor):
                self.floor, self.floor_seq = self.pending[lowest][0] - 1, lowest - 1

    def touch(self, seq: int, at_ns: int) -> None:
        """Count the time for an acknowledgement from then on."""
        for pending in (self.pending, self.stored.pending):
            if seq in pending:
                pending[seq][1] = at_ns

    def take_overdue(self, first: int, wait_ns: int, now_ns: int) -> int:
        """Queue what was not acknowledged in time for another delivery; returns when to look again, 0 for never.

        What lies below the stream's `first` message, or below the floor, is forgotten.
        """
        gone = [seq for seq in self.pending if seq < first or seq <= self.floor_seq]
        for seq in gone:
            number, _ = self.pending.pop(seq)
            self.redelivered.pop(seq, None)
            if seq in self.again:
                self.again.remove(seq)
            self.floor_seq, self.floor = max(self.floor_seq, seq), max(self.floor, number)
        late = sorted(q for q, (_, at) in self.pending.items() if now_ns - at >= wait_ns and q not in self.again)
        in_time = (at + wait_ns for _, at in self.pending.values() if now_ns - at < wait_ns)
        look_ns = min(in_time, default=1 << 62)
        if late:
            self.again.extend(late)
            # Later ones stay as much later as they were, so that their order holds the next time too.
            offset_ns = now_ns - self.pending[late[0]][1]
            for seq in late:
                self.pending[seq][1] += offset_ns
        if not self.pending:
            self.again.clear()
            self.floor, self.floor_seq = self.number - 1, self.cursor - 1
            look_ns = 0
        if gone:
            self.store_all()
        return look_ns

    def purge(self, start: int, there: Mapping[int, object] | None) -> None:
        """Messages were purged: what is left begins at `start`, and lies in `there` if that is given."""
        self.cursor = max(self.cursor, start)
        if self.floor_seq < start:
            self.floor_seq = start - 1
            for seq, (number, _) in list(self.pending.items()):
                if seq <= self.floor_seq or (there is not None and seq not in there):
                    self.floor = max(self.floor, number)
                    self.number = max(self.number, self.floor)
                    del self.pending[seq]
                    self.redelivered.pop(seq, None)
                    self.stored.acknowledge(number, seq)
        if not self.pending:
            self.redelivered = {}
            self.floor, self.floor_seq = self.number - 1, self.cursor - 1
        self.again = deque(q for q in self.again if q >= self.cursor)
        self.store_all()

    def forget_redeliveries(self, first: int) -> None:
        """Forget counts of messages below the stream's first."""
        for seq in [q for q in self.redelivered if q < first]:
            del self.redelivered[seq]
            if seq in self.again:
                self.again.remove(seq)
        for seq in [q for q in self.stored.redelivered if q < first]:
            del self.stored.redelivered[seq]

    # ── the store ─────────────────────────────────────────────────────────────────────────────────────────────

    def _remember(self, seq: int, now_ns: int) -> None:
        """Keep what is stored now: a restart may take the next change back."""
        state = self.stored
        entry = state.pending.get(seq)
        numbers = (state.delivered, state.delivered_seq, state.floor, state.floor_seq)
        in_flight = (entry[0], entry[1]) if entry else None
        self._changes.append((now_ns, seq, numbers, in_flight, state.redelivered.get(seq, 0)))

    def _take_back(self, since_ns: int) -> None:
        """Undo the changes after that time."""
        state = self.stored
        while self._changes and self._changes[-1][0] > since_ns:
            _, seq, numbers, in_flight, redelivered = self._changes.pop()
            state.delivered, state.delivered_seq, state.floor, state.floor_seq = numbers
            if in_flight:
                state.pending[seq] = list(in_flight)
            else:
                state.pending.pop(seq, None)
            if redelivered:
                state.redelivered[seq] = redelivered
            else:
                state.redelivered.pop(seq, None)
        # Back in the order in which they were delivered.
        state.pending = dict(sorted(state.pending.items()))
        self._changes.clear()

    def store_all(self) -> None:
        """Store the working state, unless the server would refuse it as older than what it has, or as wrong."""
        state = self.stored
        if self.number - 1 < state.delivered or self.floor_seq < state.floor_seq:
            return
        if self.floor > self.number - 1 or self.floor_seq > self.cursor - 1:
            return
        if any(not self.floor_seq < seq < self.cursor for seq in self.pending):
            return
        self._changes.clear()
        self.stored = Stored(
            self.number - 1, self.cursor - 1, self.floor, self.floor_seq, self.pending, self.redelivered
        ).copy()

    def load(self, lose_ns: int, now_ns: int, epoch_ns: int) -> None:
        """Go on from the stored state, as it was at most `lose_ns` ago; `epoch_ns`: the wall clock at time 0.

        The store keeps whole seconds of the wall clock.
        """
        self._take_back(now_ns - lose_ns)
        state = self.stored
        for entry in state.pending.values():
            entry[1] -= (entry[1] + epoch_ns) % SECOND_NS
        self.cursor, self.number = state.delivered_seq + 1, state.delivered + 1
        self.floor, self.floor_seq = state.floor, state.floor_seq
        self.load_pending()

    def load_pending(self) -> None:
        """Take over from the store what is in flight."""
        working = self.stored.copy()
        self.pending, self.redelivered = working.pending, working.redelivered
        self.again.clear()


def _next_pending(pending: Mapping[int, object], seq: int, end: int) -> int:
    """The lowest sequence between `seq` and `end` that is in flight, or 0."""
    for following in range(seq + 1, end):
        if following in pending:
            return following
    return 0
