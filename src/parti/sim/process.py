"""A simulated process: code in a context of its own, with clocks of its own; it can be stopped, continued, killed."""

from __future__ import annotations

import asyncio
import enum
import math
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any, TypeVar

from parti.sim.loop import CURRENT, VirtualLoop

_T = TypeVar("_T")


class Condition(enum.Enum):
    """Whether a process runs."""

    RUNNING = "running"
    STOPPED = "stopped"
    DEAD = "dead"


class Process:
    """One process of the fleet.

    `rate` is how fast its clocks run, `offset_s` what its monotonic clock showed at the beginning; `wall_offset_s` is
    how wrong its wall clock is, and may change at any time.
    """

    __slots__ = ("context", "gone", "kept", "loop", "name", "offset_s", "on_death", "rate", "runs", "wall_offset_s")

    def __init__(self, loop: VirtualLoop, name: str, *, rate: float = 1.0, offset_s: float = 0.0) -> None:
        self.loop = loop
        self.name = name
        self.rate = rate
        self.offset_s = offset_s
        self.wall_offset_s = 0.0
        self.runs = True
        self.gone = False
        self.kept: list[Any] = []
        self.on_death: list[Callable[[], None]] = []
        self.context: Context = copy_context()
        self.context.run(CURRENT.set, self)

    def now(self, virtual_s: float) -> float:
        """What its monotonic clock shows at this moment of virtual time."""
        return self.offset_s + virtual_s * self.rate

    def virtual(self, own_s: float) -> float:
        """The moment of virtual time at which its monotonic clock shows this, and not, by rounding, a little less.

        Otherwise whoever waits until then wakes up too early, again and again, since time stands still meanwhile.
        """
        found = (own_s - self.offset_s) / self.rate
        while self.now(found) < own_s:
            found = math.nextafter(found, math.inf)
        return found

    @property
    def condition(self) -> Condition:
        """Whether it runs."""
        return Condition.DEAD if self.gone else Condition.RUNNING if self.runs else Condition.STOPPED

    def spawn(self, work: Coroutine[Any, Any, _T], *, name: str = "") -> asyncio.Task[_T]:
        """Start a task inside the process."""
        return self.loop.create_task(work, name=name or self.name, context=self.context)

    def stop(self) -> None:
        """SIGSTOP: nothing of it runs until it continues, while its clocks and the world go on."""
        if not self.gone:
            self.runs = False

    def cont(self) -> None:
        """SIGCONT: everything that has come due meanwhile happens at once."""
        if not self.gone and not self.runs:
            self.runs = True
            kept, self.kept = self.kept, []
            self.loop.resume(kept)

    def crash(self) -> None:
        """SIGKILL: nothing of it ever runs again."""
        if self.gone:
            return
        self.runs, self.gone = False, True
        self.kept.clear()
        for callback in self.on_death:
            callback()


def current_process() -> Process:
    """The process that the running code belongs to."""
    process = CURRENT.get()
    assert isinstance(process, Process), "not inside a simulated process"
    return process
