"""What a rebalancer remembers from one look at the fleet to the next.

Nothing that a successor could not work out from the claims, except when the windows began and what has been tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parti.core.fleet_view import FleetView, Policy
from parti.core.loads import Patience
from parti.core.orders import obey
from parti.strategies.interface import Strategy

_NEVER_S = float("-inf")


@dataclass(slots=True)
class Share:
    """What a worker has, once all moves have come to their end."""

    capacity: int
    weight: float
    count: int = 0
    load: float = 0.0


class Memory:
    """Kept by one rebalancer, from its election on."""

    def __init__(self, strategy: Strategy, policy: Policy, *, elected_s: float, after_outage: bool = False) -> None:
        """`after_outage`: the control plane is known to have been away for longer than a lease."""
        self.strategy = strategy
        self.policy = policy
        self.elected_s = elected_s
        self.joined_s: dict[str, float] | None = None
        """Since when each active worker has been there; those found at the first look have always been."""
        self.away: frozenset[str] = frozenset()
        self.placed: Mapping[str, str] = {}
        self.window_began_s = elected_s
        self.changed_s = elected_s
        self.moved_s = _NEVER_S
        self.looked_s = _NEVER_S
        # Loads that are measured have changed a little since the last rebalancer looked. That alone is no reason to
        # move anything; and whoever has joined in between has nothing yet, which tells.
        self.settled = policy.load_window_s > 0
        """Since the last join or leave the strategy was asked, and all it wanted was begun."""
        self.patience = Patience(policy.load_window_s)
        self.settled_shares: Mapping[str, Share] | None = None
        """What everybody had when the strategy was asked and wanted nothing."""
        self.held_back: dict[str, float] = {}
        self.preparing_s: dict[str, float] = {}
        """Since when each move has been waiting for the next owner to get ready."""
        self.late: dict[str, float] = {}
        """Workers that did not get ready in time, and until when nothing is moved to them."""
        self.more_to_move = False
        """Moves of the last rebalance had to wait until fewer are on their way."""
        self.seen: set[str] = set()
        self.newcomers: set[str] = set()
        """Who has come since the strategy got all it wanted: moves to them are for their sake."""
        self.after_outage = after_outage
        self.somebody_stayed: bool | None = None
        """Whether at the first look somebody had kept its lease since it was given its partitions."""

    def claim_failed(self, partitions: Sequence[str], now_s: float) -> None:
        """The claims of these could not be written: they stay where they are and are tried again later."""
        for partition in partitions:
            self.held_back[partition] = now_s + self.policy.retry_s
        self.settled = False

    def look(self, view: FleetView) -> FleetView:
        """Take notice of what has changed; the fleet with the operators' orders applied."""
        if self.somebody_stayed is None:
            # Only now: later on everybody who came back has been given its partitions anew.
            self.somebody_stayed = any(
                (member := view.members.get(claim.owner)) and member.incarnation == claim.incarnation
                for claim in view.claims.values()
            )
        self.seen |= view.members.keys()
        view = obey(view)
        self._note_members(view)
        began_s = self.preparing_s
        preparing = (p for p, claim in view.claims.items() if claim.state == "preparing")
        self.preparing_s = {p: began_s.get(p, view.now_s) for p in preparing}
        self.held_back = {p: until for p, until in self.held_back.items() if until > view.now_s}
        self.late = {w: until for w, until in self.late.items() if until > view.now_s}
        return view

    def _note_members(self, view: FleetView) -> None:
        """Keep the times of joins and leaves, and notice what makes the strategy think again."""
        before, since_s = self.joined_s or {}, _NEVER_S if self.joined_s is None else view.now_s
        known = self.joined_s is not None
        self.joined_s = {
            w: before.get(w, since_s) for w, m in view.members.items() if m.state == "active" and not m.guest
        }
        if not self.away <= view.members.keys() or self.placed != view.orders.placed:
            # The strategy left them alone for the sake of somebody who will not be back, or of an order.
            self.settled_shares = None
        if known:
            self.newcomers = (self.newcomers | (self.joined_s.keys() - before.keys())) & self.joined_s.keys()
        self.away = frozenset(w for w, m in view.members.items() if m.state == "away")
        self.placed = view.orders.placed
        if not known or before.keys() == self.joined_s.keys():
            return
        # Moves have ended the window before, even if somebody came or went all the time.
        if view.now_s - self.changed_s > self._window(view) or self.moved_s >= self.window_began_s:
            self.window_began_s = view.now_s
        self.changed_s = view.now_s
        self.settled = False

    def _window(self, view: FleetView) -> float:
        cold = not any(c.owner in view.members for c in view.claims.values())
        return self.policy.cold_start_window_s if cold else self.policy.scale_window_s

    def knows_of(self, worker: str) -> bool:
        """Whether the absence of a worker means something already.

        After an outage it does not: leases may end in the sight of a rebalancer whose holders are still on their way
        back.
        """
        return not self.after_outage and (worker in self.seen or bool(self.somebody_stayed))

    def window_ends_s(self, length_s: float) -> float:
        """End of a window that each join or leave extends, up to three times its length."""
        return min(self.changed_s + length_s, self.window_began_s + 3 * length_s)
