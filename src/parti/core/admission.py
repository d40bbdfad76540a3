"""Weighted admission: who may use how many of a fixed number of slots, and when.

Events in (`ask`, `release`, `cancel`), grants out (`admit`). A ticket that cannot be granted waits in the order of
its priority, then of its arrival. Two things may change that order, and both are bounded:

- *Look-ahead*: a ticket that fits may overtake earlier ones, so that no slot stands empty beside work that could use
  it; of several the largest. Each waiting ticket is overtaken at most `overtakings` times.
- *Due*: a ticket that was overtaken that often, or that has waited for `patience_s`, is due. Due tickets come before
  all others, whatever the priorities, and nothing overtakes them: slots that become free are kept for them.

So the wait of a large ticket is bounded: what was granted before it, at most `overtakings` later ones, and those that
were due before it. Passing time alone never makes a ticket grantable, so nobody has to wake up for it.

The lanes' capacity is a different question, and only its arithmetic is shared. A lane's message has no cost, and what
does not fit is left on the server, which keeps the order: there is no queue here to be fair about, only a room to be
computed (`parti.core.batch.pull_size`). Job workers use that same function for the messages that they hold; slots are
for the work inside a job, whose cost is known only there.

Guards: the slots in use never exceed the capacity, and a ticket that ends, in whatever way, gives back what it had.
"""

from __future__ import annotations

import enum
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import inf


@dataclass(frozen=True, slots=True)
class LookAhead:
    """How far the order of arrival may be left to keep slots in use."""

    window: int = 64
    """Waiting tickets that are looked at behind one that does not fit."""
    overtakings: int = 30
    """How often one ticket may be overtaken."""
    patience_s: float = 600.0
    """Nothing overtakes a ticket that has waited this long."""

    @property
    def reach(self) -> int:
        """Tickets behind the head that may be granted before it."""
        return self.window if self.overtakings else 0

    def __post_init__(self) -> None:
        if self.window < 0 or self.overtakings < 0 or not self.patience_s >= 0:
            raise ValueError("window, overtakings and patience_s of a look-ahead must not be negative")


STRICT = LookAhead(window=0, overtakings=0, patience_s=inf)
"""First come, first served, within each priority."""


class Stage(enum.Enum):
    """Where a ticket is in its life."""

    WAITING = "waiting"
    GRANTED = "granted"
    ENDED = "ended"


class Ticket:
    """One wish for slots, from `ask` to `release` or `cancel`."""

    __slots__ = ("asked_s", "cost", "granted_s", "number", "overtaken", "priority", "slots", "stage")

    def __init__(self, number: int, cost: int, slots: int, priority: int, asked_s: float) -> None:
        self.number = number
        """Order of arrival."""
        self.cost = cost
        self.slots = slots
        """What it gets: its cost, or the whole capacity if that is less."""
        self.priority = priority
        self.asked_s = asked_s
        self.granted_s: float | None = None
        self.overtaken = 0
        self.stage = Stage.WAITING

    @property
    def rank(self) -> tuple[int, int]:
        """Its place in the queue while it is not due: the higher priority first, then the earlier arrival."""
        return (-self.priority, self.number)

    def __repr__(self) -> str:
        return f"<Ticket {self.number} {self.stage.value}, cost {self.cost}, {self.slots} slots>"


