"""Job workers of two regions on one consumer: overflow by thresholds, and one region before the other."""

from __future__ import annotations

from typing import Any

import pytest
from tests.integration.conftest import eventually
from tests.integration.jobs.kit import Gates, JobKit

from parti.errors import ConfigError
from parti.jobs import JobWorker
from parti.model.job import JobState

BRIEF: dict[str, Any] = {"fetch_batch_size": 1, "fetch_timeout_s": 0.1}


async def has_asked_twice(worker: JobWorker) -> None:
    """Wait for the ends of two pulls that brought nothing: the second was sent after whatever came before."""
    expired = worker.metrics.pull_status.child("expired")
    before = expired.value
    await eventually(lambda: expired.value >= before + 2)


async def test_workers_of_another_region_help_only_while_enough_is_waiting(jobs: JobKit) -> None:
    near, far = Gates(), Gates()
    policy: dict[str, Any] = {"priority_policy": "overflow", "max_capacity": 2, "workers": 2, **BRIEF}
    async with (
        jobs.app(near.handle, **policy).running(worker_id="near") as local,
        jobs.app(far.handle, min_pending=5, **policy).running(worker_id="far") as remote,
    ):
        await jobs.publish(*[{"cost": 1}] * 2)
        await eventually(lambda: len(near.holding) == 2)
        await jobs.publish(*[{"cost": 1}] * 4)
        await has_asked_twice(remote)
        assert (local.held, remote.held) == (2, 0)
        await jobs.publish({"cost": 1})
        await eventually(lambda: len(far.holding) == 1)
        await has_asked_twice(remote)
        assert (local.held, remote.held) == (2, 1)
        near.opened.set()
        far.opened.set()
        await eventually(jobs.all_settled)
    assert len(near.done) == 6
    assert await jobs.states() == {JobState.DONE.value: 7}


async def test_conditions_on_jobs_in_hand_are_the_other_way_to_help(jobs: JobKit) -> None:
    near, far = Gates(), Gates()
    policy: dict[str, Any] = {"priority_policy": "overflow", "max_capacity": 2, "workers": 2, **BRIEF}
    async with (
        jobs.app(near.handle, **policy).running(worker_id="near"),
        jobs.app(far.handle, min_ack_pending=2, min_pending=1000, **policy).running(worker_id="far") as remote,
    ):
        await jobs.publish({"cost": 1})
        await eventually(lambda: len(near.holding) == 1)
        await has_asked_twice(remote)
        assert remote.held == 0
        await jobs.publish({"cost": 1}, {"cost": 1})
        await eventually(lambda: (len(near.holding), len(far.holding)) == (2, 1))
        near.opened.set()
        far.opened.set()
        await eventually(jobs.all_settled)


async def test_the_second_region_gets_what_the_first_has_no_room_for(jobs: JobKit) -> None:
    near, far = Gates(), Gates()
    policy: dict[str, Any] = {
        "priority_policy": "prioritized",
        "max_capacity": 3,
        "workers": 2,
        "fetch_batch_size": 1,
    }

    async def both_ask() -> bool:
        return (await jobs.kit.api.consumer_info(jobs.stream, jobs.durable)).waiting >= 2

    async with (
        jobs.app(far.handle, priority=1, **policy).running(worker_id="far"),
        jobs.app(near.handle, priority=0, **policy).running(worker_id="near"),
    ):
        for number in range(1, 4):
            await eventually(both_ask)
            await jobs.publish({"cost": 1})
            await eventually(lambda number=number: len(near.holding) == number)  # type: ignore[misc]
        await jobs.publish({"cost": 1}, {"cost": 1})
        await eventually(lambda: len(far.holding) == 2)
        near.opened.set()
        far.opened.set()
        await eventually(jobs.all_settled)
    assert (len(near.done), len(far.done)) == (3, 2)


@pytest.mark.parametrize(
    ("before", "after"), [("none", "overflow"), ("overflow", "none"), ("overflow", "prioritized")]
)
async def test_a_consumer_with_another_policy_is_refused_and_left_alone(
    jobs: JobKit, gates: Gates, before: str, after: str
) -> None:
    async with jobs.app(gates.handle, priority_policy=before).running():
        made = await jobs.kit.api.consumer_info(jobs.stream, jobs.durable)
    worker = jobs.app(gates.handle, priority_policy=after, max_capacity=5).worker()
    with pytest.raises(ConfigError, match=f"cannot be changed from {before} to {after}"):
        await worker.start()
    assert (await jobs.kit.api.consumer_info(jobs.stream, jobs.durable)).config == made.config
