"""Somebody else deletes, changes or pauses the consumer of a worker: it is put right, or told of."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.integration.conftest import Kit, Record, eventually, merge

LOOK_S = 0.5


async def change(kit: Kit, **changed: Any) -> None:
    config = {**(await kit.consumer_info()).config, **changed}
    await kit.api.put_consumer(kit.stream, config, action="update")


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
async def test_a_filter_that_somebody_changes_is_put_right_and_nothing_is_passed_over(
    kit: Kit, record: Record, retention: str
) -> None:
    await kit.delete_stream()
    await kit.create_stream(retention=retention)
    async with kit.app(record.handle, ["a", "b"], stall_after_s=LOOK_S).running():
        first = await kit.publish(["a", "b"], 3)
        await record.reaches(6)
        await change(kit, filter_subjects=[kit.subject("a")])
        second = await kit.publish(["a", "b"], 3)
        await record.reaches(12)
        await eventually(kit.all_acked)
    record.is_exactly(merge(first, second))


async def test_limits_that_somebody_changes_are_put_right(kit: Kit, record: Record) -> None:
    async with kit.app(record.handle, ["a"], stall_after_s=LOOK_S, max_ack_pending=100).running():
        await change(kit, max_ack_pending=1, ack_wait=1_000_000_000)

        async def as_before() -> bool:
            config = (await kit.consumer_info()).config
            return (config["max_ack_pending"], config["ack_wait"]) == (100, 30_000_000_000)

        await eventually(as_before)
        sent = await kit.publish(["a"], 5)
        await record.reaches(5)
    record.is_exactly(sent)


async def test_a_consumer_that_somebody_pauses_is_told_of_until_it_is_resumed(kit: Kit, record: Record) -> None:
    async with kit.app(record.handle, ["a"], stall_after_s=LOOK_S).running() as worker:
        sessions = worker.metrics.resets.child("session").value
        await kit.api.pause_consumer(kit.stream, kit.consumer, datetime.now(UTC) + timedelta(hours=1))
        sent = await kit.publish(["a"], 3)
        await eventually(lambda: "pull-paused" in worker.health.reasons)
        await kit.api.pause_consumer(kit.stream, kit.consumer, None)
        await record.reaches(3)
        await eventually(lambda: worker.health.healthy)
        assert worker.metrics.resets.child("session").value == sessions, "what is as it should be is left alone"
    record.is_exactly(sent)
