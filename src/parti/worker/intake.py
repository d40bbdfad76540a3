"""What one of several consumers of a worker delivers, on its way to the lanes that they share."""

from __future__ import annotations

from parti.worker.lanes import Lanes


class ShardIntake:
    """Takes in the deliveries of one shard and notes how far it has got.

    Room is the worker's: each shard sees what all of them hold, and its own open pulls. So none can take the room of
    the others, and together they hold at most what each may ask for, times their number.
    """

    __slots__ = ("_deliver", "_lanes", "cursor", "next_seq")

    def __init__(self, lanes: Lanes) -> None:
        self.next_seq = 1
        """One past the highest sequence that this shard has ever delivered, or passed."""
        self.cursor = 1
        """One past the last sequence that it has delivered, or passed, in this session."""
        self._lanes = lanes
        self._deliver = lanes.deliver

    def deliver(self, subject: bytes, reply: bytes, header: bytes | None, payload: bytes, seq: int) -> None:
        """Take in one delivery; one that cannot be taken in is not passed."""
        self._deliver(subject, reply, header, payload, seq)
        self.cursor = seq + 1
        if seq >= self.next_seq:
            self.next_seq = seq + 1

    def passed(self, seq: int) -> None:
        """The server has nothing more for this shard up to `seq`.

        A shard whose partitions are quiet would hold back the floor of the worker otherwise, and with it all that
        follows from the floor: the size of its record, and how far a hot mirror can be trimmed.
        """
        self.cursor = max(self.cursor, seq + 1)
        self.next_seq = max(self.next_seq, seq + 1)

    def begin_at(self, seq: int) -> None:
        """It carries nothing: for all that it is going to bring, this is where it begins."""
        self.next_seq = self.cursor = seq

    @property
    def held(self) -> int:
        """Messages that the worker has taken in and not yet acknowledged."""
        return self._lanes.held

    @property
    def finished(self) -> int:
        """Messages that the worker has finished."""
        return self._lanes.finished
