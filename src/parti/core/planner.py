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

from collections.abc import Sequence

from parti.core.balance import Balance
from parti.core.fleet_view import Command, Decision, FleetState, FleetView, Policy, count_of
from parti.core.giving import Giving
from parti.core.planner_memory import Memory
from parti.core.situation import Situation
from parti.strategies.interface import Strategy


class Planner:
    """Decides for one rebalancer, from its election on."""

    def __init__(self, strategy: Strategy, policy: Policy, *, elected_s: float, after_outage: bool = False) -> None:
        """`after_outage`: the control plane is known to have been away for longer than a lease."""
        self._memory = Memory(strategy, policy, elected_s=elected_s, after_outage=after_outage)

    def claim_failed(self, partitions: Sequence[str], now_s: float) -> None:
        """The claims of these could not be written: they stay where they are and are tried again later."""
        self._memory.claim_failed(partitions, now_s)

    def step(self, view: FleetView) -> Decision:
        """Decide what to do now."""
        here = Situation(self._memory, self._memory.look(view))
        giving = Giving(here)
        commands: list[Command] = [*giving.unwanted(), *giving.returned(), *giving.continue_moves()]
        state, reason, given = giving.give_away(giving.orphans())
        commands += given
        if not given:
            rebalancing, why, begun = Balance(here).rebalance()
            commands += begun
            state, reason = (state, reason) if state else (rebalancing, why)
        if state in {FleetState.STABLE, FleetState.SCALING, None}:
            moving = here.in_transit
            if moving:
                state, reason = FleetState.REBALANCING, f"{count_of(moving)} moving"
            elif commands:
                state, reason = FleetState.REBALANCING, f"{count_of(len(commands))}: {commands[0].reason}"
        assert state
        wake = min((t for t in here.wake_at_s if t > here.view.now_s), default=None)
        return Decision(tuple(c for c in commands if not here.is_held_back(c)), state, reason, wake)
