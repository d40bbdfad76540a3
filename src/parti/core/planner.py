"""What the rebalancer does next: a pure decision from what it sees of the fleet.

`Planner.step(view)` is called whenever something may have changed. It compares the claims with the members and the
wanted partitions and returns commands; the driver turns each into writes. Nothing is remembered that a successor
could not work out from the claims, except when the windows began.

Order of care:
  1. a partition that nobody can be handling is given away at once (only a cold start waits for others to show up);
  2. moves that have begun are brought to their end;
  3. partitions of a worker that drains, and those that an operator has placed, move at once;
  4. others move between live workers only after a window without joins and leaves, at most once in a minimum
     interval, to workers that have been there for the length of a window, and not for a small imbalance; nor, where
     loads are measured, for one that may pass.

Moves go to workers that pull, and only so many at a time. Guests (`parti.core.guests`) get what is placed on them and
nothing else; what they have, and should have no longer, goes back at once.

A partition that cannot be moved or given (a handler that runs for long, a claim that cannot be written) holds up no
other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from parti.core.fleet_view import (
    BeginMove,
    Command,
    Decision,
    FleetState,
    FleetView,
    Free,
    Give,
    Keep,
    Policy,
    Release,
)
from parti.core.guests import guests_among, share_of
from parti.core.loads import Patience, is_worth
from parti.core.move import Heir, Owner, Step, next_step
from parti.core.orders import honour, obey, placements
from parti.model.fleet import Claim, MemberState
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
        self._away: frozenset[str] = frozenset()
        self._placed: Mapping[str, str] = {}
        self._window_began_s = elected_s
        self._changed_s = elected_s
        self._moved_s = _NEVER_S
        self._looked_s = _NEVER_S
        # Loads that are measured have changed a little since the last rebalancer looked. That alone is no reason to
        # move anything; and whoever has joined in between has nothing yet, which tells.
        self._settled = policy.load_window_s > 0
        """Since the last join or leave the strategy was asked, and all it wanted was begun."""
        self._patience = Patience(policy.load_window_s)
        self._settled_shares: Mapping[str, _Share] | None = None
        """What everybody had when the strategy was asked and wanted nothing."""
        self._held_back: dict[str, float] = {}
        self._preparing_s: dict[str, float] = {}
        """Since when each move has been waiting for the next owner to get ready."""
        self._late: dict[str, float] = {}
        """Workers that did not get ready in time, and until when nothing is moved to them."""
        self._more_to_move = False
        """Moves of the last rebalance had to wait until fewer are on their way."""
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
        view = obey(view)
        self._note_members(view)
        began_s = self._preparing_s
        preparing = (p for p, claim in view.claims.items() if claim.state == "preparing")
        self._preparing_s = {p: began_s.get(p, view.now_s) for p in preparing}
        self._held_back = {p: until for p, until in self._held_back.items() if until > view.now_s}
        self._late = {w: until for w, until in self._late.items() if until > view.now_s}
        return _Step(self, view).decide()

    def _note_members(self, view: FleetView) -> None:
        """Keep the times of joins and leaves, and notice what makes the strategy think again."""
        before, since_s = self._joined_s or {}, _NEVER_S if self._joined_s is None else view.now_s
        known = self._joined_s is not None
        self._joined_s = {
            w: before.get(w, since_s) for w, m in view.members.items() if m.state == "active" and not m.guest
        }
        if not self._away <= view.members.keys() or self._placed != view.orders.placed:
            # The strategy left them alone for the sake of somebody who will not be back, or of an order.
            self._settled_shares = None
        self._away = frozenset(w for w, m in view.members.items() if m.state == "away")
        self._placed = view.orders.placed
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
        self._guests = guests_among(view.members)
        self._residents = self._active - self._guests
        """Those that share the partitions among them."""
        self._wake_at_s: list[float] = [*planner._held_back.values()]
        self._loads = Counter(c.owner for c in view.claims.values() if c.owner)
        self._incoming = Counter(c.next for c in view.claims.values() if c.next)
        # What guests have is still counted to whoever gets it back, or its place would be given away.
        self._lent = Counter(
            c.home for c in view.claims.values() if c.home and not c.next and c.owner in self._guests
        )

    def decide(self) -> Decision:
        commands: list[Command] = [*self._unwanted(), *self._returned(), *self._continue_moves()]
        state, reason, given = self._give_away(self._orphans())
        commands += given
        if not given:
            rebalancing, why, begun = self._rebalance()
            commands += begun
            state, reason = (state, reason) if state else (rebalancing, why)
        if state in {FleetState.STABLE, FleetState.SCALING, None}:
            moving = self._in_transit
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
            if self._owner(partition, claim) not in {Owner.HANDLES, Owner.UNSURE}:
                yield Free(partition, self._why_unwanted(partition))
            elif claim.state != "moving" and claim.owner in self._view.members:
                yield BeginMove(partition, "", self._why_unwanted(partition))

    def _why_unwanted(self, partition: str) -> str:
        return "paused" if partition in self._view.orders.paused else "no longer wanted"

    def _returned(self) -> Iterator[Command]:
        """Workers that are back under the same id: what they own is given to them anew."""
        for partition, claim in self._view.claims.items():
            member = self._view.members.get(claim.owner)
            if member is None or member.state == "away" or partition not in self._wanted:
                continue
            if claim.state in {"owned", "preparing"} and claim.incarnation < member.incarnation:
                yield Give(partition, claim.owner, "same id, new process")

    def _owner(self, partition: str, claim: Claim) -> Owner:
        """What is known of the owner."""
        member = self._view.members.get(claim.owner)
        if member is None:
            return Owner.GONE if self._is_gone(claim.owner) else Owner.UNSURE
        # A smaller incarnation is an old record: the process that the claim was made for is alive.
        if claim.incarnation < member.incarnation:
            return Owner.LET_GO
        if member.state == "away":
            return Owner.AWAY if claim.incarnation == member.incarnation else Owner.HANDLES
        health = self._view.health.get(claim.owner)
        let_go = (
            claim.state == "moving"
            and health is not None
            and health.incarnation == claim.incarnation
            and health.applied >= claim.awaits
            and partition not in health.busy
        )
        return Owner.LET_GO if let_go else Owner.HANDLES

    def _heir(self, partition: str, claim: Claim) -> Heir:
        """What is known of the next owner."""
        can_take = self._can_take(claim.next)
        if not can_take:
            return Heir.UNSURE if can_take is None else Heir.UNABLE
        health = self._view.health.get(claim.next)
        if self._pulls(claim.next) and health and health.ready >= claim.awaits:
            return Heir.READY
        if claim.state != "preparing":
            return Heir.COMING
        late_s = self._planner._preparing_s[partition] + self._policy.ready_within_s
        self._wake_at_s.append(late_s)
        return Heir.COMING if self._view.now_s < late_s else Heir.LATE

    def _pulls(self, worker: str) -> bool:
        """Whether a worker says that its consumer works."""
        health = self._view.health.get(worker)
        return health is not None and health.pulling and health.incarnation == self._view.members[worker].incarnation

    def _why_not_to(self, worker: str) -> str:
        """Why nothing is moved to a worker now; empty when it may be."""
        if worker not in self._active:
            return f"{worker} is away"
        if not self._pulls(worker):
            return f"{worker} does not pull"
        if (until_s := self._planner._late.get(worker)) is None:
            return ""
        self._wake_at_s.append(until_s)
        return f"{worker} did not get ready in time"

    @cached_property
    def _in_transit(self) -> int:
        return sum(c.state in {"preparing", "moving"} for c in self._view.claims.values())

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
            if claim.state not in {"preparing", "moving"} or partition not in self._wanted:
                continue
            step = next_step(claim.state, self._owner(partition, claim), self._heir(partition, claim))
            if command := self._command(partition, claim, step):
                commands.append(command)
        return commands

    def _command(self, partition: str, claim: Claim, step: Step) -> Command | None:
        """A step of a move as a command; None when there is nothing to do, or when others see to it."""
        why = f"{claim.next} cannot take it" if claim.next else "wanted again"
        if step is Step.RELEASE:
            return Release(partition, claim.reason)
        if step is Step.KEEP:
            if self._owner(partition, claim) is Owner.AWAY:
                why = f"{claim.owner} is away"
            elif self._heir(partition, claim) is Heir.LATE:
                why = f"{claim.next} did not get ready in time"
                # Others may move elsewhere meanwhile, and whoever loses its owner is not kept waiting.
                self._planner._late[claim.next] = self._view.now_s + self._policy.min_rebalance_interval_s
            return Keep(partition, why)
        if step is Step.GIVE:
            return Give(partition, claim.next, claim.reason)
        if step is Step.GIVE_BACK and claim.state == "moving":
            return Give(partition, claim.owner, why)
        if step is Step.GIVE_ELSEWHERE:
            # With no room anywhere else even a draining owner is better than none.
            worker = self._target.get(partition, "")
            return Give(partition, worker if worker in self._active else claim.owner, why)
        return None

    def _orphans(self) -> list[str]:
        """Partitions that nobody handles and that nobody is about to get."""
        orphans = []
        for partition in self._view.partitions:
            claim = self._view.claims.get(partition)
            if claim is None or claim.state == "free" or not claim.owner:
                orphans.append(partition)
                continue
            owner = self._owner(partition, claim)
            if claim.state == "owned":
                abandoned = owner is Owner.GONE
            else:
                abandoned = next_step(claim.state, owner, self._heir(partition, claim)) is Step.ORPHAN
            if abandoned:
                orphans.append(partition)
        return natural_order(orphans)

    # ── what to do about it ───────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def _slots(self) -> list[Slot]:
        members = sorted(self._view.members.items())
        return [Slot(w, m.capacity, m.weight) for w, m in members if m.state != "draining"]

    @cached_property
    def _placed(self) -> Mapping[str, str]:
        """What operators have placed on members that have room for it."""
        return placements(self._view.orders, self._slots, self._wanted)

    @cached_property
    def _target(self) -> Mapping[str, str]:
        """What the strategy would have, given who owns what now and what operators have placed.

        Workers that are away count as if they were there: otherwise everybody's share would change for a moment. What
        is placed on guests counts to the share of whoever had it last, for the same reason.
        """
        view, slots = self._view, [slot for slot in self._slots if slot.worker not in self._guests]
        lent = {p: w for p, w in self._placed.items() if w in self._guests}
        placed = {p: w for p, w in self._placed.items() if w not in self._guests}
        previous = {p: share_of(c, self._guests) for p, c in view.claims.items() if c.state != "free"} | placed
        target = self._planner._strategy.assign(view.partitions, slots, previous, view.weights)
        return honour(placed, target, previous) | lent

    def _may_have(self, worker: str, partition: str) -> bool:
        """Whether a partition without owner may be given to a worker: to a guest only what is placed there."""
        if worker in self._guests:
            return worker in self._active and self._placed.get(partition) == worker
        return worker in self._active

    def _spare(self, workers: Iterable[str]) -> str:
        """Who of these has least and could take one more; empty if nobody."""
        return min(filter(self._room, workers), key=lambda w: (self._load(w), w), default="")

    def _give_away(self, orphans: Sequence[str]) -> tuple[FleetState | None, str, list[Command]]:
        if not orphans:
            return None, "", []
        if why := self._wait_for_workers():
            return FleetState.WAITING, why, []
        due = [p for p in orphans if p not in self._planner._held_back]
        places = self._places(orphans, due)
        given: list[Command] = [Give(p, places[p], self._why_given(p)) for p in due if p in places]
        if len(given) < len(due):
            why = "every worker is full" if self._residents else "only guests are here"
            return FleetState.DEGRADED, f"{_count(len(due) - len(given))} without owner: {why}", given
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
        moves = {p: c.next for p in orphans if (c := self._view.claims.get(p)) and c.next}
        self._incoming.subtract(moves.values())
        for partition in due:
            worker = moves.get(partition, "")
            worker = worker if self._may_have(worker, partition) else self._target.get(partition, "")
            if self._may_have(worker, partition) and self._room(worker):
                places[partition] = worker
                self._loads[worker] += 1
        for partition in due:
            if partition not in places:
                # What it is to have in the end may not fit yet: others are still to leave.
                if not (worker := self._spare(self._residents)):
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
        return self._count(worker) / self._view.members[worker].weight

    def _room(self, worker: str) -> bool:
        return self._count(worker) < self._view.members[worker].capacity

    def _count(self, worker: str) -> int:
        """How many partitions a worker has, or is about to have (again)."""
        return self._loads[worker] + self._incoming[worker] + self._lent[worker]

    # ── balance ───────────────────────────────────────────────────────────────────────────────────────────────

    def _rebalance(self) -> tuple[FleetState, str, list[Command]]:
        planner, now_s = self._planner, self._view.now_s
        shares = self._shares()
        wanted = self._placed_moves() + self._returns()
        again_s = planner._looked_s + self._policy.min_rebalance_interval_s
        balanced = self._balanced(shares)
        if balanced and self._policy.load_window_s:
            planner._settled = True
            planner._patience.reset()
        at_rest = planner._settled and (shares == planner._settled_shares or balanced)
        if planner._settled and not at_rest and now_s < again_s and not self._stuck():
            self._wake_at_s.append(again_s)
            at_rest = True
        if not at_rest:
            placed = {move.partition for move in wanted}
            moves = self._lasting([move for move in self._wanted_moves() if move.partition not in placed], shares)
            wanted += moves
            planner._looked_s = now_s
            # What a guest gives back cannot be sent elsewhere before it has arrived: ask the strategy again then.
            waits = wanted or self._in_transit or planner._patience.since_s is not None
            planner._settled_shares = None if waits else shares
        if self._view.orders.hold_moves:
            # Whoever drains is about to go, whatever operators want.
            owners = {move: self._view.members.get(self._view.claims[move.partition].owner) for move in wanted}
            wanted = [move for move, owner in owners.items() if owner and (owner.guest or owner.state != "active")]
        obstacle, due = self._due(wanted)
        if not at_rest:
            planner._settled = len(due) == len(wanted) and not self._view.orders.hold_moves
        if due:
            return FleetState.REBALANCING, f"{_count(len(due))} told to move", due
        if wanted:
            return FleetState.SCALING, f"{_count(len(wanted))} to move, but {obstacle}", []
        return self._at_rest()

    def _placed_moves(self) -> list[BeginMove]:
        """Partitions that an operator has placed elsewhere than where they are."""
        if not self._view.orders.placed:
            return []
        claims, moves = self._view.claims, []
        for partition, worker in self._placed.items():
            claim = claims.get(partition)
            if claim is None or claim.state == "free" or worker in {claim.owner, claim.next}:
                continue
            state = self._state(claim.owner)
            # Whoever drains cannot wait, and whoever is away cannot let go.
            if state == "away" or (state == "draining" and self._why_not_to(worker)):
                continue
            if worker in self._active and self._target.get(partition) == worker:
                moves.append(BeginMove(partition, worker, "placed by an operator"))
        return moves

    def _returns(self) -> list[BeginMove]:
        """Partitions of guests that are no longer placed there."""
        moves = []
        for partition, claim in self._view.claims.items():
            if claim.owner not in self._guests or claim.state != "owned" or partition not in self._wanted:
                continue
            if self._placed.get(partition) or self._state(claim.owner) == "away":
                continue  # it stays, or `_placed_moves` sees to it; or nobody is there to let go
            worker = self._target.get(partition, "")
            if worker not in self._residents or self._why_not_to(worker):
                # As from one who drains: it cannot wait for somebody who is away or does not pull.
                fit = [w for w in self._residents if not self._why_not_to(w)]
                worker = self._spare(fit) or self._spare(self._residents)
            if worker:
                self._incoming[worker] += 1
                moves.append(BeginMove(partition, worker, f"{claim.owner} gives it back"))
        return moves

    def _wanted_moves(self) -> Iterator[BeginMove]:
        claims, target = self._view.claims, self._target
        astray = (
            p
            for p, c in claims.items()
            if c.state != "free" and c.owner not in self._guests and target.get(p, "") not in {"", c.next or c.owner}
        )
        urgent = []
        for partition in natural_order(astray):
            claim, worker = claims[partition], target[partition]
            state = self._state(claim.owner)
            if (state, claim.state) == ("draining", "owned") and self._why_not_to(worker):
                urgent.append(partition)
            elif worker in self._active and state != "away":
                self._incoming[worker] += 1
                why = f"{claim.owner} is draining" if state == "draining" else f"balance ({claim.owner} has more)"
                yield BeginMove(partition, worker, why)
        fit = [worker for worker in self._residents if not self._why_not_to(worker)]
        for partition in urgent:
            # Whoever drains cannot wait for somebody who is away or does not pull.
            if worker := self._spare(fit) or self._spare(self._residents):
                self._incoming[worker] += 1
                yield BeginMove(partition, worker, f"{claims[partition].owner} is draining")

    def _lasting(self, moves: list[BeginMove], shares: Mapping[str, _Share]) -> list[BeginMove]:
        """Of the moves that the strategy wants, those that measured loads are reason enough for, for long enough.

        Nothing is asked of moves from somebody who drains or has more than it can take, or to somebody who has
        nothing at all; and where workers came or went, nobody waits to see whether an imbalance lasts.
        """
        policy, patience, now_s = self._policy, self._planner._patience, self._view.now_s
        if not policy.load_window_s:
            return moves
        owner = {move: self._view.claims[move.partition].owner for move in moves}
        urgent, for_load = list[BeginMove](), list[BeginMove]()
        for move in moves:
            (urgent if self._gives_way(owner[move]) else for_load).append(move)
        crowded = any(share.count > share.capacity for share in shares.values())
        if crowded or not all(shares[move.next].count for move in for_load):
            patience.reset()
            return moves
        if self._planner._settled:
            for_load = [move for move in for_load if not patience.rests(move.partition, now_s)]
        if not self._is_worth([(owner[move], move) for move in for_load]):
            patience.reset()
            return urgent
        if self._planner._settled and not patience.is_over(now_s):
            self._wake_at_s += [patience.ends_s, now_s + policy.min_rebalance_interval_s]
            return urgent
        patience.reset()
        patience.rest((move.partition for move in for_load), now_s)
        return urgent + for_load

    def _is_worth(self, moves: Iterable[tuple[str, BeginMove]]) -> bool:
        loads, members = self._view.weights or {}, self._view.members
        shifts = [(owner, move.next, loads.get(move.partition, 1.0)) for owner, move in moves]
        claims = ((p, self._view.claims.get(p)) for p in self._wanted)
        held = [(share_of(claim, self._guests), loads.get(p, 1.0)) for p, claim in claims if claim]
        weights = {worker: members[worker].weight for worker in self._residents}
        return is_worth(shifts, held, weights, self._policy.hysteresis)

    def _state(self, owner: str) -> MemberState:
        """What an owner is doing; those that are not there may still be back."""
        member = self._view.members.get(owner)
        return member.state if member else "active"

    def _gives_way(self, owner: str) -> bool:
        """Whether an owner is about to be without its partitions, so that they wait for no window."""
        return owner in self._guests or self._state(owner) == "draining"

    def _due(self, wanted: Sequence[BeginMove]) -> tuple[str, list[Command]]:
        """Those moves that need not wait, and what keeps the others."""
        planner, placed = self._planner, self._view.orders.placed
        obstacle, due, moves_from_active = "", list[Command](), False
        room = self._policy.moves_at_once - self._in_transit
        continues, planner._more_to_move = planner._more_to_move, False
        drains = {move: self._gives_way(self._view.claims[move.partition].owner) for move in wanted}
        for move in sorted(wanted, key=lambda move: not drains[move]):
            if why := self._cannot_move(move):
                obstacle = why
            elif len(due) >= room:
                obstacle = f"{self._in_transit + len(due)} are on their way already"
                planner._more_to_move = True
            elif drains[move] or placed.get(move.partition) == move.next:
                due.append(move)
            elif why := self._too_early(move, continues=continues):
                obstacle = why
            else:
                due.append(move)
                moves_from_active = True
        if moves_from_active:
            planner._moved_s = self._view.now_s
        return obstacle, due

    def _cannot_move(self, move: BeginMove) -> str:
        """What keeps a partition where it is, whoever wants to move it; empty for nothing."""
        claim = self._view.claims[move.partition]
        owner = self._view.members.get(claim.owner)
        if owner is None:
            return f"it is too early to call {claim.owner} lost"
        if owner.incarnation != claim.incarnation:
            return f"{claim.owner} has only just restarted"
        if claim.state in {"preparing", "moving"}:
            return "they are still on their way to somebody else"
        if self._is_held_back(move):
            return "claims could not be written"
        return self._why_not_to(move.next)

    def _too_early(self, move: BeginMove, *, continues: bool) -> str:
        """Why a move for balance has to wait; `continues`: it belongs to a rebalance that has begun."""
        planner, length_s = self._planner, self._policy.scale_window_s
        waits = {
            "workers have only just come or gone": planner._window_ends_s(length_s),
            f"{move.next} has only just come": (planner._joined_s or {})[move.next] + length_s,
        }
        if not continues:
            waits["others have only just moved"] = planner._moved_s + self._policy.min_rebalance_interval_s
        why, until_s = max(waits.items(), key=lambda wait: wait[1])
        if self._view.now_s >= until_s:
            return ""
        self._wake_at_s.append(until_s)
        return why

    def _shares(self) -> dict[str, _Share]:
        """What all members have, or will have when the moves that have begun are over."""
        weights = self._view.weights or {}
        members = self._view.members.items()
        shares = {w: _Share(m.capacity, m.weight) for w, m in members if m.state != "away" and not m.guest}
        for partition, claim in self._view.claims.items():
            share = shares.get(share_of(claim, self._guests))
            if share and partition in self._wanted:
                share.count += 1
                share.load += weights.get(partition, 1.0)
        return shares

    def _balanced(self, shares: Mapping[str, _Share]) -> bool:
        """Whether the shares are near enough to leave them alone."""
        if any(share.count for worker, share in shares.items() if worker not in self._residents):
            return False
        active = [share for worker, share in shares.items() if worker in self._residents]
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
        workers = _count(len(self._residents), "worker") + (f", {away} away" if away else "")
        if guests := len(self._active & self._guests):
            workers += f", {_count(guests, 'guest')}"
        if self._view.orders.hold_moves:
            workers += ", moves are paused"
        return FleetState.STABLE, f"{_count(len(self._wanted))} on {workers}", []


def _count(number: int, what: str = "partition") -> str:
    return f"{number} {what}{'s' * (number != 1)}"
