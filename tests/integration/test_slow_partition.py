"""One partition that sleeps is its own problem (the full-size figures come from benchmarks/slow_partition.py)."""

from __future__ import annotations

import pytest
from benchmarks.slow_partition import Run, parse

ROOMY = ["--partitions", "20", "--rate", "200"]
CROWDED = ["--partitions", "10", "--rate", "500", "--max-ack-pending", "100"]
"""50 messages a second for the sleeper: within its sleep they would fill what may be in flight."""


@pytest.mark.parametrize(
    ("kind", "load"),
    [
        pytest.param("plain", CROWDED, id="plain-crowded"),
        # By default: the same with ten sleepers, below.
        pytest.param("async", CROWDED, id="async-crowded", marks=pytest.mark.slow),
        # With room to spare there is less to go wrong.
        pytest.param("async", ROOMY, id="async-roomy", marks=pytest.mark.slow),
        pytest.param("plain", ROOMY, id="plain-roomy", marks=pytest.mark.slow),
    ],
)
async def test_a_sleeping_partition_does_not_delay_the_others(kind: str, load: list[str]) -> None:
    outcome = await Run(kind, parse([*load, "--sleep", "3", "--baseline", "1"])).measure()
    assert outcome.unhandled == 0
    assert outcome.handled_while_asleep > 0.9 * outcome.asleep.messages > 0
    assert outcome.asleep.p99_ms < 500


@pytest.mark.slow
async def test_many_sleeping_partitions_do_not_delay_the_others() -> None:
    load = ["--partitions", "40", "--rate", "400", "--max-ack-pending", "100", "--sleepers", "10"]
    outcome = await Run("async", parse([*load, "--sleep", "4", "--baseline", "1"])).measure()
    assert outcome.unhandled == 0
    assert outcome.asleep.p99_ms < 500
