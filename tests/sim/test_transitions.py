"""The tables of states hold for what simulated fleets really do, and their page is current."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from parti.coordination.standing import Standing
from parti.core.fleet_view import FleetState
from parti.core.lane import Lane, Phase
from parti.core.move import TABLE
from parti.core.transitions import LANE_PHASES, WORKER_STATES, claim_steps
from parti.sim.runs import run_seeds
from parti.sim.scenario import RETENTIONS

DOCS = Path(__file__).parents[2] / "docs"


def test_simulated_fleets_make_no_other_transitions(monkeypatch: pytest.MonkeyPatch) -> None:
    states: set[tuple[FleetState, FleetState]] = set()
    phases: set[tuple[Phase, Phase]] = set()
    be, slot = Standing.set, vars(Lane)["phase"]

    def noted_set(self: Standing, state: FleetState, reason: str) -> None:
        states.add((self.state, state))
        be(self, state, reason)

    def noted_phase(lane: Lane, phase: Phase) -> None:
        try:
            phases.add((slot.__get__(lane, Lane), phase))
        except AttributeError:
            pass  # its first one
        slot.__set__(lane, phase)

    monkeypatch.setattr(Standing, "set", noted_set)
    monkeypatch.setattr(Lane, "phase", property(lambda lane: slot.__get__(lane, Lane), noted_phase))
    for retention in RETENTIONS:
        assert run_seeds(range(1, 4), retention=retention).failures == []
    assert [(a, b) for a, b in states if a is not b and b not in WORKER_STATES[a]] == []
    assert [(a, b) for a, b in phases if a is not b and b not in LANE_PHASES[a]] == []
    assert len(states) > 15
    assert len(phases) > 8


def test_every_state_is_in_its_table() -> None:
    assert list(WORKER_STATES) == list(FleetState)
    assert list(LANE_PHASES) == list(Phase)
    steps = claim_steps()
    assert {state for state, _, _ in TABLE} <= {before for before, _ in steps}
    assert {"owned", "preparing", "moving", "free"} == {state for edge in steps for state in edge}


def test_the_page_of_states_and_its_diagrams_are_current() -> None:
    pages = runpy.run_path(str(DOCS / "states_page.py"))["pages"]()
    assert {path: (DOCS / path).read_text(encoding="utf-8") for path in pages} == pages, (
        "run: python docs/generate.py"
    )
