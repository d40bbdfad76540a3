"""What happened in a run: messages stored, handlers started and finished, deaths and lapses; and the verdict."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from parti.core.invariants import Abort, Death, Event, Finish, Lapse, Start, Violation, check_history
from parti.sim.scenario import Publish

_UNSTORED_S = 1.0
"""How far behind a stored position may be when nothing disturbs its worker: the interval, a request, a busy lane."""


@dataclass(slots=True)
class Outcome:
    """How a run ended."""

    seed: int
    violations: list[Violation] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)
    """What went wrong otherwise: the fleet did not settle in time, an error that nobody caught."""
    timeline: list[tuple[float, str, str]] = field(default_factory=list)
    """Seconds, who, what; only kept when asked for."""
    digest: str = ""
    """The same for each run of the same scenario."""
    messages: int = 0
    calls: int = 0
    holdings: int = 0
    """How often a partition came into the hands of a process."""
    virtual_s: float = 0.0

    @property
    def good(self) -> bool:
        """Whether nothing was wrong."""
        return not self.violations and not self.trouble

    @property
    def complaints(self) -> list[str]:
        """Everything that was wrong, one line each."""
        return [str(violation) for violation in self.violations] + self.trouble


class History:
    """The record of one run, kept while it happens."""

    def __init__(self, seed: int, clock: Callable[[], float], *, keep_timeline: bool) -> None:
        self.outcome = Outcome(seed)
        self.publishes: dict[int, Publish] = {}
        """What was stored, by sequence."""
        self.unfinished: dict[int, None] = {}
        self._clock = clock
        self._keep_timeline = keep_timeline
        self._events: list[Event] = []
        self._stored: dict[str, list[int]] = {}
        self._last_start: dict[int | tuple[int, str], Start] = {}
        """Of each message, and of each message by each worker."""

    def note(self, what: str, who: str = "") -> None:
        """Put a line into the timeline."""
        if self._keep_timeline:
            self.outcome.timeline.append((self._clock(), who, what))

    def stored(self, seq: int, publish: Publish) -> None:
        """The server has acknowledged a message to its publisher."""
        self.publishes[seq] = publish
        self._stored.setdefault(publish.partition, []).append(seq)
        self.unfinished[seq] = None
        self.outcome.messages += 1
        if self._keep_timeline:
            self.note(f"{publish.partition} {seq} is stored (takes {publish.takes_s:.3f} s, fails {publish.fails})")

    def started(self, partition: str, seq: int, worker: str, fence: int, process: str) -> Start:
        """A handler was called."""
        start = Start(partition, seq, worker, fence, process, self._clock())
        self._events.append(start)
        self._last_start[seq] = self._last_start[seq, worker] = start
        self.outcome.calls += 1
        if self._keep_timeline:
            self.note(f"{worker} starts {partition} {seq} (fence {fence % 100_000})", process)
        return start

    def finished(self, start: Start) -> None:
        """That handler has returned."""
        self._events.append(
            Finish(start.partition, start.seq, start.worker, start.fence, start.process, self._clock())
        )
        self.unfinished.pop(start.seq, None)
        if self._keep_timeline:
            self.note(f"{start.worker} finishes {start.partition} {start.seq}", start.process)

    def aborted(self, start: Start, why: str) -> None:
        """That handler has raised, or was cancelled."""
        self._events.append(
            Abort(start.partition, start.seq, start.worker, start.fence, start.process, self._clock())
        )
        self.note(f"{start.worker} gives up on {start.partition} {start.seq}: {why}", start.process)

    def dead_lettered(self, seq: int, worker: str) -> None:
        """A message was stored as a dead letter by a worker, which finishes it too."""
        self.note(f"message {seq} is dead-lettered")
        # A worker may send it for one that died in the handler, and that was noted before it got so far.
        never = Start(self.publishes[seq].partition, seq, "", 0, "", self._clock())
        self.finished(self._last_start.get((seq, worker)) or self._last_start.get(seq, never))

    def died(self, process: str) -> None:
        """A process has ended without storing its positions."""
        self._events.append(Death(process, self._clock()))

    def lapsed(self, process: str, since_s: float, until_s: float) -> None:
        """A process could not act or be reached in that time."""
        self._events.append(Lapse(process, since_s, until_s))

    def judge(self) -> None:
        """Check the invariants and sum up."""
        outcome = self.outcome
        self._keep_timeline = False  # What follows is only tidying up.
        outcome.violations = check_history(self._stored, self._events, unstored_s=_UNSTORED_S)
        starts = [event for event in self._events if isinstance(event, Start)]
        outcome.holdings = len({(start.partition, start.process, start.fence) for start in starts})
        outcome.virtual_s = self._clock()
        outcome.digest = hashlib.sha256(repr(self._events).encode()).hexdigest()[:16]
