"""Whole fleets: some seeds keep every promise, the same seed is the same run, and planted bugs are found."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import count

import pytest

from parti.cli.main import main
from parti.core.invariants import Invariant
from parti.sim.bugs import BUGS
from parti.sim.runs import run_seeds, run_verbosely
from parti.sim.scenario import RETENTIONS, FaultKind, make_scenario
from parti.sim.substitution import simulation
from parti.sim.world import World

ENOUGH = 1000


@pytest.mark.parametrize("retention", RETENTIONS)
def test_promises_are_kept(retention: str) -> None:
    tally = run_seeds(range(1, 9), retention=retention)
    assert tally.failures == []
    assert tally.seeds == 8
    assert tally.calls >= tally.messages > 250
    assert tally.holdings > 30


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str) -> None:
    for seed in count(1):
        assert seed <= ENOUGH, f"{bug} was not found within {ENOUGH} seeds"
        tally = run_seeds([seed], bug=bug)
        if tally.failures:
            break
    broken = " ".join(tally.failures[0].complaints)
    assert any(invariant.value in broken for invariant in Invariant), broken
    # It is the bug that was found, and its patches are gone.
    assert run_seeds([seed]).failures == []


def test_what_was_lost_with_the_last_fault_may_take_as_long_as_the_server_takes_to_deliver_it_again() -> None:
    scenario = make_scenario(40188, retention="interest")
    assert scenario.liveness_s > scenario.timing.ack_wait_s == 30.0
    tally = run_seeds([scenario.seed], retention=scenario.retention)
    assert tally.failures == []


@pytest.mark.parametrize(
    ("seed", "retention"),
    [
        pytest.param(50672, "interest", id="an heir that had read nothing dies, and a leader changes"),
        pytest.param(62477, "interest", id="given away and given back before anybody was asked who carries it"),
        pytest.param(60999, "interest", id="wanted again while others were asked whether they carry it"),
        pytest.param(52507, "interest", id="a timer that ends too early by a rounding error"),
        pytest.param(80629, None, id="given more while it begins with what an earlier process carried"),
        pytest.param(70694, None, id="a worker that is told to leave while it looks where to begin"),
        pytest.param(500568, None, id="a partition of a work-queue is paused, and its owner leaves"),
        pytest.param(501149, None, id="a pull of one that is cut off stands on a consumer that is taken over"),
        pytest.param(504140, None, id="given and taken away again while a consumer is updated"),
        pytest.param(504657, None, id="a clock that shows a little less than what was waited for"),
    ],
)
def test_seeds_that_failed_once(seed: int, retention: str | None) -> None:
    assert run_seeds([seed], retention=retention).failures == []


def test_a_seed_is_always_the_same_run() -> None:
    seeds = (3, 8)
    here = [run_verbosely(seed).digest for seed in seeds]
    run_seeds([2])  # what was run before leaves no trace
    assert [run_verbosely(seed).digest for seed in seeds] == here
    code = f"from parti.sim.runs import run_verbosely\nfor seed in {seeds}: print(run_verbosely(seed).digest)"
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    there = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=50
    )
    assert there.stdout.split() == here


def test_seeds_differ_and_together_try_everything() -> None:
    scenarios = [make_scenario(seed) for seed in range(200)]
    assert len({scenario.publishes for scenario in scenarios}) == 200
    assert {scenario.retention for scenario in scenarios} == set(RETENTIONS)
    assert {fault.kind for scenario in scenarios for fault in scenario.faults} == set(FaultKind)


def test_a_timeline_tells_what_happened() -> None:
    with simulation():
        outcome = World(make_scenario(5, retention="limits"), keep_timeline=True).run()
    told = [what for _, _, what in outcome.timeline]
    assert outcome.good
    assert [at_s for at_s, _, _ in outcome.timeline] == sorted(at_s for at_s, _, _ in outcome.timeline)
    assert sum(" is stored " in what for what in told) == outcome.messages
    assert "settled" in told


class TestCommand:
    def test_it_runs_seeds_and_sums_up(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["sim", "--seeds", "2", "--processes", "1"]) == 0
        out = capsys.readouterr().out
        assert "2 seeds in" in out
        assert "0 failing seeds." in out

    def test_it_prints_how_to_replay_a_failing_seed(self, capsys: pytest.CaptureFixture[str]) -> None:
        bug = "filter-edit-without-backfill"
        assert main(["sim", "--seed", "1", "--bug", bug, "--retention", "limits"]) == 1
        out = capsys.readouterr().out
        assert f"seed 1: parti sim --seed 1 --bug {bug} --retention limits --verbose" in out
        assert "Order" in out or "NoLoss" in out

    def test_it_prints_the_timeline_of_one_seed(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["sim", "--seed", "2", "--verbose"]) == 0
        out = capsys.readouterr().out
        assert "log: elected role=rebalancer" in out
        assert "digest" in out

    @pytest.mark.parametrize(
        "arguments",
        [["--bug", "none-such"], ["--retention", "forever"], ["--verbose"], ["--seeds", "0"], ["--seed", "x"]],
    )
    def test_bad_input_is_refused(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["sim", *arguments]) == 2
        assert capsys.readouterr().err.startswith("parti: ")
