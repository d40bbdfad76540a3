"""One partition that sleeps is its own problem (the full-size figures come from benchmarks/slow_partition.py)."""

from __future__ import annotations

import pytest
from benchmarks.slow_partition import Run, parse

ROOMY = ["--partitions", "20", "--rate", "200"]
CROWDED = ["--partitions", "10", "--rate", "500", "--max-ack-pending", "100"]
"""50 messages a second for the sleeper: within its sleep they would fill what may be in flight."""


@pytest.mark.parametrize("load", [ROOMY, CROWDED], ids=["roomy", "crowded"])
@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_a_sleeping_partition_does_not_delay_the_others(kind: str, load: list[str]) -> None:
    outcome = await Run(kind, parse([*load, "--sleep", "3", "--baseline", "1"])).measure()
    assert outcome.unhandled == 0
    assert outcome.handled_while_asleep > 0.9 * outcome.asleep.messages > 0
    assert outcome.asleep.p99_ms < 500


async def test_many_sleeping_partitions_do_not_delay_the_others() -> None:
    load = ["--partitions", "40", "--rate", "400", "--max-ack-pending", "100", "--sleepers", "10"]
    outcome = await Run("async", parse([*load, "--sleep", "4", "--baseline", "1"])).measure()
    assert outcome.unhandled == 0
    assert outcome.asleep.p99_ms < 500
