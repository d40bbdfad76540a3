"""When the next process of a slot may start, and when trying again is pointless.

A slot is the place of one supervised process: it keeps its number and its identity while processes come and go in it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass, replace

COULD_NOT_START = 2
"""Exit code of a worker whose input, settings or surroundings must be changed by a person."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How patiently a slot is filled again."""

    first_delay_s: float = 0.5
    longest_delay_s: float = 30.0
    steady_after_s: float = 60.0
    """A process that lived this long had started well: its end is the first of a new series."""


DEFAULT_POLICY = RestartPolicy()


@dataclass(frozen=True, slots=True)
class Slot:
    """What is remembered of a slot's processes."""

    starts: int = 0
    started_at_s: float = 0.0
    delay_s: float = 0.0
    """The wait before the present process; 0 for the first one."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the next process after `delay_s`."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End all slots, then the supervisor with `exit_code`: only a person can change what is wrong."""

    exit_code: int


def after_start(slot: Slot, *, now_s: float) -> Slot:
    """The slot once its next process was started."""
    return replace(slot, starts=slot.starts + 1, started_at_s=now_s)


def after_exit(policy: RestartPolicy, slot: Slot, exit_code: int, *, now_s: float) -> tuple[Slot, Restart | GiveUp]:
    """Decide what follows the end of a slot's process that nobody asked to leave.

    Every end is followed by a restart, whatever the exit code and however often, with one exception: the slot's first
    process could not start. A later one that cannot start may have met a server that is away for a while.
    """
    steady = now_s - slot.started_at_s >= policy.steady_after_s
    if exit_code == COULD_NOT_START and slot.starts <= 1 and not steady:
        return slot, GiveUp(exit_code)
    # Doubled from the last delay, not computed as a power of the number of restarts, which has no bound.
    grown_s = policy.first_delay_s if steady else slot.delay_s * 2
    delay_s = min(max(grown_s, policy.first_delay_s), policy.longest_delay_s)
    return replace(slot, delay_s=delay_s), Restart(delay_s)


def fleet_exit_code(last_exits: Iterable[int]) -> int:
    """The supervisor's exit code after the last exits of its slots: 0 if all left in order, else 1.

    Exits are exit codes, or negative signal numbers. SIGTERM ends a process only before it handles the signal, when
    it has taken on nothing that it could leave unfinished.
    """
    return 0 if all(code in {0, -signal.SIGTERM} for code in last_exits) else 1


def signal_name(exit_code: int) -> str:
    """Name of the signal that ended a process, from its negative exit code."""
    try:
        return signal.Signals(-exit_code).name
    except ValueError:  # most real-time signals have numbers only
        return f"signal {-exit_code}"
