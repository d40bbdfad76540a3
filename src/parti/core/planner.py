"""What the rebalancer does next: a pure decision from what it sees of the fleet.

`Planner.step(view)` is called whenever something may have changed. It compares the claims with the members and the
wanted partitions and returns commands; the driver turns each into writes. Nothing is remembered that a successor
could not work out from the claims, except when the windows began.

Order of care:
  1. a partition that nobody can be handling is given away at once (only a cold start waits for others to show up);
  2. moves that have begun are brought to their end;
  3. partitions move between live workers only after a window without joins and leaves, at most once in a minimum
     interval, and not for the sake of a small imbalance.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from parti.model.fleet import Claim, HealthRecord, MemberState
from parti.strategies.interface import Slot, Strategy


class FleetState(enum.StrEnum):
    """What a worker, or the fleet as the rebalancer sees it, is doing."""

    INIT = "init"
    CLAIMING_ID = "claiming id"
    ELECTION = "election"
    WAITING = "waiting"
    STABLE = "stable"
    SCALING = "scaling"
    REBALANCING = "rebalancing"
    EMERGENCY = "emergency"
    DEGRADED = "degraded"
    DRAINING = "draining"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class MemberView:
    """A worker whose lease has not ended."""

    incarnation: int
    state: MemberState = "active"
    capacity: int = 500
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class FleetView:
    """Everything that a decision is based on, at one moment."""

    now_s: float
    members: Mapping[str, MemberView]
    partitions: Sequence[str]
    claims: Mapping[str, Claim]
    health: Mapping[str, HealthRecord] = field(default_factory=dict)
    left: frozenset[str] = frozenset()
    """Workers that are gone and said so; others that are gone are lost."""
    weights: Mapping[str, float] | None = None
    """Load of each partition, if known."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Windows and limits, all in seconds unless said otherwise."""

    cold_start_window_s: float = 1.0
    """With nobody owning anything: wait so long after the last join, for others to show up."""
    scale_window_s: float = 3.0
    """Before moves between live workers: wait so long after the last join or leave."""
    min_rebalance_interval_s: float = 5.0
    takeover_grace_s: float = 2.0
    """A new rebalancer does not count anybody as gone before this."""
    hysteresis: float = 0.1
    """Imbalance that is not worth moving for, as a share of the mean number of partitions per worker."""
    retry_s: float = 1.0
    """A claim that could not be written is left alone for so long."""


# ── commands ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Give:
    """Make `owner` the owner, with a larger fence token, at the position where the last one stopped."""

    partition: str
    owner: str
    reason: str


@dataclass(frozen=True, slots=True)
class BeginMove:
    """Tell the owner to let go of a partition, for `next` (or for nobody, when it is no longer wanted)."""

    partition: str
    next: str
    reason: str


@dataclass(frozen=True, slots=True)
class Free:
    """Nobody owns the partition from now on; its position is kept."""

    partition: str
    reason: str


