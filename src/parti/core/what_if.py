"""What would happen to the partitions if workers came or went: the planner itself, run ahead on a copy of the fleet.

The planner decides here as it does for the rebalancer, with its windows, capacities and hysteresis, so the answer is
what the fleet would do and not only what the strategy would like. Time is passed in and costs nothing; every worker
counts as quick: it lets go of a partition as soon as it is told to.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Literal

import msgspec

from parti.core.fleet_view import (
    BeginMove,
    Command,
    Decision,
    FleetState,
    FleetView,
    Free,
    Give,
    Keep,
    MemberView,
    Policy,
    Release,
)
from parti.core.guests import guests_among, home_after, share_of
from parti.core.orders import obey
from parti.core.planner import Planner
from parti.model.fleet import Claim, HealthRecord, Orders
from parti.strategies import Sticky, minimum_moves
from parti.strategies.interface import Slot, Strategy

_NOW_S = 1e6
"""Long enough after the election for every grace and window of the past to be over."""
_TURN_S = 0.1
_MOST_TURNS = 100
_EVERY_VERSION = 2**62
"""Of assignments: each worker has applied the newest one."""
_SOME_DAY = datetime(2000, 1, 1, tzinfo=UTC)

MoveKind = Literal["moved", "begun", "given", "kept"]
"""`moved`: from a live worker to another. `begun`: such a move that was under way already. `given`: it had no live
owner. `kept`: the same worker id gets it again, as a new process."""


@dataclass(frozen=True, slots=True)
class Move:
    """One change of ownership."""

    partition: str
    source: str
    """Who owned it; empty for nobody."""
    target: str
    kind: MoveKind
    reason: str
    after_s: float
    """When it begins, counted from the change."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """The fleet as it is."""

    members: Mapping[str, MemberView]
    claims: Mapping[str, Claim]
    settled: bool = True
    """The rebalancer is done, and leaves an imbalance within the hysteresis alone."""
    orders: Orders = field(default_factory=Orders)
    """Those that stand; paused partitions do not count."""
    loads: Mapping[str, float] | None = None
    """Loads of the partitions, if they are measured."""


@dataclass(frozen=True, slots=True)
class Change:
    """Who comes and who goes, all at once; those that leave do not come back."""

    joins: Mapping[str, MemberView] = field(default_factory=dict)
    leaves: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Outlook:
    """What would follow from a change, until nothing is left to do."""

    moves: tuple[Move, ...]
    """In the order in which they would happen."""
    minimum: int
    """How many partitions at least must leave a live worker for an even share."""
    before: Mapping[str, int]
    """Partitions of each owner, also of those that are gone."""
    after: Mapping[str, int]
    partitions: int
    unowned: tuple[str, ...]
    """Partitions that nobody would own in the end."""
    load_before: Mapping[str, float]
    """Measured load of each owner; empty where nothing is measured."""
    load_after: Mapping[str, float]
    state: FleetState
    """What the rebalancer would say in the end."""
    reason: str

    def count(self, kind: MoveKind) -> int:
        """How many moves of a kind there are."""
        return sum(move.kind == kind for move in self.moves)


def foresee(fleet: Fleet, change: Change, strategy: Strategy, policy: Policy) -> Outlook:
    """Run the planner ahead until it has nothing left to do.

    Partitions are those that are claimed: what the source names beyond them is not known here, and what it no longer
    names is given up.
    """
    return _Future(fleet, change, strategy, policy).outlook()


class _Future:
    """The fleet after the change, and what the planner makes of it."""

    def __init__(self, fleet: Fleet, change: Change, strategy: Strategy, policy: Policy) -> None:
        # How many move at a time changes when they move, not where to; and turns are counted here.
        policy = replace(policy, moves_at_once=max(policy.moves_at_once, len(fleet.claims)))
        self._orders = fleet.orders
        self._loads = fleet.loads
        self._start = fleet.claims
        self._claims = dict(fleet.claims)
        resting = fleet.orders.resting
        self._partitions = tuple(p for p, claim in fleet.claims.items() if _is_wanted(claim) and p not in resting)
        self._members = {w: m for w, m in fleet.members.items() if w not in change.leaves} | dict(change.joins)
        self._left = frozenset(change.leaves)
        self._health = {
            worker: HealthRecord(
                incarnation=member.incarnation,
                applied=_EVERY_VERSION,
                ready=_EVERY_VERSION,
                pulling=True,
                at=_SOME_DAY,
            )
            for worker, member in self._members.items()
        }
        self._begun_s: dict[str, float] = {}
        self._moves: list[Move] = []
        self._planner = Planner(strategy, policy, elected_s=0.0)
        if fleet.settled or change.joins or change.leaves:
            # Long ago it saw these members and found nothing to do. So it notices who comes and goes now, and
            # otherwise keeps to its hysteresis; without this it would act as one that was elected just now.
            self._planner.step(FleetView(0.0, fleet.members, partitions=(), claims={}, orders=fleet.orders))

    def outlook(self) -> Outlook:
        """Let time pass and tell what happened."""
        last = self._run()
        owned = {p: self._claims[p].owner for p in self._partitions}
        return Outlook(
            moves=tuple(self._moves),
            minimum=self._minimum(),
            before=Counter(c.owner for p in self._partitions if (c := self._start[p]).owner),
            after=Counter(owner for owner in owned.values() if owner in self._members),
            partitions=len(owned),
            unowned=tuple(p for p, owner in owned.items() if owner not in self._members),
            load_before=self._load_of({p: self._start[p].owner for p in self._partitions}),
            load_after=self._load_of(owned),
            state=last.state,
            reason=last.reason,
        )

    def _load_of(self, owners: Mapping[str, str]) -> Mapping[str, float]:
        found: dict[str, float] = defaultdict(float)
        for partition, owner in owners.items() if self._loads else ():
            found[owner] += (self._loads or {}).get(partition, 0.0)
        return dict(found)

    def _run(self) -> Decision:
        now_s = _NOW_S
        for _ in range(_MOST_TURNS):
            decision = self._planner.step(self._view(now_s))
            for command in decision.commands:
                self._do(command, now_s - _NOW_S)
            if decision.commands:
                now_s += _TURN_S
            elif decision.wake_at_s is not None:
                now_s = decision.wake_at_s
            else:
                break
        return decision

    def _view(self, now_s: float) -> FleetView:
        return FleetView(
            now_s,
            self._members,
            self._partitions,
            self._claims,
            self._health,
            self._left,
            weights=self._loads,
            orders=self._orders,
        )

    def _do(self, command: Command, after_s: float) -> None:
        partition, claim = command.partition, self._claims[command.partition]
        if isinstance(command, Give):
            self._note(command, claim, after_s)
            self._claims[partition] = msgspec.structs.replace(
                claim,
                owner=command.owner,
                incarnation=self._members[command.owner].incarnation,
                state="owned",
                next="",
                home=home_after(claim, command.owner, guests_among(self._members)),
            )
        elif isinstance(command, BeginMove):
            self._begun_s[partition] = after_s
            self._claims[partition] = msgspec.structs.replace(
                claim, state="moving", next=command.next, reason=command.reason, awaits=1
            )
        elif isinstance(command, Release):
            self._claims[partition] = msgspec.structs.replace(claim, state="moving", awaits=1)
        elif isinstance(command, Keep):
            self._claims[partition] = msgspec.structs.replace(claim, state="owned", next="")
        elif isinstance(command, Free):
            self._claims[partition] = msgspec.structs.replace(claim, owner="", state="free", next="", home="")

    def _note(self, give: Give, claim: Claim, after_s: float) -> None:
        if give.owner == claim.owner and claim.incarnation == self._members[give.owner].incarnation:
            return  # A move is called off; nothing has changed hands.
        partition = give.partition
        kind: MoveKind = "moved"
        if give.owner == claim.owner:
            kind = "kept"
        elif claim.owner not in self._members:
            kind = "given"
        elif partition not in self._begun_s and self._start[partition].next:
            kind = "begun"
        begun_s = self._begun_s.pop(partition, after_s)
        self._moves.append(Move(partition, claim.owner, give.owner, kind, give.reason, begun_s))

    def _minimum(self) -> int:
        """Partitions of those that are gone need a worker anyway, and those of one that is away wait for it.

        Guests count for nothing: what they have counts to those that they have it from.
        """
        members = obey(self._view(_NOW_S)).members
        guests = guests_among(members)
        residents = {worker: member for worker, member in members.items() if worker not in guests}
        active = {worker for worker, member in residents.items() if member.state == "active"}
        draining = {worker for worker, member in residents.items() if member.state == "draining"}
        previous = {p: share_of(self._start[p], guests) for p in self._partitions}
        slots = [Slot(w, m.capacity, m.weight) for w, m in residents.items() if w not in draining]
        if not active:
            return 0
        if len(slots) == len(active):
            least = minimum_moves(self._partitions, slots, previous)
        else:
            target = Sticky().assign(self._partitions, slots, previous)
            least = sum(w in active and target.get(p, w) in active - {w} for p, w in previous.items())
        return least + sum(worker in draining for worker in previous.values())


def _is_wanted(claim: Claim) -> bool:
    return claim.state == "owned" or bool(claim.next)
