"""What a rebalancer can tell of its fleet at one moment: who owns what, who can take something, and who should.

Read from the members, the claims and what workers say of themselves; `memory` knows what came before. Whoever decides
counts what it gives away in `loads` and `incoming`, so that later answers see it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial

from parti.core.fleet_view import Command, FleetView
from parti.core.guests import guests_among, share_of
from parti.core.move import Heir, Owner
from parti.core.orders import honour, placements
from parti.core.planner_memory import Memory
from parti.model.fleet import Claim, MemberState
from parti.strategies.interface import Slot
from parti.strategies.ordering import natural_order


class Situation:
    """The fleet as it is, under the operators' orders."""

    def __init__(self, memory: Memory, view: FleetView) -> None:
        self.memory = memory
        self.policy = memory.policy
        self.view = view
        self.wanted = frozenset(view.partitions)
        self.active = frozenset(w for w, m in view.members.items() if m.state == "active")
        self.guests = guests_among(view.members)
        self.residents = self.active - self.guests
        """Those that share the partitions among them."""
        self.wake_at_s: list[float] = [*memory.held_back.values()]
        self.loads = Counter(c.owner for c in view.claims.values() if c.owner)
        self.incoming = Counter(c.next for c in view.claims.values() if c.next)
        # What guests have is still counted to whoever gets it back, or its place would be given away.
        self.lent = Counter(c.home for c in view.claims.values() if c.home and not c.next and c.owner in self.guests)

    def is_held_back(self, command: Command) -> bool:
        """Whether the claim could not be written just now."""
        return command.partition in self.memory.held_back

    def owner(self, partition: str, claim: Claim) -> Owner:
        """What is known of the owner."""
        member = self.view.members.get(claim.owner)
        if member is None:
            return Owner.GONE if self.is_gone(claim.owner) else Owner.UNSURE
        # A smaller incarnation is an old record: the process that the claim was made for is alive.
        if claim.incarnation < member.incarnation:
            return Owner.LET_GO
        if member.state == "away":
            return Owner.AWAY if claim.incarnation == member.incarnation else Owner.HANDLES
        health = self.view.health.get(claim.owner)
        let_go = (
            claim.state == "moving"
            and health is not None
            and health.incarnation == claim.incarnation
            and health.applied >= claim.awaits
            and partition not in health.busy
        )
        return Owner.LET_GO if let_go else Owner.HANDLES

    def heir(self, partition: str, claim: Claim) -> Heir:
        """What is known of the next owner."""
        can_take = self.can_take(claim.next)
        if not can_take:
            return Heir.UNSURE if can_take is None else Heir.UNABLE
        health = self.view.health.get(claim.next)
        if self.pulls(claim.next) and health and health.ready >= claim.awaits:
            return Heir.READY
        if claim.state != "preparing":
            return Heir.COMING
        late_s = self.memory.preparing_s[partition] + self.policy.ready_within_s
        self.wake_at_s.append(late_s)
        return Heir.COMING if self.view.now_s < late_s else Heir.LATE

    def pulls(self, worker: str) -> bool:
        """Whether a worker says that its consumer works."""
        health = self.view.health.get(worker)
        return health is not None and health.pulling and health.incarnation == self.view.members[worker].incarnation

    def why_not_to(self, worker: str) -> str:
        """Why nothing is moved to a worker now; empty when it may be."""
        if worker not in self.active:
            return f"{worker} is away"
        if not self.pulls(worker):
            return f"{worker} does not pull"
        if (until_s := self.memory.late.get(worker)) is None:
            return ""
        self.wake_at_s.append(until_s)
        return f"{worker} did not get ready in time"

    @cached_property
    def in_transit(self) -> int:
        """How many moves have begun."""
        return sum(c.state in {"preparing", "moving"} for c in self.view.claims.values())

    def is_gone(self, worker: str) -> bool:
        """Whether somebody who is not among the members can be counted as gone.

        When the control plane was away for longer than a lease, all leases have ended, though nobody is gone: a new
        rebalancer gives them time to come back. As long as a single worker has kept its lease, it was not away; and
        whoever was there since the election and no longer is, is gone.
        """
        if worker in self.view.left or self.memory.knows_of(worker):
            return True
        ends_s = self.memory.elected_s + self.policy.takeover_grace_s
        if self.view.now_s < ends_s:
            self.wake_at_s.append(ends_s)
            return False
        return True

    def can_take(self, worker: str) -> bool | None:
        """Whether somebody can get a partition that is on its way to it; None: too early to tell."""
        if worker in self.active:
            return True
        return False if not worker or worker in self.view.members or self.is_gone(worker) else None

    @cached_property
    def slots(self) -> list[Slot]:
        """Everybody who may have partitions in the end."""
        members = sorted(self.view.members.items())
        return [Slot(w, m.capacity, m.weight) for w, m in members if m.state != "draining"]

    @cached_property
    def returning(self) -> Mapping[str, Sequence[str]]:
        """By worker, the partitions that were given to an earlier process under its id."""
        returning: dict[str, list[str]] = {}
        for partition, claim in self.view.claims.items():
            member = self.view.members.get(claim.owner)
            if member is None or member.state == "away" or partition not in self.wanted:
                continue
            if claim.state in {"owned", "preparing"} and claim.incarnation < member.incarnation:
                returning.setdefault(claim.owner, []).append(partition)
        return returning

    @cached_property
    def surplus(self) -> frozenset[str]:
        """Those of them that nobody handles and that their worker has no room for.

        It keeps what is placed on it, then what the strategy would leave there, in natural order.
        """
        found: set[str] = set()
        for worker, partitions in self.returning.items():
            room = self._room_on_return(worker)
            if len(partitions) > room:
                order = sorted(natural_order(partitions), key=partial(self._is_second_choice, worker))
                found.update(order[room:])
        return frozenset(found)

    def _room_on_return(self, worker: str) -> int:
        """How many partitions of an earlier process a worker can take, besides what it has and what is to come."""
        member = self.view.members[worker]
        has = sum(
            claim.owner == worker and claim.state != "free" and claim.incarnation >= member.incarnation
            for claim in self.view.claims.values()
        )
        return max(0, member.capacity - has - self.incoming[worker])

    def _is_second_choice(self, worker: str, partition: str) -> tuple[bool, bool]:
        return self.placed.get(partition) != worker, self.target.get(partition) != worker

    @cached_property
    def placed(self) -> Mapping[str, str]:
        """What operators have placed on members that have room for it."""
        return placements(self.view.orders, self.slots, self.wanted)

    @cached_property
    def target(self) -> Mapping[str, str]:
        """What the strategy would have, given who owns what now and what operators have placed.

        Workers that are away count as if they were there: otherwise everybody's share would change for a moment. What
        is placed on guests counts to the share of whoever had it last, for the same reason.
        """
        view, slots = self.view, [slot for slot in self.slots if slot.worker not in self.guests]
        lent = {p: w for p, w in self.placed.items() if w in self.guests}
        placed = {p: w for p, w in self.placed.items() if w not in self.guests}
        previous = {p: share_of(c, self.guests) for p, c in view.claims.items() if c.state != "free"} | placed
        target = self.memory.strategy.assign(view.partitions, slots, previous, view.weights)
        return honour(placed, target, previous) | lent

    def spare(self, workers: Iterable[str]) -> str:
        """Who of these has least and could take one more; empty if nobody."""
        return min(filter(self.room, workers), key=lambda w: (self.load(w), w), default="")

    def load(self, worker: str) -> float:
        """How much a worker has for its weight."""
        return self.count(worker) / self.view.members[worker].weight

    def room(self, worker: str) -> bool:
        """Whether a worker could take one more and still have back what it has lent to guests."""
        return self.count(worker) < self.view.members[worker].capacity

    def count(self, worker: str) -> int:
        """How many partitions a worker has, or is about to have (again)."""
        return self.loads[worker] + self.incoming[worker] + self.lent[worker]

    def state(self, owner: str) -> MemberState:
        """What an owner is doing; those that are not there may still be back."""
        member = self.view.members.get(owner)
        return member.state if member else "active"

    def gives_way(self, owner: str) -> bool:
        """Whether an owner is about to be without its partitions, so that they wait for no window."""
        return owner in self.guests or self.state(owner) == "draining"

    def is_stuck(self, claim: Claim) -> bool:
        """Whether somebody who drains has a partition that is not on its way."""
        return claim.state == "owned" and self.state(claim.owner) == "draining"

    def stuck(self) -> int:
        """How many partitions draining workers have that are not on their way."""
        draining = any(m.state == "draining" for m in self.view.members.values())
        return sum(map(self.is_stuck, self.view.claims.values())) if draining else 0
