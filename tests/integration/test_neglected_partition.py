"""A partition with a backlog whose feeding has ended is a stall: it is noticed, fed again, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.integration.conftest import Kit, Record, eventually

from parti.telemetry.health import Health
from parti.telemetry.tasks import supervise


async def test_a_partition_that_nobody_feeds_is_a_stall_and_is_fed_again(
    kit: Kit, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    def end_the_first_feeding(run: Callable[[], Coroutine[Any, Any, None]], name: str, health: Health | None) -> Any:
        if name != "feeding" or ended:
            return supervise(run, name, health)
        ended.append(name)
        nothing = asyncio.get_running_loop().create_future()
        nothing.set_result(None)
        return nothing

    monkeypatch.setattr("parti.worker.parking.supervise", end_the_first_feeding)
    sent = await kit.publish(["old", "a"], 50)
    app = kit.app(record.handle, ["a"], stall_after_s=0.5, lease_ttl_s=5.0)
    async with app.running() as worker:
        await record.reaches(50)
        await worker.update_worker_consumer("one", ["a", "old"])
        await eventually(lambda: worker.metrics.stalls.child("lanes").value == 1)
        await record.reaches(100)
        await eventually(lambda: worker.metrics.stalled.value == 0)
        assert worker.metrics.stalls.child("lanes").value == 1
    assert ended
    record.is_exactly(sent)
