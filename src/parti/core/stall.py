"""Stalls: when a worker that should make progress makes none, and what follows from that. Pure.

| kind       | what it means                                                                                    |
|------------|--------------------------------------------------------------------------------------------------|
| `handlers` | messages wait and may be started, and for `stall_after_s` none was, though a runner was free     |
| `lanes`    | a partition counts as running, and no runner works on it; or it is parked, and nobody feeds it   |
| `pulls`    | pulls are wanted, and the server has neither answered nor refused one                            |
| `loop`     | the event loop has not turned                                                                    |

A handler that takes long is no stall: its partition waits for it, and the others go on. What follows:

    fine --stalled for stall_after_s--> told (log, metric, health, record; the reading side is restarted once)
    told --moves again for hold_s--> fine
    told --grace_s later and still stalled--> left (the lease is given up, the process ends with a code of its own)
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping
from dataclasses import dataclass


class StallKind(enum.StrEnum):
    """What stands still."""

    HANDLERS = "handlers"
    LANES = "lanes"
    PULLS = "pulls"
    LOOP = "loop"


Look = Mapping[tuple[StallKind, str], Hashable]
"""What is due at one moment: a kind and a name (a partition, a consumer), and a value that changes with every bit of
progress. What is not due is not in it."""


_GIL_FACTOR = 6.0


@dataclass(frozen=True, slots=True)
class Stall:
    """Something that is due has stood still since a moment of the watchdog's clock."""

    kind: StallKind
    name: str
    since_s: float


class StallDetector:
    """Remembers since when each thing that is due has not changed.

    >>> detector, due = StallDetector(10.0), (StallKind.HANDLERS, "p1")
    >>> detector.see(0.0, {due: 7}), detector.see(10.0, {due: 7})
    (None, Stall(kind=<StallKind.HANDLERS: 'handlers'>, name='p1', since_s=0.0))
    >>> detector.see(11.0, {due: 8})
    """

    def __init__(self, stall_after_s: float) -> None:
        self._after_s = stall_after_s
        self._seen: dict[tuple[StallKind, str], tuple[Hashable, float]] = {}

    def see(self, now_s: float, look: Look) -> Stall | None:
        """Take in what is seen now; returns what has stood still the longest, if that is too long."""
        before = self._seen
        self._seen = {
            due: (value, before[due][1] if due in before and before[due][0] == value else now_s)
            for due, value in look.items()
        }
        stalls = (Stall(kind, name, since_s) for (kind, name), (_, since_s) in self._seen.items())
        longest = min(stalls, key=lambda stall: stall.since_s, default=None)
        return longest if longest and now_s - longest.since_s >= self._after_s else None


def grace_s(stall_after_s: float, lease_ttl_s: float) -> float:
    """How long a worker that stands still may take to move again before it leaves."""
    return min(stall_after_s, lease_ttl_s)


def gil_timeout_s(stall_after_s: float, lease_ttl_s: float) -> float:
    """After how long without the GIL a process is ended.

    Never sooner than the watchdog ends one whose event loop is blocked (it reports, gives up the lease, and ends the
    process one lease later), so where threads run the exit code is the watchdog's. The factor leaves time to a
    process that is only stopped: the lease is gone either way, and other workers have the partitions.
    """
    watchdog_s = stall_after_s + grace_s(stall_after_s, lease_ttl_s) + lease_ttl_s
    return max(watchdog_s, _GIL_FACTOR * stall_after_s)


class Step(enum.Enum):
    """What a watchdog does next."""

    NOTHING = "nothing"
    TELL = "tell"
    """Say so everywhere, and restart what reads."""
    LEAVE = "leave"
    RECOVERED = "recovered"


class Escalation:
    """Decides what follows from a stall, one step at a time.

    `grace_s`: time for the restart to help. `hold_s`: how long it must move again until it counts as well, so that
    whoever looks sees what has happened.
    """

    def __init__(self, *, grace_s: float, hold_s: float) -> None:
        self._grace_s = grace_s
        self._hold_s = hold_s
        self._told_s: float | None = None
        self._moved_s: float | None = None
        self._left = False

    def step(self, now_s: float, stall: Stall | None) -> Step:
        """What to do now."""
        if self._left:
            return Step.NOTHING
        if stall is None:
            return self._well(now_s)
        self._moved_s = None
        if self._told_s is None:
            self._told_s = now_s
            return Step.TELL
        if now_s - self._told_s >= self._grace_s:
            self._left = True
            return Step.LEAVE
        return Step.NOTHING

    def _well(self, now_s: float) -> Step:
        if self._told_s is None:
            return Step.NOTHING
        if self._moved_s is None:
            self._moved_s = now_s
        if now_s - self._moved_s < self._hold_s:
            return Step.NOTHING
        self._told_s = self._moved_s = None
        return Step.RECOVERED
