"""What must be true of every run, told from handler calls alone: the named invariants of the product.

Whoever can say which messages a stream has stored and which handlers started and finished can check a run: the
simulation, the chaos tests on real processes, an audit over collected data. Nothing of parti's own state is needed.

    NoLoss                 every stored message is finished, or still ahead of its partition's position
    OneOwner               a stale owner starts nothing after its successor's first; no two handlers of a partition
                           run at once, unless the older one was started before its worker lost its lease
    Order                  a message is started only when every older one of its partition is finished
    NoRepeatOnPlannedMove  what is finished is not started again, unless its worker died or was cut off
    BoundedRepeatOnCrash   and then only what it finished shortly before, or later than that
    EpochGrows             each new holding of a partition has a larger fence token than every one before it
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias


class Invariant(enum.StrEnum):
    """The names under which a violation is reported."""

    NO_LOSS = "NoLoss"
    ONE_OWNER = "OneOwner"
    ORDER = "Order"
    NO_REPEAT_ON_PLANNED_MOVE = "NoRepeatOnPlannedMove"
    BOUNDED_REPEAT_ON_CRASH = "BoundedRepeatOnCrash"
    EPOCH_GROWS = "EpochGrows"


@dataclass(frozen=True, slots=True)
class _Call:
    """Which call of a handler this is about; `process` is unique to one run of one process."""

    partition: str
    seq: int
    worker: str
    fence: int
    process: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Start(_Call):
    """A handler was called with a message."""


@dataclass(frozen=True, slots=True)
class Finish(_Call):
    """A handler returned, or its message was dead-lettered."""


@dataclass(frozen=True, slots=True)
class Abort(_Call):
    """A handler raised or was cancelled: the call is over, but its message is not finished."""


@dataclass(frozen=True, slots=True)
class Death:
    """A process ended without any chance to store its positions."""

    process: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Lapse:
    """A process could not reach the control plane, or did not run at all, so that its lease may have ended."""

    process: str
    at_s: float
    until_s: float = float("inf")


Event: TypeAlias = Start | Finish | Abort | Death | Lapse


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that happened and must not happen."""

    invariant: Invariant
    partition: str
    seq: int
    at_s: float
    detail: str

    def __str__(self) -> str:
        return f"{self.invariant} at {self.at_s:.3f} s, partition {self.partition}, message {self.seq}: {self.detail}"


def check_history(
    stored: Mapping[str, Sequence[int]],
    events: Iterable[Event],
    *,
    positions: Mapping[str, int] | None = None,
    unstored_s: float = float("inf"),
) -> list[Violation]:
    """Return every violation in a run, in the order in which they happened.

    `stored` has the sequences of each partition's messages, ascending. `events` may come in any order; those of the
    same moment count in the order given. Without `positions` everything stored must be finished; with them only what
    lies below its partition's position. `unstored_s` is how far behind a stored position may be: a process that
    crashes may cause the repetition of what it finished in that time before.
    """
    ordered = sorted(events, key=lambda event: event.at_s)
    troubles = _Troubles(ordered, unstored_s)
    histories = {partition: _History(partition, sequences, troubles) for partition, sequences in stored.items()}
    violations: list[Violation] = []
    for event in ordered:
        if isinstance(event, Death | Lapse):
            continue
        history = histories.get(event.partition)
        if history is None:
            history = histories[event.partition] = _History(event.partition, (), troubles)
        if isinstance(event, Start):
            violations += history.started(event)
        else:
            history.ended(event)
    end_s = ordered[-1].at_s if ordered else 0.0
    for partition, history in histories.items():
        below = None if positions is None else positions.get(partition, 0)
        violations += history.lost(below, end_s)
    return violations


class _Troubles:
    """When processes died or were cut off, and what that excuses."""

    def __init__(self, events: Sequence[Event], unstored_s: float) -> None:
        self._unstored_s = unstored_s
        self._died_s: dict[str, float] = {}
        self._lapses: defaultdict[str, list[Lapse]] = defaultdict(list)
        for event in events:
            if isinstance(event, Death):
                self._died_s.setdefault(event.process, event.at_s)
            elif isinstance(event, Lapse):
                self._lapses[event.process].append(event)

    def dead(self, process: str, at_s: float) -> bool:
        """Whether the process has died before."""
        return self._died_s.get(process, float("inf")) <= at_s

    def lapsed(self, process: str, since_s: float, at_s: float) -> bool:
        """Whether a handler that this process started at `since_s` may have outlasted its lease."""
        return any(lapse.at_s <= at_s and since_s <= lapse.until_s for lapse in self._lapses[process])

    def any_before(self, process: str, at_s: float) -> bool:
        """Whether something happened to the process that can lead to repeats."""
        return self.dead(process, at_s) or any(lapse.at_s <= at_s for lapse in self._lapses[process])

    def excuse_repeat(self, done: Finish, at_s: float) -> bool:
        """Whether the position that knew of this finish may have got lost."""
        late_s = self._unstored_s
        if self.dead(done.process, at_s) and done.at_s >= self._died_s[done.process] - late_s:
            return True
        return any(
            lapse.at_s <= at_s and lapse.at_s - late_s <= done.at_s <= lapse.until_s + late_s
            for lapse in self._lapses[done.process]
        )


