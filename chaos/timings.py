"""How long partitions rested: at moves, after kills, and between two messages when nothing happens."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from chaos.notes import Call, Notes


@dataclass(frozen=True, slots=True)
class Spread:
    """How a figure is spread, in seconds."""

    count: int
    p50_s: float
    p99_s: float
    max_s: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Sum up some figures; all zero when there are none."""
        found = sorted(values)
        if not found:
            return cls(0, 0.0, 0.0, 0.0)
        cuts = statistics.quantiles(found, n=100, method="inclusive") if len(found) > 1 else found * 99
        return cls(len(found), round(cuts[49], 4), round(cuts[98], 4), round(found[-1], 4))

    def __str__(self) -> str:
        if not self.count:
            return "none"
        return f"p50 {_span(self.p50_s)}, p99 {_span(self.p99_s)}, max {_span(self.max_s)} of {self.count:,}"


def _span(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


@dataclass(frozen=True, slots=True)
class Pauses:
    """Time between two handlers of a partition in which there was something to handle."""

    at_moves: list[float]
    """Across a change of owner."""
    otherwise: list[float]
    """Within one ownership: what the machine and the load make of it without a move."""


def pauses(notes: Notes, since_ns: int = 0) -> Pauses:
    """Measure from the end of a call to the start of the next, less the time in which nothing was there to handle.

    A message is there from the moment at which its publisher sent it, a little before the stream has it.
    """
    found = Pauses([], [])
    for partition, calls in notes.calls.items():
        sent = notes.sent.get(partition, {})
        for before, after in pairwise(calls.by_start()):
            if before.start_ns < since_ns or not before.end_ns:
                continue
            rest_s = (after.start_ns - max(before.end_ns, sent.get(after.seq, 0))) / 1e9
            (found.otherwise if before.fence == after.fence else found.at_moves).append(max(0.0, rest_s))
    return found


def held_by(notes: Notes, process: str) -> list[str]:
    """The partitions whose last handler started in that process."""
    index = notes.process_index(process)
    return [partition for partition, (_, holder) in notes.latest.items() if holder == index]


def takeover_s(notes: Notes, partition: str, process: str, at_ns: int, row: int = 0) -> float | None:
    """From a moment to the first start of a handler in another process; None if there was none."""
    index = notes.process_index(process)
    later = [c.start_ns for c in notes.calls[partition].since(row) if c.process != index and c.start_ns > at_ns]
    return (min(later) - at_ns) / 1e9 if later else None


def repeats_after(calls: Sequence[Call], process: int) -> Iterator[Call]:
    """Calls of messages that this process had started before."""
    seen: set[int] = set()
    for call in calls:
        if call.process == process:
            seen.add(call.seq)
        elif call.seq in seen:
            yield call
