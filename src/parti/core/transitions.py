"""Which state follows which: of a worker, of a lane and of a claim.

The manager, the lanes and the rebalancer decide when; these tables say what may follow at all. The diagrams of the
documentation are drawn from them, and simulated fleets are checked against them (tests/sim/test_transitions.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from parti.core.fleet_view import FleetState
from parti.core.lane import Phase
from parti.core.move import TABLE, Step
from parti.model.fleet import ClaimState

WORKING = frozenset(
    {
        FleetState.ELECTION,
        FleetState.WAITING,
        FleetState.STABLE,
        FleetState.SCALING,
        FleetState.REBALANCING,
        FleetState.EMERGENCY,
    }
)
"""A worker that holds its id is in the one that follows from what it has and what the rebalancer says."""

_S = FleetState
_HAS_NO_ID = frozenset({_S.ELECTION, _S.WAITING, _S.DEGRADED, _S.DRAINING, _S.STOPPED})
WORKER_STATES: Mapping[FleetState, frozenset[FleetState]] = {
    _S.INIT: frozenset({_S.CLAIMING_ID, _S.STOPPED}),
    _S.CLAIMING_ID: _HAS_NO_ID | {_S.STANDBY},
    _S.STANDBY: _HAS_NO_ID - {_S.DRAINING},
    **{state: WORKING - {state} | {_S.DEGRADED, _S.DRAINING} for state in _S if state in WORKING},
    _S.DEGRADED: WORKING | {_S.CLAIMING_ID, _S.STOPPED},
    _S.DRAINING: frozenset({_S.STOPPED, _S.CLAIMING_ID, _S.DEGRADED}),
    _S.STOPPED: frozenset(),
}

LANE_PHASES: Mapping[Phase, frozenset[Phase]] = {
    Phase.IDLE: frozenset({Phase.READY, Phase.HELD, Phase.CLOSED}),
    Phase.HELD: frozenset({Phase.IDLE, Phase.READY, Phase.RUNNING, Phase.CLOSED}),
    Phase.READY: frozenset({Phase.RUNNING, Phase.IDLE, Phase.HELD, Phase.CLOSED}),
    Phase.RUNNING: frozenset({Phase.IDLE, Phase.READY, Phase.HELD, Phase.BACKOFF, Phase.CLOSED}),
    Phase.BACKOFF: frozenset({Phase.READY, Phase.HELD, Phase.CLOSED}),
    Phase.CLOSED: frozenset(),
}

_LEADS_TO: Mapping[Step, ClaimState] = {
    Step.RELEASE: "moving",
    Step.KEEP: "owned",
    Step.GIVE: "owned",
    Step.GIVE_BACK: "owned",
    Step.GIVE_ELSEWHERE: "owned",
    Step.ORPHAN: "free",
}
BEGINNINGS: Mapping[tuple[ClaimState, ClaimState], str] = {
    ("free", "owned"): "somebody gets it",
    ("owned", "preparing"): "a move begins",
    ("owned", "moving"): "a move begins (work queue)",
    ("owned", "free"): "owner gone, or unwanted",
}
"""Steps that no move has begun yet for: the planner takes them."""


def claim_steps() -> dict[tuple[ClaimState, ClaimState], list[str]]:
    """From and to which state each step leads, by the table of moves."""
    steps: dict[tuple[ClaimState, ClaimState], list[str]] = {edge: [why] for edge, why in BEGINNINGS.items()}
    for (state, _, _), step in TABLE.items():
        if step in _LEADS_TO:
            found = steps.setdefault((state, _LEADS_TO[step]), [])
            if step.value not in found:
                found.append(step.value)
    return steps