@dataclass(slots=True)
class _Holding:
    """A partition in the hands of one process under one fence token."""

    process: str
    fence: int
    last_started: int = 0


@dataclass(slots=True)
class _History:
    """What happened to one partition so far."""

    partition: str
    stored: Sequence[int]
    troubles: _Troubles
    done: dict[int, list[Finish]] = field(default_factory=dict)
    next_index: int = 0
    """Index of the oldest stored message that is not finished."""
    holdings: dict[tuple[str, int], _Holding] = field(default_factory=dict)
    newest: _Holding | None = None
    running: dict[str, Start] = field(default_factory=dict)
    """The handler that runs in each process."""

    def started(self, event: Start) -> list[Violation]:
        """Take in the start of a handler."""
        found = [
            *self._check_owner(event),
            *self._check_order(event),
            *self._check_repeat(event),
            *self._check_alone(event),
        ]
        self.running[event.process] = event
        return found

    def ended(self, event: Finish | Abort) -> None:
        """Take in the end of a handler."""
        self.running.pop(event.process, None)
        if isinstance(event, Abort):
            return
        self.done.setdefault(event.seq, []).append(event)
        while self.next_index < len(self.stored) and self.stored[self.next_index] in self.done:
            self.next_index += 1

    def lost(self, below: int | None, end_s: float) -> list[Violation]:
        """What was stored and never finished, though it should be."""
        missing = [seq for seq in self.stored if seq not in self.done and (below is None or seq < below)]
        where = "" if below is None else f"; the position is {below}"
        detail = f"stored and never finished{where}"
        return [self._violation(Invariant.NO_LOSS, seq, end_s, detail) for seq in missing]

    def _check_owner(self, event: Start) -> list[Violation]:
        if not event.fence:
            return []  # A worker on its own has no fence tokens.
        key, newest = (event.process, event.fence), self.newest
        known = key in self.holdings
        holding = self.holdings.setdefault(key, _Holding(event.process, event.fence))
        if newest is None or event.fence > newest.fence:
            self.newest = holding
        if newest is None or holding is newest or holding is self.newest:
            return []
        # One that was seen before is a stale owner that goes on; a new one was given a token that is none.
        invariant = Invariant.ONE_OWNER if known else Invariant.EPOCH_GROWS
        detail = (
            f"{event.process} ({event.worker}) started with fence {event.fence} after {newest.process} had started "
            f"with fence {newest.fence}"
        )
        return [self._violation(invariant, event.seq, event.at_s, detail)]

    def _check_order(self, event: Start) -> list[Violation]:
        found = []
        key = (event.process, event.fence)
        holding = self.holdings.setdefault(key, _Holding(event.process, event.fence))
        if event.seq < holding.last_started:
            detail = f"started by {event.process} after message {holding.last_started} of the same holding"
            found.append(self._violation(Invariant.ORDER, event.seq, event.at_s, detail))
        holding.last_started = max(holding.last_started, event.seq)
        first = self.stored[self.next_index] if self.next_index < len(self.stored) else None
        if first is not None and first < event.seq:
            skipped = bisect_left(self.stored, event.seq) - self.next_index
            detail = f"started by {event.process} before message {first} was finished ({skipped} possibly skipped)"
            found.append(self._violation(Invariant.ORDER, event.seq, event.at_s, detail))
        return found

    def _check_repeat(self, event: Start) -> list[Violation]:
        told = [done for done in self.done.get(event.seq, ()) if not self.troubles.excuse_repeat(done, event.at_s)]
        if not told:
            return []
        done = told[-1]
        detail = f"started again by {event.process}, although {done.process} finished it at {done.at_s:.3f} s"
        if self.troubles.any_before(done.process, event.at_s):
            return [self._violation(Invariant.BOUNDED_REPEAT_ON_CRASH, event.seq, event.at_s, detail)]
        return [self._violation(Invariant.NO_REPEAT_ON_PLANNED_MOVE, event.seq, event.at_s, detail)]

    def _check_alone(self, event: Start) -> list[Violation]:
        found = []
        for process, other in list(self.running.items()):
            if process == event.process or self.troubles.dead(process, event.at_s):
                del self.running[process]  # The call before raised or was cancelled, or its process is gone.
            elif not self.troubles.lapsed(process, other.at_s, event.at_s):
                detail = f"started by {event.process} while {process} was still handling message {other.seq}"
                found.append(self._violation(Invariant.ONE_OWNER, event.seq, event.at_s, detail))
        return found

    def _violation(self, invariant: Invariant, seq: int, at_s: float, detail: str) -> Violation:
        return Violation(invariant, self.partition, seq, at_s, detail)
