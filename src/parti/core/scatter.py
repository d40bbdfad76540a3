"""Which messages are finished when they finish in any order (the unordered mode)."""

from __future__ import annotations

from parti.core.lane import Verdict


class Scatter:
    """Sequences in hand, given back to the server, and finished above the floor.

    `floor()` is the lowest sequence that is not finished; nothing below it has to be remembered.
    """

    def __init__(self) -> None:
        self._active: set[int] = set()
        self._owed: set[int] = set()
        self._done: set[int] = set()
        self._finished_below = 0

    def start_over(self) -> None:
        """The stream was made anew: forget everything."""
        for seqs in (self._active, self._owed, self._done):
            seqs.clear()
        self._finished_below = 0

    def offer(self, seq: int, *, behind: bool = False) -> Verdict:
        """Take in a delivery; only ACCEPTED puts it in hand. `behind`: the floor does not speak for it."""
        if seq in self._done or (seq < self._finished_below and not behind and seq not in self._owed):
            return Verdict.FINISHED
        if seq in self._active:
            return Verdict.DUPLICATE
        self._owed.discard(seq)
        self._active.add(seq)
        return Verdict.ACCEPTED

    def give_back(self, seq: int) -> None:
        """The server will deliver it again."""
        self._active.discard(seq)
        self._owed.add(seq)

    def finish(self, seq: int) -> None:
        """Handled or dead-lettered."""
        self._active.discard(seq)
        self._done.add(seq)

    def forget(self, seq: int) -> None:
        """No longer ours."""
        self._active.discard(seq)
        self._owed.discard(seq)

    def floor(self, next_seq: int) -> int:
        """The lowest unfinished sequence, `next_seq` when there is none; forgets what lies below it."""
        floor = min(min(self._active, default=next_seq), min(self._owed, default=next_seq))
        self._done = {seq for seq in self._done if seq >= floor}
        self._finished_below = max(self._finished_below, floor)
        return floor