class Admission:
    """`capacity` slots and the tickets that use or want them."""

    def __init__(self, capacity: int, look_ahead: LookAhead | None = None) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 slot, got {capacity}")
        self.capacity = capacity
        self.look_ahead = look_ahead or LookAhead()
        self.used = 0
        self._numbers = 0
        self._waiting: list[Ticket] = []
        self._granted: set[Ticket] = set()

    @property
    def waiting(self) -> int:
        """Tickets that wait."""
        return len(self._waiting)

    @property
    def granted(self) -> int:
        """Tickets that have their slots."""
        return len(self._granted)

    @property
    def free(self) -> int:
        """Slots that nobody uses."""
        return self.capacity - self.used

    def slots_of(self, cost: int) -> int:
        """How many slots a cost takes: one that is above the capacity takes all of it.

        Raises ValueError for a cost below 1.
        """
        if type(cost) is not int or cost < 1:
            raise ValueError(f"cost must be a whole number of slots, at least 1; got {cost!r}")
        return min(cost, self.capacity)

    # ── events ────────────────────────────────────────────────────────────────────────────────────────────────

    def ask(self, cost: int, priority: int = 0, *, now_s: float) -> Ticket:
        """Put a ticket into the queue; `admit` says when it is its turn. Raises ValueError for a cost below 1."""
        slots = self.slots_of(cost)
        self._numbers += 1
        ticket = Ticket(self._numbers, cost, slots, priority, now_s)
        insort(self._waiting, ticket, key=lambda other: other.rank)
        return ticket

    def release(self, ticket: Ticket) -> None:
        """Take back the slots of a granted ticket."""
        assert ticket in self._granted, f"{ticket!r} has no slots to release"
        self._granted.remove(ticket)
        self.used -= ticket.slots
        ticket.stage = Stage.ENDED
        assert self.used >= 0, "more slots were released than granted"

    def cancel(self, ticket: Ticket) -> bool:
        """End a ticket, whatever it is doing; True when slots became free. Ending it again does nothing."""
        if ticket.stage is Stage.GRANTED:
            self.release(ticket)
            return True
        if ticket.stage is Stage.WAITING:
            self._waiting.remove(ticket)
            ticket.stage = Stage.ENDED
        return False

    def admit(self, now_s: float) -> list[Ticket]:
        """Grant what can be granted now, and return it in order."""
        grants: list[Ticket] = []
        while (ticket := self._next(now_s)) is not None:
            self._waiting.remove(ticket)
            self._granted.add(ticket)
            self.used += ticket.slots
            ticket.stage, ticket.granted_s = Stage.GRANTED, now_s
            grants.append(ticket)
            assert self.used <= self.capacity, f"{self.used} of {self.capacity} slots granted"
        return grants

    # ── decisions ─────────────────────────────────────────────────────────────────────────────────────────────

    def is_due(self, ticket: Ticket, now_s: float) -> bool:
        """Whether nothing may overtake a waiting ticket any more."""
        bound = self.look_ahead
        return (bound.overtakings > 0 and ticket.overtaken >= bound.overtakings) or (
            now_s - ticket.asked_s >= bound.patience_s
        )

    def _next(self, now_s: float) -> Ticket | None:
        if not self._waiting or not self.free:
            return None
        due = [ticket for ticket in self._waiting if self.is_due(ticket, now_s)]
        if due:
            first = min(due, key=lambda ticket: ticket.number)
            return first if first.slots <= self.free else None
        return self._largest_that_fits()

    def _largest_that_fits(self) -> Ticket | None:
        """Of the head and the window behind it: the highest priority, then the most slots; who is passed is told.

        Preferring large ones lets them follow one another without the slots being emptied for each: over mixed
        backlogs the slots are used more, and the large ones wait less, than if the first were taken that fits.
        """
        chosen, place = None, 0
        for at, ticket in enumerate(islice(self._waiting, 1 + self.look_ahead.reach)):
            if chosen is not None and (ticket.priority < chosen.priority or ticket.slots <= chosen.slots):
                continue
            if ticket.slots <= self.free:
                chosen, place = ticket, at
        for passed in self._waiting[:place]:
            passed.overtaken += 1
        return chosen

    def tickets(self) -> Iterator[Ticket]:
        """Those that wait, in the order of the queue."""
        return iter(tuple(self._waiting))

    def check(self) -> None:
        """Assert what must always hold; for tests, and cheap enough to be left on."""
        assert 0 <= self.used <= self.capacity
        assert self.used == sum(ticket.slots for ticket in self._granted), "slots have leaked"
        assert all(ticket.stage is Stage.GRANTED for ticket in self._granted)
        assert all(ticket.stage is Stage.WAITING for ticket in self._waiting)
        assert all(a.rank < b.rank for a, b in zip(self._waiting, self._waiting[1:], strict=False))
        limit = self.look_ahead.overtakings
        assert all(ticket.overtaken <= limit for ticket in self._waiting), "a ticket was overtaken too often"
