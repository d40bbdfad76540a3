"""Rebalance behaviours as prose: each file here is a scenario with the decisions that are expected of the planner.

`runner.py` explains the language and how to rewrite the expectations.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.scenarios.runner import Run, compress, expand, read

FILES = sorted(Path(__file__).parent.glob("*.txt"))
REWRITE = os.environ.get("PARTI_REWRITE_SCENARIOS") == "1"


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_scenario(path: Path) -> None:
    scenario = read(path)
    run = Run(scenario)
    settled = run.settle()
    outcomes = run.play()
    if REWRITE:
        path.write_text(scenario.text(settled, outcomes), encoding="utf-8")
        return
    expected = scenario.text(scenario.settled_expected, [event.expected for event in scenario.events])
    assert scenario.text(settled, outcomes).splitlines() == expected.splitlines()


def test_the_scenarios_were_found() -> None:
    assert len(FILES) >= 15


@pytest.mark.parametrize("text", ["p0..p7", "p0", "a, p1..p2", "p0, p2, p9..p11", "worker-1..worker-12"])
def test_names_are_compressed_as_they_are_expanded(text: str) -> None:
    assert compress(expand(text.split())) == text
