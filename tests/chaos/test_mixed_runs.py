"""Small versions of the chaos programs that lose servers, on real processes."""

from __future__ import annotations

import pytest
from tests.chaos.test_runs import SMALL, shown

from chaos import cluster, storm

pytestmark = pytest.mark.timeout(120)


@pytest.mark.slow
async def test_a_storm_loses_nothing() -> None:
    outcome = await storm.run(storm.parse([*SMALL, "--workers", "3", "--seconds", "5", "--seed", "5"]))
    shown(outcome)
    assert sum(outcome.figures["faults"].values()) > 2


@pytest.mark.slow
async def test_a_cluster_that_loses_its_stream_leader_loses_no_message() -> None:
    arguments = ["--workers", "2", "--moves", "2", "--batch", "2", "--retention", "workqueue", "--ttl", "5"]
    outcome = await cluster.run(cluster.parse([*SMALL, *arguments]))
    shown(outcome)
    assert outcome.figures["faults"] == {"node kill": 1, "step-down": 1}
