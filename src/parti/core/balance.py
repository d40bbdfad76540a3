"""What a rebalancer moves from one live worker to another, and when.

Partitions of a worker that drains, those that operators have placed and those that a guest gives back move at once.
Others move for the sake of balance only after a window without joins and leaves, at most once in a minimum interval,
to workers that have been there for the length of a window, and not for a small imbalance; nor, where loads are
measured, for one that may pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from parti.core.causes import Cause
from parti.core.fleet_view import BeginMove, Command, FleetState, count_of
from parti.core.guests import share_of
from parti.core.loads import is_worth
from parti.core.planner_memory import Share
from parti.core.situation import Situation
from parti.strategies.ordering import natural_order


class Balance:
    """Decides for one look at the fleet."""

    def __init__(self, here: Situation) -> None:
        self._here = here
        self._memory = here.memory

    def rebalance(self) -> tuple[FleetState, str, list[Command]]:
        """The moves that begin now, with the state of the fleet and its reason in words."""
        memory, now_s = self._memory, self._here.view.now_s
        shares = self._shares()
        wanted = self._placed_moves() + self._returns()
        again_s = memory.looked_s + self._here.policy.min_rebalance_interval_s
        balanced = self._balanced(shares)
        if balanced and self._here.policy.load_window_s:
            memory.settled = True
            memory.newcomers.clear()
            memory.patience.reset()
        at_rest = memory.settled and (shares == memory.settled_shares or balanced)
        if self._here.stuck() and self._here.spare(self._here.residents):
            # Shares do not tell: what guests have counts to others, and leaves room all the same.
            at_rest = False
        if memory.settled and not at_rest and now_s < again_s and not self._here.stuck():
            self._here.wake_at_s.append(again_s)
            at_rest = True
        if not at_rest:
            placed = {move.partition for move in wanted}
            moves = self._lasting([move for move in self._wanted_moves() if move.partition not in placed], shares)
            wanted += moves
            memory.looked_s = now_s
            # What a guest gives back cannot be sent elsewhere before it has arrived: ask the strategy again then.
            waits = wanted or self._here.in_transit or memory.patience.since_s is not None
            memory.settled_shares = None if waits else shares
        if self._here.view.orders.hold_moves:
            # Whoever drains is about to go, whatever operators want.
            claims, members = self._here.view.claims, self._here.view.members
            owners = {move: members.get(claims[move.partition].owner) for move in wanted}
            wanted = [move for move, owner in owners.items() if owner and (owner.guest or owner.state != "active")]
        obstacle, due = self._due(wanted)
        if not at_rest:
            memory.settled = len(due) == len(wanted) and not self._here.view.orders.hold_moves
            if memory.settled:
                memory.newcomers.clear()
        if due:
            return FleetState.REBALANCING, f"{count_of(len(due))} told to move", due
        if wanted:
            return FleetState.SCALING, f"{count_of(len(wanted))} to move, but {obstacle}", []
        return self._at_rest()

    def _placed_moves(self) -> list[BeginMove]:
        """Partitions that an operator has placed elsewhere than where they are."""
        if not self._here.view.orders.placed:
            return []
        claims, moves = self._here.view.claims, []
        for partition, worker in self._here.placed.items():
            claim = claims.get(partition)
            if claim is None or claim.state == "free" or worker in {claim.owner, claim.next}:
                continue
            state = self._here.state(claim.owner)
            # Whoever drains cannot wait, and whoever is away cannot let go.
            if state == "away" or (state == "draining" and self._here.why_not_to(worker)):
                continue
            if worker in self._here.active and self._here.target.get(partition) == worker:
                moves.append(BeginMove(partition, worker, "placed by an operator", Cause.PLACE))
        return moves

    def _returns(self) -> list[BeginMove]:
        """Partitions of guests that are no longer placed there."""
        moves = []
        for partition, claim in self._here.view.claims.items():
            if claim.owner not in self._here.guests or claim.state != "owned" or partition not in self._here.wanted:
                continue
            if self._here.placed.get(partition) or self._here.state(claim.owner) == "away":
                continue  # it stays, or `_placed_moves` sees to it; or nobody is there to let go
            worker = self._here.target.get(partition, "")
            if worker not in self._here.residents or self._here.why_not_to(worker):
                # As from one who drains: it cannot wait for somebody who is away or does not pull.
                fit = [w for w in self._here.residents if not self._here.why_not_to(w)]
                worker = self._here.spare(fit) or self._here.spare(self._here.residents)
            if worker:
                self._here.incoming[worker] += 1
                moves.append(BeginMove(partition, worker, f"{claim.owner} gives it back", Cause.GUEST))
        return moves

    def _wanted_moves(self) -> Iterator[BeginMove]:
        here, claims, target = self._here, self._here.view.claims, self._here.target
        astray = (
            p
            for p, c in claims.items()
            if c.state != "free" and c.owner not in here.guests and target.get(p, "") not in {"", c.next or c.owner}
        )
        wanted = here.wanted & claims.keys()
        urgent = natural_order(p for p in wanted if here.is_stuck(claims[p]) and not target.get(p))
        # With room for too few, a partition that the strategy has no place for stays, and takes the room of another.
        owners = {p: claims[p].next or claims[p].owner for p in wanted}
        stays = Counter(owner for p, owner in owners.items() if target.get(p, "") in {"", owner})
        for partition in natural_order(astray):
            claim, worker = claims[partition], target[partition]
            state = here.state(claim.owner)
            full = stays[worker] >= here.view.members[worker].capacity
            if (state, claim.state) == ("draining", "owned") and (full or here.why_not_to(worker)):
                urgent.append(partition)
            elif worker in here.active and state != "away" and not full:
                here.incoming[worker] += 1
                stays[worker] += 1
                yield BeginMove(partition, worker, *self._why_moved(claim.owner, worker))
        fit = [worker for worker in here.residents if not here.why_not_to(worker)]
        for partition in urgent:
            # Whoever drains cannot wait for somebody who is away or does not pull.
            if worker := here.spare(fit) or here.spare(here.residents):
                here.incoming[worker] += 1
                yield BeginMove(partition, worker, *self._why_moved(claims[partition].owner, worker))

    def _why_moved(self, owner: str, heir: str) -> tuple[str, Cause]:
        """Why the strategy wants somebody else to have something."""
        if self._here.state(owner) == "draining":
            return f"{owner} is draining", Cause.DRAIN if owner in self._here.view.orders.drained else Cause.LEAVE
        # A new rebalancer has not seen who came last, but whoever has nothing can only just have come.
        if heir in self._memory.newcomers or not self._here.loads[heir]:
            cause = Cause.JOIN
        else:
            cause = Cause.LOAD if self._here.policy.load_window_s else Cause.BALANCE
        return f"balance ({owner} has more)", cause

    def _lasting(self, moves: list[BeginMove], shares: Mapping[str, Share]) -> list[BeginMove]:
        """Of the moves that the strategy wants, those that measured loads are reason enough for, for long enough.

        Nothing is asked of moves from somebody who drains or has more than it can take, or to somebody who has
        nothing at all; and where workers came or went, nobody waits to see whether an imbalance lasts.
        """
        policy, patience, now_s = self._here.policy, self._memory.patience, self._here.view.now_s
        if not policy.load_window_s:
            return moves
        owner = {move: self._here.view.claims[move.partition].owner for move in moves}
        urgent, for_load = list[BeginMove](), list[BeginMove]()
        for move in moves:
            (urgent if self._here.gives_way(owner[move]) else for_load).append(move)
        crowded = any(share.count > share.capacity for share in shares.values())
        if crowded or not all(shares[move.next].count for move in for_load):
            patience.reset()
            return moves
        if self._memory.settled:
            for_load = [move for move in for_load if not patience.rests(move.partition, now_s)]
        if not self._is_worth([(owner[move], move) for move in for_load]):
            patience.reset()
            return urgent
        if self._memory.settled and not patience.is_over(now_s):
            self._here.wake_at_s += [patience.ends_s, now_s + policy.min_rebalance_interval_s]
            return urgent
        patience.reset()
        patience.rest((move.partition for move in for_load), now_s)
        return urgent + for_load

    def _is_worth(self, moves: Iterable[tuple[str, BeginMove]]) -> bool:
        loads, members = self._here.view.weights or {}, self._here.view.members
        shifts = [(owner, move.next, loads.get(move.partition, 1.0)) for owner, move in moves]
        claims = ((p, self._here.view.claims.get(p)) for p in self._here.wanted)
        held = [(share_of(claim, self._here.guests), loads.get(p, 1.0)) for p, claim in claims if claim]
        weights = {worker: members[worker].weight for worker in self._here.residents}
        return is_worth(shifts, held, weights, self._here.policy.hysteresis)

    def _due(self, wanted: Sequence[BeginMove]) -> tuple[str, list[Command]]:
        """Those moves that need not wait, and what keeps the others."""
        memory, placed = self._memory, self._here.view.orders.placed
        obstacle, due, moves_from_active = "", list[Command](), False
        room = self._here.policy.moves_at_once - self._here.in_transit
        continues, memory.more_to_move = memory.more_to_move, False
        drains = {move: self._here.gives_way(self._here.view.claims[move.partition].owner) for move in wanted}
        for move in sorted(wanted, key=lambda move: not drains[move]):
            if why := self._cannot_move(move):
                obstacle = why
            elif len(due) >= room:
                obstacle = f"{self._here.in_transit + len(due)} are on their way already"
                memory.more_to_move = True
            elif drains[move] or placed.get(move.partition) == move.next:
                due.append(move)
            elif why := self._too_early(move, continues=continues):
                obstacle = why
            else:
                due.append(move)
                moves_from_active = True
        if moves_from_active:
            memory.moved_s = self._here.view.now_s
        return obstacle, due

    def _cannot_move(self, move: BeginMove) -> str:
        """What keeps a partition where it is, whoever wants to move it; empty for nothing."""
        claim = self._here.view.claims[move.partition]
        owner = self._here.view.members.get(claim.owner)
        if owner is None:
            return f"it is too early to call {claim.owner} lost"
        if owner.incarnation != claim.incarnation:
            return f"{claim.owner} has only just restarted"
        if claim.state in {"preparing", "moving"}:
            return "they are still on their way to somebody else"
        if self._here.is_held_back(move):
            return "claims could not be written"
        return self._here.why_not_to(move.next)

    def _too_early(self, move: BeginMove, *, continues: bool) -> str:
        """Why a move for balance has to wait; `continues`: it belongs to a rebalance that has begun."""
        memory, length_s = self._memory, self._here.policy.scale_window_s
        waits = {
            "workers have only just come or gone": memory.window_ends_s(length_s),
            f"{move.next} has only just come": (memory.joined_s or {})[move.next] + length_s,
        }
        if not continues:
            waits["others have only just moved"] = memory.moved_s + self._here.policy.min_rebalance_interval_s
        why, until_s = max(waits.items(), key=lambda wait: wait[1])
        if self._here.view.now_s >= until_s:
            return ""
        self._here.wake_at_s.append(until_s)
        return why

    def _shares(self) -> dict[str, Share]:
        """What all members have, or will have when the moves that have begun are over."""
        weights = self._here.view.weights or {}
        members = self._here.view.members.items()
        shares = {w: Share(m.capacity, m.weight) for w, m in members if m.state != "away" and not m.guest}
        for partition, claim in self._here.view.claims.items():
            share = shares.get(share_of(claim, self._here.guests))
            if share and partition in self._here.wanted:
                share.count += 1
                share.load += weights.get(partition, 1.0)
        return shares

    def _balanced(self, shares: Mapping[str, Share]) -> bool:
        """Whether the shares are near enough to leave them alone."""
        if any(share.count for worker, share in shares.items() if worker not in self._here.residents):
            return False
        active = [share for worker, share in shares.items() if worker in self._here.residents]
        if any(share.count > share.capacity for share in active):
            return False
        load, count = sum(share.load for share in active), sum(share.count for share in active)
        if not load:
            return True
        # Counted in partitions of mean load, for a worker of mean weight.
        scale = count / load * sum(share.weight for share in active) / len(active)
        most = scale * max(share.load / share.weight for share in active)
        least = [scale * share.load / share.weight for share in active if share.count < share.capacity]
        slack = max(1.0, self._here.policy.hysteresis * count / len(active))
        return not least or most - min(least) <= slack

    def _at_rest(self) -> tuple[FleetState, str, list[Command]]:
        if stuck := self._here.stuck():
            return FleetState.DEGRADED, f"nobody has room for {count_of(stuck)} of draining workers", []
        away = sum(m.state == "away" for m in self._here.view.members.values())
        workers = count_of(len(self._here.residents), "worker") + (f", {away} away" if away else "")
        if guests := len(self._here.active & self._here.guests):
            workers += f", {count_of(guests, 'guest')}"
        if self._here.view.orders.hold_moves:
            workers += ", moves are paused"
        return FleetState.STABLE, f"{count_of(len(self._here.wanted))} on {workers}", []
