"""Timers of the model, in one queue."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush


class Timers:
    """The queue: when the next timer is due, and which one it is."""

    __slots__ = ("_count", "_heap")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Timer]] = []
        self._count = 0

    def push(self, due_ns: int, timer: Timer) -> None:
        """Put an entry into the queue."""
        self._count += 1
        heappush(self._heap, (due_ns, self._count, timer))

    def next_due_ns(self) -> int:
        """When the next timer is due; 0 when none is."""
        heap = self._heap
        while heap:
            due_ns, _, timer = heap[0]
            if timer.stands_for(due_ns):
                return due_ns
            heappop(heap)
        return 0

    def pop(self) -> Timer:
        """Take out the timer that is due next."""
        return heappop(self._heap)[2]

    def clear(self) -> None:
        """Forget all timers."""
        self._heap.clear()


class Timer:
    """A callback at a time that may be moved; moving it to a later time costs nothing."""

    __slots__ = ("_call", "_queued_ns", "_timers", "due_ns")

    def __init__(self, timers: Timers, call: Callable[[], None]) -> None:
        self._timers = timers
        self._call = call
        self.due_ns = 0
        """When it is due; 0 when it is off."""
        self._queued_ns = 0

    def set(self, due_ns: int) -> None:
        """Be due then, whatever was said before; 0 switches it off."""
        self.due_ns = due_ns
        if due_ns and (not self._queued_ns or due_ns < self._queued_ns):
            self._queued_ns = due_ns
            self._timers.push(due_ns, self)

    def stands_for(self, queued_ns: int) -> bool:
        """Tell whether an entry of the queue has this timer's time; if it is due later, it is queued again."""
        if queued_ns != self._queued_ns:
            return False
        if self.due_ns == queued_ns:
            return True
        self._queued_ns = 0
        self.set(self.due_ns)
        return False

    def fire(self) -> None:
        """Call back, once."""
        self.due_ns = self._queued_ns = 0
        self._call()
