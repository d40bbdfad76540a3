"""What the rebalancer does next: a pure decision from what it sees of the fleet.

`Planner.step(view)` is called whenever something may have changed. It compares the claims with the members and the
wanted partitions and returns commands; the driver turns each into writes. Nothing is remembered that a successor
could not work out from the claims, except when the windows began.

Order of care:
  1. a partition that nobody can be handling is given away at once (only a cold start waits for others to show up);
  2. moves that have begun are brought to their end;
  3. partitions of a worker that drains move at once;
  4. others move between live workers only after a window without joins and leaves, at most once in a minimum
     interval, to workers that have been there for the length of a window, and not for a small imbalance.

A partition that cannot be moved or given (a handler that runs for long, a claim that cannot be written) holds up no
other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from parti.core.fleet_view import BeginMove, Command, Decision, FleetState, FleetView, Free, Give, Policy
from parti.model.fleet import Claim
from parti.strategies.interface import Slot, Strategy
from parti.strategies.ordering import natural_order

_NEVER_S = float("-inf")


class Planner:
    """Decides for one rebalancer, from its election on."""

    def __init__(self, strategy: Strategy, policy: Policy, *, elected_s: float, after_outage: bool = False) -> None:
        """`after_outage`: the control plane is known to have been away for longer than a lease."""
        self._strategy = strategy
        self._policy = policy
        self._elected_s = elected_s
        self._joined_s: dict[str, float] | None = None
        """Since when each active worker has been there; those found at the first look have always been."""
        self._window_began_s = elected_s
        self._changed_s = elected_s
        self._moved_s = _NEVER_S
        self._looked_s = _NEVER_S
        self._settled = False
        """Since the last join or leave the strategy was asked, and all it wanted was begun."""
        self._settled_shares: Mapping[str, _Share] | None = None
        """What everybody had when the strategy was asked and wanted nothing."""
        self._held_back: dict[str, float] = {}
        self._seen: set[str] = set()
        self._after_outage = after_outage
        self._somebody_stayed: bool | None = None
        """Whether at the first look somebody had kept its lease since it was given its partitions."""

    def claim_failed(self, partitions: Sequence[str], now_s: float) -> None:
        """The claims of these could not be written: they stay where they are and are tried again later."""
        for partition in partitions:
            self._held_back[partition] = now_s + self._policy.retry_s
        self._settled = False

    def step(self, view: FleetView) -> Decision:
        """Decide what to do now."""
        if self._somebody_stayed is None:
            # Only now: later on everybody who came back has been given its partitions anew.
            self._somebody_stayed = any(
                (member := view.members.get(claim.owner)) and member.incarnation == claim.incarnation
                for claim in view.claims.values()
            )
        self._seen |= view.members.keys()
        self._note_members(view)
        self._held_back = {p: until for p, until in self._held_back.items() if until > view.now_s}
        return _Step(self, view).decide()

    def _note_members(self, view: FleetView) -> None:
        """Keep the times of joins and leaves."""
        before, since_s = self._joined_s or {}, _NEVER_S if self._joined_s is None else view.now_s
        known = self._joined_s is not None
        self._joined_s = {w: before.get(w, since_s) for w, m in view.members.items() if m.state == "active"}
        if not known or before.keys() == self._joined_s.keys():
            return
        # Moves have ended the window before, even if somebody came or went all the time.
        if view.now_s - self._changed_s > self._window(view) or self._moved_s >= self._window_began_s:
            self._window_began_s = view.now_s
        self._changed_s = view.now_s
        self._settled = False

    def _window(self, view: FleetView) -> float:
        cold = not any(c.owner in view.members for c in view.claims.values())
        return self._policy.cold_start_window_s if cold else self._policy.scale_window_s

    # What `_Step` needs to know and may change.

    def _knows_of(self, worker: str) -> bool:
        """Whether the absence of a worker means something already.

        After an outage it does not: leases may end in the sight of a rebalancer whose holders are still on their way
        back.
        """
        return not self._after_outage and (worker in self._seen or bool(self._somebody_stayed))

    def _window_ends_s(self, length_s: float) -> float:
        """End of a window that each join or leave extends, up to three times its length."""
        return min(self._changed_s + length_s, self._window_began_s + 3 * length_s)


@dataclass(slots=True)
class _Share:
    """What a worker has, once all moves have come to their end."""

    capacity: int
    weight: float
    count: int = 0
    load: float = 0.0


class _Step:
    """One decision; a class only because its parts share a lot."""

    def __init__(self, planner: Planner, view: FleetView) -> None:
        self._planner = planner
        self._policy = planner._policy
        self._view = view
        self._wanted = frozenset(view.partitions)
        self._active = frozenset(w for w, m in view.members.items() if m.state == "active")
        self._wake_at_s: list[float] = [*planner._held_back.values()]
        self._loads = Counter(c.owner for c in view.claims.values() if c.owner)
        self._incoming = Counter(c.next for c in view.claims.values() if c.state == "moving" and c.next)
        self._cached_target: dict[str, str] | None = None

    def decide(self) -> Decision:
        commands: list[Command] = [*self._unwanted(), *self._returned(), *self._continue_moves()]
        state, reason, given = self._give_away(self._orphans())
        commands += given
        if not given:
            rebalancing, why, begun = self._rebalance()
            commands += begun
            state, reason = (state, reason) if state else (rebalancing, why)
        if state in {FleetState.STABLE, FleetState.SCALING, None}:
            moving = sum(c.state == "moving" for c in self._view.claims.values())
            if moving:
                state, reason = FleetState.REBALANCING, f"{_count(moving)} moving"
            elif commands:
                state, reason = FleetState.REBALANCING, f"{_count(len(commands))}: {commands[0].reason}"
        assert state
        wake = min((t for t in self._wake_at_s if t > self._view.now_s), default=None)
        return Decision(tuple(c for c in commands if not self._is_held_back(c)), state, reason, wake)

    def _is_held_back(self, command: Command) -> bool:
        return command.partition in self._planner._held_back

    # ── what is there ─────────────────────────────────────────────────────────────────────────────────────────

    def _unwanted(self) -> Iterator[Command]:
        """Partitions that the source no longer names: their owner lets go of them first."""
        for partition, claim in self._view.claims.items():
            if partition in self._wanted or claim.state == "free":
                continue
            if self._let_go(partition, claim):
                yield Free(partition, "no longer wanted")
            elif claim.state == "owned" and claim.owner in self._view.members:
                yield BeginMove(partition, "", "no longer wanted")

    def _returned(self) -> Iterator[Command]:
        """Workers that are back under the same id: what they own is given to them anew."""
        for partition, claim in self._view.claims.items():
            member = self._view.members.get(claim.owner)
            if member is None or member.state == "away" or partition not in self._wanted:
                continue
            if claim.state == "owned" and claim.incarnation < member.incarnation:
                yield Give(partition, claim.owner, "same id, new process")

    def _let_go(self, partition: str, claim: Claim) -> bool:
        """Whether the owner can no longer be handling the partition."""
        member = self._view.members.get(claim.owner)
        if member is None:
            return self._is_gone(claim.owner)
        # A smaller incarnation is an old record: the process that the claim was made for is alive.
        if claim.incarnation < member.incarnation:
            return True
        if member.state == "away":
            return claim.incarnation == member.incarnation
        health = self._view.health.get(claim.owner)
        return (
            claim.state == "moving"
            and health is not None
            and health.incarnation == claim.incarnation
            and health.applied >= claim.release_version
            and partition not in health.busy
        )

    def _is_gone(self, worker: str) -> bool:
        """Whether somebody who is not among the members can be counted as gone.

        When the control plane was away for longer than a lease, all leases have ended, though nobody is gone: a new
        rebalancer gives them time to come back. As long as a single worker has kept its lease, it was not away; and
        whoever was there since the election and no longer is, is gone.
        """
        if worker in self._view.left or self._planner._knows_of(worker):
            return True
        ends_s = self._planner._elected_s + self._policy.takeover_grace_s
        if self._view.now_s < ends_s:
            self._wake_at_s.append(ends_s)
            return False
        return True

    def _can_take(self, worker: str) -> bool | None:
        """Whether somebody can get a partition that is on its way to it; None: too early to tell."""
        if worker in self._active:
            return True
        return False if not worker or worker in self._view.members or self._is_gone(worker) else None

    def _continue_moves(self) -> list[Command]:
        commands: list[Command] = []
        for partition, claim in self._view.claims.items():
            member = self._view.members.get(claim.owner)
            if claim.state != "moving" or partition not in self._wanted or member is None:
                continue
            can_take = self._can_take(claim.next)
            why = f"{claim.next} cannot take it" if claim.next else "wanted again"
            if can_take and self._let_go(partition, claim):
                commands.append(Give(partition, claim.next, claim.reason))
            elif can_take is False and not self._let_go(partition, claim):
                commands.append(Give(partition, claim.owner, why))
            elif can_take is False and member.state != "away":
                # With no room anywhere else even a draining owner is better than none.
                worker = self._target.get(partition, "")
                commands.append(Give(partition, worker if worker in self._active else claim.owner, why))
        return commands

    def _orphans(self) -> list[str]:
        """Partitions that nobody handles and that nobody is about to get."""
        orphans = []
        for partition in self._view.partitions:
            claim = self._view.claims.get(partition)
            if claim is None or claim.state == "free" or not claim.owner:
                orphans.append(partition)
                continue
            member = self._view.members.get(claim.owner)
            if member is None:
                abandoned = self._is_gone(claim.owner)
            else:
                abandoned = member.state == "away" and claim.state == "moving" and self._can_take(claim.next) is False
            if abandoned:
                orphans.append(partition)
        return natural_order(orphans)

    # ── what to do about it ───────────────────────────────────────────────────────────────────────────────────

    @property
    def _target(self) -> Mapping[str, str]:
        """What the strategy would have, given who owns what now.

        Workers that are away count as if they were there: otherwise everybody's share would change for a moment.
        """
        if self._cached_target is None:
            view = self._view
            slots = [Slot(w, m.capacity, m.weight) for w, m in sorted(view.members.items()) if m.state != "draining"]
            previous = {p: c.next or c.owner for p, c in view.claims.items() if c.state != "free"}
            self._cached_target = self._planner._strategy.assign(view.partitions, slots, previous, view.weights)
        return self._cached_target

    def _spare(self) -> str:
        """Who has least and could take one more; empty if nobody."""
        return min(filter(self._room, self._active), key=lambda w: (self._load(w), w), default="")

    def _give_away(self, orphans: Sequence[str]) -> tuple[FleetState | None, str, list[Command]]:
        if not orphans:
            return None, "", []
        if why := self._wait_for_workers():
            return FleetState.WAITING, why, []
        due = [p for p in orphans if p not in self._planner._held_back]
        places = self._places(orphans, due)
        given: list[Command] = [Give(p, places[p], self._why_given(p)) for p in due if p in places]
        if len(given) < len(due):
            return FleetState.DEGRADED, f"{_count(len(due) - len(given))} without owner: every worker is full", given
        if not given:
            return FleetState.DEGRADED, f"{_count(len(orphans))} without owner: claims could not be written", []
        lost = sorted({c.owner for p in due if (c := self._view.claims.get(p)) and c.owner})
        if not lost:
            return FleetState.REBALANCING, f"{_count(len(given))} without owner given away", given
        state = FleetState.REBALANCING if self._view.left.issuperset(lost) else FleetState.EMERGENCY
        return state, f"{_count(len(given))} of {', '.join(lost[:5])} given away", given

    def _wait_for_workers(self) -> str:
        """Why nothing is given to anybody yet; empty when it may be."""
        if not self._active:
            return "no worker is there that could take anything"
        ends_s = self._planner._window_ends_s(self._policy.cold_start_window_s)
        owned = any(c.owner in self._view.members for c in self._view.claims.values())
        if owned or self._view.now_s >= ends_s:
            return ""
        self._wake_at_s.append(ends_s)
        return f"cold start: {_count(len(self._active), 'worker')} here, waiting for others"

    def _places(self, orphans: Sequence[str], due: Sequence[str]) -> dict[str, str]:
        """Who gets which orphan: whoever was about to get it or is to have it in the end, or else who has least."""
        places: dict[str, str] = {}
        moves = {p: c.next for p in orphans if (c := self._view.claims.get(p)) and c.state == "moving" and c.next}
        self._incoming.subtract(moves.values())
        for partition in due:
            worker = moves.get(partition, "")
            worker = worker if worker in self._active else self._target.get(partition, "")
            if worker in self._active and self._room(worker):
                places[partition] = worker
                self._loads[worker] += 1
        for partition in due:
            if partition not in places:
                # What it is to have in the end may not fit yet: others are still to leave.
                if not (worker := self._spare()):
                    break
                places[partition] = worker
                self._loads[worker] += 1
        return places

    def _why_given(self, partition: str) -> str:
        claim = self._view.claims.get(partition)
        if claim is None or not claim.owner:
            return "new partition" if claim is None else "had no owner"
        if claim.owner in self._view.members:
            return f"{claim.owner} is away"
        return f"{claim.owner} left" if claim.owner in self._view.left else f"{claim.owner} is lost"

    def _load(self, worker: str) -> float:
        return (self._loads[worker] + self._incoming[worker]) / self._view.members[worker].weight

    def _room(self, worker: str) -> bool:
        return self._loads[worker] + self._incoming[worker] < self._view.members[worker].capacity

    # ── balance ───────────────────────────────────────────────────────────────────────────────────────────────

    def _rebalance(self) -> tuple[FleetState, str, list[Command]]:
        planner, now_s = self._planner, self._view.now_s
        shares = self._shares()
        if planner._settled:
            if shares == planner._settled_shares or self._balanced(shares):
                return self._at_rest()
            again_s = planner._looked_s + self._policy.min_rebalance_interval_s
            if now_s < again_s and not self._stuck():
                self._wake_at_s.append(again_s)
                return self._at_rest()
        wanted = [*self._wanted_moves()]
        planner._looked_s = now_s
        planner._settled_shares = None if wanted else shares
        obstacle, due = self._due(wanted)
        planner._settled = len(due) == len(wanted)
        if due:
            return FleetState.REBALANCING, f"{_count(len(due))} told to move", due
        if wanted:
            return FleetState.SCALING, f"{_count(len(wanted))} to move, but {obstacle}", []
        return self._at_rest()

    def _wanted_moves(self) -> Iterator[BeginMove]:
        claims, target = self._view.claims, self._target
        astray = (
            p for p, c in claims.items() if c.state != "free" and target.get(p, "") not in {"", c.next or c.owner}
        )
        for partition in natural_order(astray):
            claim, worker = claims[partition], target[partition]
            owner = self._view.members.get(claim.owner)
            state = owner.state if owner else "active"
            if worker not in self._active:
                # It is away, and whoever drains cannot wait for it.
                worker = self._spare() if (state, claim.state) == ("draining", "owned") else ""
                self._incoming[worker] += 1
            if worker and state != "away":
                why = f"{claim.owner} is draining" if state == "draining" else f"balance ({claim.owner} has more)"
                yield BeginMove(partition, worker, why)

    def _due(self, wanted: Sequence[BeginMove]) -> tuple[str, list[Command]]:
        """Those moves that need not wait, and what keeps the others."""
        planner, now_s, joined_s = self._planner, self._view.now_s, self._planner._joined_s or {}
        window_ends_s = planner._window_ends_s(self._policy.scale_window_s)
        interval_ends_s = planner._moved_s + self._policy.min_rebalance_interval_s
        obstacle, due, moves_from_active = "", list[Command](), False
        for move in wanted:
            claim, stays_until_s = (
                self._view.claims[move.partition],
                joined_s[move.next] + self._policy.scale_window_s,
            )
            owner = self._view.members.get(claim.owner)
            if owner is None:
                obstacle = f"it is too early to call {claim.owner} lost"
            elif owner.incarnation != claim.incarnation:
                obstacle = f"{claim.owner} has only just restarted"
            elif claim.state == "moving":
                obstacle = "they are still on their way to somebody else"
            elif self._is_held_back(move):
                obstacle = "claims could not be written"
            elif owner.state == "draining":
                due.append(move)
            elif now_s < window_ends_s:
                obstacle = "workers have only just come or gone"
                self._wake_at_s.append(window_ends_s)
            elif now_s < interval_ends_s:
                obstacle = "others have only just moved"
                self._wake_at_s.append(interval_ends_s)
            elif now_s < stays_until_s:
                obstacle = f"{move.next} has only just come"
                self._wake_at_s.append(stays_until_s)
            else:
                due.append(move)
                moves_from_active = True
        if moves_from_active:
            planner._moved_s = now_s
        return obstacle, due

    def _shares(self) -> dict[str, _Share]:
        """What all members have, or will have when the moves that have begun are over."""
        weights = self._view.weights or {}
        shares = {w: _Share(m.capacity, m.weight) for w, m in self._view.members.items() if m.state != "away"}
        for partition, claim in self._view.claims.items():
            share = shares.get(claim.next or claim.owner)
            if share and partition in self._wanted:
                share.count += 1
                share.load += weights.get(partition, 1.0)
        return shares

    def _balanced(self, shares: Mapping[str, _Share]) -> bool:
        """Whether the shares are near enough to leave them alone."""
        if any(share.count for worker, share in shares.items() if worker not in self._active):
            return False
        active = [share for worker, share in shares.items() if worker in self._active]
        if any(share.count > share.capacity for share in active):
            return False
        load, count = sum(share.load for share in active), sum(share.count for share in active)
        if not load:
            return True
        # Counted in partitions of mean load, for a worker of mean weight.
        scale = count / load * sum(share.weight for share in active) / len(active)
        most = scale * max(share.load / share.weight for share in active)
        least = [scale * share.load / share.weight for share in active if share.count < share.capacity]
        slack = max(1.0, self._policy.hysteresis * count / len(active))
        return not least or most - min(least) <= slack

    def _stuck(self) -> int:
        """How many partitions draining workers have that are not on their way."""
        draining = {w for w, m in self._view.members.items() if m.state == "draining"}
        return sum(c.state == "owned" and c.owner in draining for c in self._view.claims.values()) if draining else 0

    def _at_rest(self) -> tuple[FleetState, str, list[Command]]:
        if stuck := self._stuck():
            return FleetState.DEGRADED, f"nobody has room for {_count(stuck)} of draining workers", []
        away = sum(m.state == "away" for m in self._view.members.values())
        workers = _count(len(self._active), "worker") + (f", {away} away" if away else "")
        return FleetState.STABLE, f"{_count(len(self._wanted))} on {workers}", []


def _count(number: int, what: str = "partition") -> str:
    return f"{number} {what}{'s' * (number != 1)}"