Command: TypeAlias = Give | BeginMove | Free


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, what the fleet is doing, why, and when to look again without being asked."""

    commands: tuple[Command, ...]
    state: FleetState
    reason: str
    wake_at_s: float | None = None


class Planner:
    """Decides for one rebalancer, from its election on."""

    def __init__(self, strategy: Strategy, policy: Policy, *, elected_s: float) -> None:
        self._strategy = strategy
        self._policy = policy
        self._elected_s = elected_s
        self._active: frozenset[str] | None = None
        self._window_began_s = elected_s
        self._changed_s = elected_s
        self._balanced_s = float("-inf")
        self._settled = False
        self._looked_s = float("-inf")
        self._held_back: dict[str, float] = {}

    def claim_failed(self, partitions: Sequence[str], now_s: float) -> None:
        """The claims of these could not be written: they stay where they are and are tried again later."""
        for partition in partitions:
            self._held_back[partition] = now_s + self._policy.retry_s

    def step(self, view: FleetView) -> Decision:
        """Decide what to do now."""
        self._note_members(view)
        self._held_back = {p: until for p, until in self._held_back.items() if until > view.now_s}
        return _Step(self, view).decide()

    def _note_members(self, view: FleetView) -> None:
        """Keep the time of the last join or leave."""
        active = frozenset(w for w, m in view.members.items() if m.state == "active")
        before, self._active = self._active, active
        if before is None or active == before:
            return
        if view.now_s - self._changed_s > self._window(view):
            self._window_began_s = view.now_s
        self._changed_s = view.now_s
        self._settled = False

    def _window(self, view: FleetView) -> float:
        cold = not any(c.owner in view.members for c in view.claims.values())
        return self._policy.cold_start_window_s if cold else self._policy.scale_window_s

    # What `_Step` needs to know and may change.

    def _window_ends_s(self, length_s: float) -> float:
        """End of a window that each join or leave extends, up to three times its length."""
        return min(self._changed_s + length_s, self._window_began_s + 3 * length_s)


class _Step:
    """One decision; a class only because its parts share a lot."""

    def __init__(self, planner: Planner, view: FleetView) -> None:
        self._planner = planner
        self._policy = planner._policy
        self._view = view
        self._wanted = frozenset(view.partitions)
        self._active = sorted(w for w, m in view.members.items() if m.state == "active")
        self._wake_at_s: list[float] = [*planner._held_back.values()]
        self._loads = Counter(c.owner for c in view.claims.values() if c.owner)
        self._incoming = Counter(c.next for c in view.claims.values() if c.state == "moving" and c.next)
        self._cached_target: dict[str, str] | None = None
        self._somebody_stayed = any(
            (member := view.members.get(claim.owner)) and member.incarnation == claim.incarnation
            for claim in view.claims.values()
        )

    def decide(self) -> Decision:
        gone = [*self._unwanted(), *self._returned()]
        moves = self._continue_moves()
        orphans = self._orphans()
        state, reason, given = self._give_away(orphans)
        commands: list[Command] = [*gone, *moves, *given]
        moving = sum(c.state == "moving" for c in self._view.claims.values())
        if state is None and (moving or moves):
            state, reason = FleetState.REBALANCING, f"{moving} partitions are moving"
        if state is None:
            state, reason, begun = self._rebalance()
            commands += begun
        wake = min((t for t in self._wake_at_s if t > self._view.now_s), default=None)
        return Decision(self._allowed(commands), state, reason, wake)

    def _allowed(self, commands: Sequence[Command]) -> tuple[Command, ...]:
        held_back = self._planner._held_back
        return tuple(c for c in commands if c.partition not in held_back)

    # ── what is there ─────────────────────────────────────────────────────────────────────────────────────────

    def _unwanted(self) -> Iterator[Command]:
        """Partitions that the source no longer names: their owner lets go of them first."""
        for partition, claim in self._view.claims.items():
            if partition in self._wanted or claim.state == "free":
                continue
            if self._let_go(partition, claim):
                yield Free(partition, "no longer wanted")
            elif claim.state == "owned":
                yield BeginMove(partition, "", "no longer wanted")

    def _returned(self) -> Iterator[Command]:
        """Workers that are back under the same id: what they own is given to them anew."""
        for partition, claim in self._view.claims.items():
            member = self._view.members.get(claim.owner)
            if member is None or member.state == "away" or partition not in self._wanted:
                continue
            if claim.state == "owned" and claim.incarnation != member.incarnation:
                yield Give(partition, claim.owner, "same id, new process")

    def _let_go(self, partition: str, claim: Claim) -> bool:
        """Whether the owner can no longer be handling the partition."""
        member = self._view.members.get(claim.owner)
        if member is None:
            return self._is_gone(claim.owner)
        if member.incarnation != claim.incarnation or member.state == "away":
            return True
        health = self._view.health.get(claim.owner)
        return (
            claim.state == "moving"
            and health is not None
            and health.incarnation == member.incarnation
            and health.applied >= claim.release_version
            and partition not in health.busy
        )

    def _is_gone(self, worker: str) -> bool:
        """Whether somebody who is not among the members can be counted as gone.

        When the control plane was away for longer than a lease, all leases have ended, though nobody is gone: a new
        rebalancer gives them time to come back. As long as a single worker has kept its lease, it was not away.
        """
        if worker in self._view.left or self._somebody_stayed:
            return True
        ends_s = self._planner._elected_s + self._policy.takeover_grace_s
        if self._view.now_s < ends_s:
            self._wake_at_s.append(ends_s)
            return False
        return True

    def _continue_moves(self) -> list[Command]:
        commands: list[Command] = []
        for partition, claim in self._view.claims.items():
            if claim.state != "moving" or partition not in self._wanted or claim.owner not in self._view.members:
                continue
            if self._let_go(partition, claim):
                owner = claim.next if claim.next in self._active else self._target.get(partition, "")
                if owner:
                    commands.append(Give(partition, owner, claim.reason))
            elif claim.next not in self._active:
                commands.append(Give(partition, claim.owner, f"{claim.next or 'nobody'} cannot take it"))
        return commands

    def _orphans(self) -> list[str]:
        claims, members = self._view.claims, self._view.members
        orphans = []
        for partition in self._view.partitions:
            claim = claims.get(partition)
            unowned = claim is None or claim.state == "free" or not claim.owner
            if unowned or (claim and claim.owner not in members and self._is_gone(claim.owner)):
                orphans.append(partition)
        return orphans

    # ── what to do about it ───────────────────────────────────────────────────────────────────────────────────

    @property
    def _target(self) -> Mapping[str, str]:
        """What the strategy would have, given who owns what now."""
        if self._cached_target is None:
            members = self._view.members
            slots = [Slot(w, members[w].capacity, members[w].weight) for w in self._active]
            away = {
                p: c.owner
                for p, c in self._view.claims.items()
                if c.owner in members and members[c.owner].state == "away"
            }
            partitions = [p for p in self._view.partitions if p not in away]
            previous = {p: c.next or c.owner for p, c in self._view.claims.items() if c.state != "free"}
            self._cached_target = (
                self._planner._strategy.assign(partitions, slots, previous, self._view.weights) | away
            )
        return self._cached_target

    def _give_away(self, orphans: list[str]) -> tuple[FleetState | None, str, list[Command]]:
        if not orphans:
            return None, "", []
        if not self._active:
            return FleetState.WAITING, f"{len(orphans)} partitions and no worker that could take them", []
        owned = any(c.owner in self._view.members for c in self._view.claims.values())
        if not owned:
            ends_s = self._planner._window_ends_s(self._policy.cold_start_window_s)
            if self._view.now_s < ends_s:
                self._wake_at_s.append(ends_s)
                here = f"{len(self._active)} worker{'s' * (len(self._active) > 1)}"
                return FleetState.WAITING, f"cold start: {here} here, waiting for others", []
        given = [give for p in orphans if (give := self._give(p))]
        left = len(orphans) - len(given)
        lost = sorted({c.owner for p in orphans if (c := self._view.claims.get(p)) and c.owner})
        if left:
            return FleetState.DEGRADED, f"{left} partitions have no owner: every worker is full", list(given)
        if lost:
            state = FleetState.REBALANCING if self._view.left.issuperset(lost) else FleetState.EMERGENCY
            return state, f"{len(orphans)} partitions of {', '.join(lost[:5])} given away", list(given)
        return FleetState.REBALANCING, f"{len(orphans)} new partitions given away", list(given)

    def _give(self, partition: str) -> Give | None:
        claim = self._view.claims.get(partition)
        worker = self._target.get(partition, "")
        if not worker or not self._room(worker):
            # What it is to have in the end may not fit yet: others are still to leave.
            worker = min((w for w in self._active if self._room(w)), key=lambda w: (self._load(w), w), default="")
        if not worker:
            return None
        self._loads[worker] += 1
        if claim is None or not claim.owner:
            return Give(partition, worker, "new partition" if claim is None else "had no owner")
        self._loads[claim.owner] -= 1
        gone = "left" if claim.owner in self._view.left else "is lost"
        return Give(partition, worker, f"{claim.owner} {gone}")

    def _load(self, worker: str) -> float:
        return (self._loads[worker] + self._incoming[worker]) / self._view.members[worker].weight

    def _room(self, worker: str) -> bool:
        return self._loads[worker] + self._incoming[worker] < self._view.members[worker].capacity

    def _rebalance(self) -> tuple[FleetState, str, list[Command]]:
        planner, now_s = self._planner, self._view.now_s
        lately = now_s < planner._looked_s + self._policy.min_rebalance_interval_s
        if planner._settled and (lately or self._balanced()):
            return FleetState.STABLE, self._summary(), []
        begun: list[Command] = []
        for partition, worker in self._target.items():
            claim = self._view.claims.get(partition)
            if claim and claim.state == "owned" and claim.owner != worker:
                begun.append(BeginMove(partition, worker, self._why(claim.owner)))
        if not begun:
            planner._settled, planner._looked_s = True, now_s
            return FleetState.STABLE, self._summary(), []
        draining = [w for w, m in self._view.members.items() if m.state == "draining" and self._loads[w]]
        if not draining:
            ends_s = planner._window_ends_s(self._policy.scale_window_s)
            if now_s < ends_s:
                self._wake_at_s.append(ends_s)
                return FleetState.SCALING, f"{len(begun)} partitions are to move when joins and leaves have ended", []
            again_s = planner._balanced_s + self._policy.min_rebalance_interval_s
            if now_s < again_s:
                self._wake_at_s.append(again_s)
                return FleetState.SCALING, f"{len(begun)} partitions are to move, but others have only just moved", []
        planner._settled, planner._looked_s, planner._balanced_s = True, now_s, now_s
        return FleetState.REBALANCING, f"{len(begun)} partitions begin to move", begun

    def _why(self, owner: str) -> str:
        return (
            f"{owner} is draining" if self._view.members[owner].state == "draining" else f"balance ({owner} has more)"
        )

    def _balanced(self) -> bool:
        """Whether the shares are near enough to leave them alone."""
        draining = any(m.state == "draining" and self._loads[w] for w, m in self._view.members.items())
        if draining or not self._active:
            return not draining
        members = self._view.members
        mean = sum(self._loads[w] for w in self._active) / sum(members[w].weight for w in self._active)
        slack = max(1.0, self._policy.hysteresis * mean)
        shares = [self._loads[w] / members[w].weight for w in self._active if self._loads[w] < members[w].capacity]
        return not shares or max(shares) - min(shares) <= slack

    def _summary(self) -> str:
        return f"{len(self._wanted)} partitions on {len(self._active)} workers"
