"""A model of the fleet around the planner: members, claims, assignments, and what each process really handles.

It does with a decision what the rebalancer does, without a server, and checks every command against what the
processes are doing. A process counts as handling a partition from the moment that it is given it until the process
has confirmed that it let go, is away, or its lease has ended: whatever the planner does must be right for the slowest
process. It counts as ready for a partition only after its consumer has taken up the assignment that names it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec

from parti.core.causes import Cause
from parti.core.fleet_view import (
    BeginMove,
    Command,
    Decision,
    FleetView,
    Free,
    Give,
    Keep,
    MemberView,
    Policy,
    Release,
)
from parti.core.guests import home_after
from parti.core.planner import Planner
from parti.model.fleet import Claim, HealthRecord, MemberState, Orders
from parti.strategies import Strategy

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class Process:
    """One incarnation of a worker id."""

    incarnation: int
    state: MemberState = "active"
    capacity: int = 500
    weight: float = 1.0
    guest: bool = False
    handles: set[str] = field(default_factory=set)
    carries: set[str] = field(default_factory=set)
    """What its consumer has taken up: its own partitions and those that it is to get."""
    pulls: bool = True
    slow: bool = False
    """Whether its consumer takes up nothing new for now."""
    stale_incarnation: int = 0
    """Set while the rebalancer has read an older record of this id."""

    @property
    def seen_incarnation(self) -> int:
        """What the rebalancer takes it for."""
        return self.stale_incarnation or self.incarnation


@dataclass(slots=True)
class AssignmentModel:
    """What a worker was last told, and how often that has changed."""

    version: int = 0
    incarnation: int = 0
    fences: dict[str, int] = field(default_factory=dict)
    incoming: frozenset[str] = frozenset()


@dataclass(slots=True)
class Tally:
    """What has been decided so far."""

    begun: list[tuple[str, str, str]] = field(default_factory=list)
    """Moves between live workers: partition, from, to."""
    given: list[Give] = field(default_factory=list)
    kept: list[Keep] = field(default_factory=list)


class FleetModel:
    """Events go in; `step` asks the planner, checks its commands and carries them out."""

    def __init__(self, strategy: Strategy, policy: Policy, partitions: Iterable[str]) -> None:
        self.strategy = strategy
        self.policy = policy
        self.partitions = tuple(partitions)
        self.loads: dict[str, float] | None = None
        self.now_s = 0.0
        self.grace_ends_s = policy.takeover_grace_s
        """Before this nobody may be called lost, because all leases have ended at once."""
        self.planner: Planner | None = Planner(strategy, policy, elected_s=0.0)
        self.seen: set[str] = set()
        """Workers that the rebalancer in office has seen."""
        self.members: dict[str, Process] = {}
        self.left: set[str] = set()
        self.claims: dict[str, Claim] = {}
        self.health: dict[str, HealthRecord] = {}
        self.assignments: dict[str, AssignmentModel] = {}
        self.orders = Orders()
        self.refused: set[str] = set()
        """Partitions whose claims cannot be written at the moment."""
        self.tally = Tally()
        self._looked = False
        self._incarnations = 0
        self._fence = 0

    # ── events ────────────────────────────────────────────────────────────────────────────────────────────────

    def join(self, worker: str, *, capacity: int = 500, weight: float = 1.0, guest: bool = False) -> None:
        """A process takes the id, whoever held it before, and begins to pull; also a restart."""
        self._incarnations += 1
        self.members[worker] = Process(self._incarnations, capacity=capacity, weight=weight, guest=guest)
        self.health[worker] = HealthRecord(incarnation=self._incarnations, pulling=True, at=EPOCH)
        self.left.discard(worker)

    def leave(self, worker: str) -> None:
        """It stopped, and said so."""
        del self.members[worker]
        self.left.add(worker)

    def lose(self, worker: str) -> None:
        """Its lease ended."""
        del self.members[worker]

    def away(self, worker: str) -> None:
        """It stopped and will be back under the same id."""
        self.members[worker].state = "away"
        self.members[worker].handles.clear()

    def rejoin(self, worker: str) -> None:
        """A new process holds the id, with the same limits."""
        before = self.members.get(worker)
        if before is None:
            self.join(worker)
        else:
            self.join(worker, capacity=before.capacity, weight=before.weight, guest=before.guest)

    def drain(self, worker: str) -> None:
        """It wants to give everything away; one that is away wants nothing."""
        if self.members[worker].state != "away":
            self.members[worker].state = "draining"

    def apply(self, worker: str, busy: Iterable[str] = ()) -> None:
        """It puts its newest assignment in force and says so; the handlers of `busy` still run."""
        process, told = self.members[worker], self._told(worker)
        if told.version:
            running = (process.handles & set(busy)) - told.fences.keys()
            process.handles = set(told.fences) | running
            self._report(worker, applied=told.version, busy=tuple(sorted(running)))
        self.get_ready(worker)

    def get_ready(self, worker: str) -> None:
        """Its consumer takes up what it was told of, unless it is slow, and it says so."""
        process, told = self.members[worker], self._told(worker)
        if told.version and not process.slow:
            process.carries = told.fences.keys() | told.incoming
            self._report(worker, ready=told.version)

    def pull(self, worker: str, *, pulls: bool = True, slow: bool = False) -> None:
        """Its consumer works or does not, and is quick or slow to take up anything new."""
        self.members[worker].pulls, self.members[worker].slow = pulls, slow
        self._report(worker)

    def order(self, **changes: object) -> None:
        """Operators want something else."""
        self.orders = msgspec.structs.replace(self.orders, **changes)

    def _told(self, worker: str) -> AssignmentModel:
        """What this process was told; nothing, when that was meant for another one."""
        told = self.assignments.get(worker, AssignmentModel())
        return told if told.incarnation == self.members[worker].incarnation else AssignmentModel()

    def _report(self, worker: str, **changes: object) -> None:
        process, health = self.members[worker], self.health.get(worker)
        if health is None or health.incarnation != process.incarnation:
            health = HealthRecord(incarnation=process.incarnation, at=EPOCH)
        self.health[worker] = msgspec.structs.replace(health, pulling=process.pulls, **changes)

    def elect(self) -> None:
        """Another rebalancer takes over; it knows the records and nothing else."""
        self.grace_ends_s = self.now_s + self.policy.takeover_grace_s
        self._looked = False
        self.planner = Planner(self.strategy, self.policy, elected_s=self.now_s)
        self.seen.clear()
        self.left.clear()

    # ── deciding ──────────────────────────────────────────────────────────────────────────────────────────────

    def view(self) -> FleetView:
        """What the rebalancer sees now."""
        members = {
            worker: MemberView(p.seen_incarnation, p.state, p.capacity, p.weight, p.guest)
            for worker, p in self.members.items()
        }
        return FleetView(
            now_s=self.now_s,
            members=members,
            partitions=self.partitions,
            claims=dict(self.claims),
            health=dict(self.health),
            left=frozenset(self.left),
            weights=self.loads,
            orders=self.orders,
        )

    def step(self) -> tuple[Decision, list[Command]]:
        """Ask once and carry the answer out; returns it with the commands that could not be written."""
        assert self.planner is not None, "no rebalancer is elected"
        view = self.view()
        if not self._looked and any(
            (member := view.members.get(claim.owner)) and member.incarnation == claim.incarnation
            for claim in view.claims.values()
        ):
            self.grace_ends_s = self.now_s  # somebody stayed: the control plane was not away
        self._looked = True
        self.seen |= view.members.keys()
        decision = self.planner.step(view)
        refused = [c for c in decision.commands if c.partition in self.refused]
        self._check(view, decision)
        for command in decision.commands:
            if command.partition not in self.refused:
                self._carry_out(command)
        self._write_assignments()
        self._check_handlers()
        if refused:
            self.planner.claim_failed([c.partition for c in refused], self.now_s)
        return decision, refused

    def _carry_out(self, command: Command) -> None:
        match command:
            case Give(partition, owner, reason):
                self._fence += 1
                before = self.claims.get(partition)
                assert before is None or before.fence_token < self._fence
                process = self.members[owner]
                home = home_after(before, owner, self.guests())
                self.claims[partition] = _claim(owner, process.seen_incarnation, self._fence, reason, home)
                if process.seen_incarnation == process.incarnation:
                    process.handles.add(partition)
                self.tally.given.append(command)
            case BeginMove(partition, next_owner, reason):
                claim = self.claims[partition]
                prepares = self.policy.overlap and next_owner
                self.claims[partition] = msgspec.structs.replace(
                    claim,
                    state="preparing" if prepares else "moving",
                    next=next_owner,
                    reason=reason,
                    awaits=self._next_version(next_owner if prepares else claim.owner),
                )
                self.tally.begun.append((partition, claim.owner, next_owner))
            case Release(partition, reason):
                claim = self.claims[partition]
                self.claims[partition] = msgspec.structs.replace(
                    claim, state="moving", reason=reason, awaits=self._next_version(claim.owner)
                )
            case Keep(partition, reason):
                self.claims[partition] = msgspec.structs.replace(
                    self.claims[partition], state="owned", next="", reason=reason
                )
                self.tally.kept.append(command)
            case Free(partition, reason, cause):
                self.claims[partition] = msgspec.structs.replace(
                    self.claims[partition], owner="", next="", state="free", reason=reason, cause=cause
                )

    def _next_version(self, worker: str) -> int:
        return self.assignments.get(worker, AssignmentModel()).version + 1

    def _write_assignments(self) -> None:
        told = {w: AssignmentModel(incarnation=p.seen_incarnation) for w, p in self._present().items()}
        due = dict.fromkeys(told, 0)
        for partition, claim in self.claims.items():
            if self.policy.overlap and claim.state in {"preparing", "moving"} and claim.next in told:
                told[claim.next].incoming |= {partition}
            if claim.state == "preparing" and claim.next in told:
                due[claim.next] = max(due[claim.next], claim.awaits)
            if claim.owner not in told or claim.incarnation != told[claim.owner].incarnation:
                continue
            if claim.state == "moving":
                due[claim.owner] = max(due[claim.owner], claim.awaits)
            else:
                told[claim.owner].fences[partition] = claim.fence_token
        for worker, now in told.items():
            before = self.assignments.setdefault(worker, AssignmentModel())
            now.version = before.version
            if now != before or before.version < due[worker]:
                now.version += 1
                self.assignments[worker] = now

    def _present(self) -> dict[str, Process]:
        return {worker: process for worker, process in self.members.items() if process.state != "away"}

    # ── what must never happen ────────────────────────────────────────────────────────────────────────────────

    def _check(self, view: FleetView, decision: Decision) -> None:
        concerned = [c.partition for c in decision.commands]
        assert len(set(concerned)) == len(concerned), f"two commands for one partition: {decision.commands}"
        assert decision.wake_at_s is None or decision.wake_at_s > self.now_s, f"wakes in the past: {decision}"
        for command in decision.commands:
            match command:
                case Give():
                    self._check_give(view, command)
                case BeginMove():
                    self._check_begin(view, command)
                case Release():
                    self._check_release(view, command)
                case Keep():
                    claim = view.claims[command.partition]
                    assert claim.state == "preparing", f"is not on its way: {command}"
                    assert claim.owner in view.members, f"nobody there to keep it: {command}"
                case Free():
                    self._check_nobody_else_handles(command.partition, None)
                    self._check_free(view, command)
        self._check_budget(view, decision)
        self._check_room(view, decision)

    def _check_give(self, view: FleetView, give: Give) -> None:
        assert give.partition in self.wanted(), f"not wanted: {give}"
        assert give.owner in view.members, f"not a member: {give}"
        claim = view.claims.get(give.partition)
        if give.owner in self.guests() and not (claim and give.owner in {claim.owner, claim.next}):
            assert self.orders.placed.get(give.partition) == give.owner, f"a guest gets what is not placed: {give}"
        if claim is None or claim.state == "free":
            self._check_takes(give.owner, give)
            return
        if claim.owner not in view.members:
            unheard_of = claim.owner not in view.left | self.seen
            early = self.now_s < self.grace_ends_s and unheard_of
            assert not early, f"counted as gone too early: {give}"
        elif claim.owner != give.owner:
            restarted = claim.incarnation < view.members[claim.owner].incarnation
            assert claim.state == "moving" or restarted, f"taken from a member that was not told to let go: {give}"
        else:
            restarted = claim.incarnation < view.members[claim.owner].incarnation
            assert claim.state == "moving" or restarted, f"an owner that never stopped is interrupted: {give}"
        self._check_nobody_else_handles(give.partition, give.owner)

    def _check_free(self, view: FleetView, free: Free) -> None:
        claim = view.claims[free.partition]
        if free.cause == Cause.FULL and claim.state == "free":
            assert free.partition in self.wanted(), f"nobody wants it: {free}"
        elif free.cause == Cause.FULL:
            owner = view.members[claim.owner]
            assert claim.incarnation < owner.incarnation, f"taken from a process that owns it: {free}"
            has = sum(claim.owner in {c.owner, c.next} for c in view.claims.values())
            assert has > owner.capacity, f"there is room for it: {free}"
        else:
            assert free.partition not in self.wanted(), f"still wanted: {free}"

    def _check_begin(self, view: FleetView, begin: BeginMove) -> None:
        claim = view.claims[begin.partition]
        assert claim.owner in view.members, f"nobody there to let go: {begin}"
        if begin.next:
            assert claim.state == "owned", f"does not own it: {begin}"
            assert view.members[claim.owner].state != "away", f"cannot let go: {begin}"
            assert begin.partition in self.wanted(), f"not wanted: {begin}"
            assert begin.next != claim.owner, f"moves nowhere: {begin}"
            self._check_takes(begin.next, begin)
            assert self.members[begin.next].pulls, f"does not pull: {begin}"
            if begin.next in self.guests():
                assert self.orders.placed.get(begin.partition) == begin.next, f"not placed on a guest: {begin}"
            owner = view.members[claim.owner]
            held = self.orders.hold_moves and owner.state == "active" and not owner.guest
            assert not held or claim.owner in self.orders.drained, f"moves are paused: {begin}"
        else:
            assert claim.state in {"owned", "preparing"}, f"was told already: {begin}"
            assert begin.partition not in self.wanted(), f"still wanted: {begin}"

    def _check_release(self, view: FleetView, release: Release) -> None:
        """The gate of a move: whoever lets go knows that the next one is there."""
        claim = view.claims[release.partition]
        assert claim.state == "preparing", f"nobody got ready for it: {release}"
        self._check_takes(claim.next, release)
        heir = self.members[claim.next]
        assert heir.pulls, f"{claim.next} does not pull: {release}"
        assert release.partition in heir.carries, f"{claim.next} does not carry it: {release}"

    def _check_takes(self, worker: str, command: Command) -> None:
        takes = self.members[worker].state == "active" and worker not in self.orders.drained
        assert takes, f"takes nothing new: {command}"

    def _check_room(self, view: FleetView, decision: Decision) -> None:
        """Who is back is not given more than it can take."""
        back = Counter(c.owner for c in decision.commands if isinstance(c, Give) and c.cause == Cause.RETURN)
        for worker, given in back.items():
            member = view.members[worker]
            has = sum((c.owner, c.incarnation) == (worker, member.incarnation) for c in view.claims.values())
            assert has + given <= member.capacity, f"{worker} has more than it can take: {decision}"

    def _check_budget(self, view: FleetView, decision: Decision) -> None:
        begun = sum(isinstance(c, BeginMove) and bool(c.next) for c in decision.commands)
        on_their_way = begun + sum(c.state in {"preparing", "moving"} for c in view.claims.values())
        assert not begun or on_their_way <= self.policy.moves_at_once, f"{on_their_way} move at once: {decision}"

    def _check_handlers(self) -> None:
        """After every step: who may be handling a partition is the owner that its claim names."""
        for worker, process in self.members.items():
            for partition in process.handles:
                claim = self.claims[partition]
                named = (claim.owner, claim.incarnation) == (worker, process.incarnation)
                assert named, f"{worker} handles {partition} against its claim: {claim}"

    def _check_nobody_else_handles(self, partition: str, owner: str | None) -> None:
        """OneOwner, against what the processes do."""
        others = [w for w, p in self.members.items() if partition in p.handles and w != owner]
        assert not others, f"{partition} is given to {owner or 'nobody'} while {others} may be handling it"

    # ── questions ─────────────────────────────────────────────────────────────────────────────────────────────

    def wanted(self) -> list[str]:
        """The partitions that somebody is to handle."""
        return [p for p in self.partitions if p not in self.orders.paused]

    def guests(self) -> set[str]:
        """Members that get nothing but what is placed on them."""
        return {worker for worker, process in self.members.items() if process.guest}

    def owners(self) -> dict[str, list[str]]:
        """The partitions of each owner; those that nobody owns under an empty name."""
        found: dict[str, list[str]] = {}
        for partition in self.partitions:
            claim = self.claims.get(partition)
            found.setdefault(claim.owner if claim else "", []).append(partition)
        return found


def _claim(owner: str, incarnation: int, fence_token: int, reason: str, home: str) -> Claim:
    return Claim(
        owner=owner,
        incarnation=incarnation,
        fence_token=fence_token,
        claimed_at=EPOCH,
        ttl_seconds=6.0,
        term=1,
        reason=reason,
        home=home,
    )
