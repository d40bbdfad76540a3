"""Small versions of the chaos programs, on real processes and a real server."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos.outcome import Outcome, report

from chaos import kills, migration, moves, restarts, rolling, standby, stops

SMALL = ["--partitions", "6", "--rate", "120", "--ttl", "1"]
pytestmark = pytest.mark.timeout(120)
LATE = "handled by others within"
"""How soon others take over is a matter of the machine that the tests run on."""


def shown(outcome: Outcome) -> None:
    """Everything that must be shown was, save figures that a busy machine spoils."""
    broken = [f"{v.what}: {v.figure}" for v in outcome.verdicts if not v.passed and not v.what.startswith(LATE)]
    assert not broken, "\n".join([*broken, *outcome.notices])
    assert outcome.figures["messages"] > 100


async def test_nothing_is_lost_when_a_worker_is_killed() -> None:
    outcome = await kills.run(kills.parse([*SMALL, "--workers", "2", "--kills", "1"]))
    shown(outcome)
    assert outcome.figures["faults"] == {"kill": 1}


# What a write to a closed connection does depends on the event loop; what a lost acknowledgement does, on the stream.
@pytest.mark.parametrize(
    ("retention", "loop"), [("workqueue", "uvloop"), pytest.param("interest", "asyncio", marks=pytest.mark.slow)]
)
async def test_every_worker_goes_on_when_the_server_is_killed(retention: str, loop: str) -> None:
    arguments = ["--workers", "2", "--kills", "2", "--every", "2", "--after", "2", "--ttl", "5"]
    outcome = await restarts.run(restarts.parse([*SMALL, *arguments, "--retention", retention, "--loop", loop]))
    shown(outcome)
    assert outcome.figures["faults"] == {"server kill": 2}


@pytest.mark.slow
async def test_a_stopped_worker_starts_nothing_when_it_wakes() -> None:
    outcome = await stops.run(stops.parse([*SMALL, "--workers", "2", "--stops", "1"]))
    shown(outcome)
    assert outcome.figures["faults"] == {"stop": 1}


@pytest.mark.slow
async def test_a_rolling_restart_moves_nothing() -> None:
    shown(await rolling.run(rolling.parse([*SMALL, "--workers", "2"])))


# Where messages are deleted once they are handled a mistake costs most: the one kind of stream stands for the other.
@pytest.mark.parametrize("retention", [pytest.param("interest", marks=pytest.mark.slow), "workqueue"])
async def test_planned_moves_lose_and_repeat_nothing(retention: str, tmp_path: Path) -> None:
    arguments = ["--workers", "2", "--moves", "12", "--batch", "4", "--hot-rate", "60", "--retention", retention]
    outcome = await moves.run(moves.parse([*SMALL, *arguments]))
    shown(outcome)
    assert outcome.figures["moves by the claims"] == 12
    assert report(outcome, tmp_path) == 0
    assert (tmp_path / f"chaos_moves_{retention}.json").exists()


async def test_whoever_stands_by_takes_over_from_one_that_is_killed() -> None:
    outcome = await standby.run(standby.parse([*SMALL, "--kills", "2"]))
    shown(outcome)
    assert outcome.figures["faults"] == {"kill": 2}
    assert outcome.figures["worker processes"] == 4


@pytest.mark.slow
async def test_one_that_was_stopped_starts_nothing_and_its_pulls_are_no_hindrance() -> None:
    """With few messages the pulls of the stopped process stand for long, on a stream where that matters."""
    arguments = ["--partitions", "4", "--rate", "30", "--ttl", "1", "--stops", "1", "--retention", "interest"]
    outcome = await standby.run(standby.parse(arguments))
    broken = [f"{v.what}: {v.figure}" for v in outcome.verdicts if not v.passed and not v.what.startswith(LATE)]
    assert not broken, "\n".join([*broken, *outcome.notices])
    assert outcome.figures["faults"] == {"stop": 1}
    assert outcome.figures["from the fault to the first message"].max_s < standby.LEASES * 1.0


@pytest.mark.slow
@pytest.mark.parametrize("retention", ["limits", "workqueue"])
async def test_old_consumers_become_a_fleet_and_come_back(retention: str) -> None:
    arguments = ["--workers", "2", "--hosts", "1", "--old-processes", "1", "--at-once", "3", "--wait", "1"]
    windows = ["--windows", "1", "--window", "0.5", "--rest", "1", "--retention", retention]
    outcome = await migration.run(migration.parse([*SMALL, *arguments, *windows]))
    shown(outcome)
