"""Consumer or stream are deleted while a job worker has all its places taken: nothing stands on the server then
that would tell it, and it notices all the same.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from tests.integration.conftest import eventually
from tests.integration.jobs.kit import JobKit

from parti.errors import PartiError
from parti.jobs import Job

WITHIN_S = 30.0


class Gated:
    """A handler that waits for a gate; it notes what it was called with."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.done: Counter[str] = Counter()
        self.gate = asyncio.Event()

    async def handle(self, job: Job) -> None:
        self.begun.append(job.json)
        await self.gate.wait()
        self.done[job.json] += 1

    def has(self, *names: str) -> bool:
        return set(names) <= self.done.keys()


@pytest.fixture
async def gated() -> Gated:
    return Gated()


@pytest.mark.parametrize("places", [1, 3])
async def test_a_full_worker_makes_a_deleted_consumer_again(jobs: JobKit, gated: Gated, places: int) -> None:
    async with jobs.app(gated.handle, max_capacity=places, fetch_batch_size=1).running() as worker:
        await jobs.publish("a", "b", "c", "d", "e")
        await eventually(lambda: len(gated.begun) == worker.held == places)
        await jobs.kit.api.delete_consumer(jobs.stream, jobs.durable)
        gated.gate.set()
        await eventually(lambda: gated.has("a", "b", "c", "d", "e"), WITHIN_S)
        await eventually(jobs.all_settled, WITHIN_S)
        assert set(gated.done.values()) == {1}, "what has ended is not done again"
        assert (await jobs.kit.api.stream_info(jobs.stream)).messages == 0


async def test_a_job_of_a_new_stream_is_not_taken_for_one_of_the_old_with_its_number(
    jobs: JobKit, gated: Gated
) -> None:
    async with jobs.app(gated.handle, max_capacity=2, fetch_batch_size=1).running() as worker:
        await jobs.publish("old")
        await eventually(lambda: gated.begun == ["old"])
        await jobs.kit.api.call(f"STREAM.DELETE.{jobs.stream}")
        await jobs.create_stream()
        await jobs.publish("new")
        # It waits until nobody has the number any more; a pull has seen it by then.
        redelivered = worker.metrics.redeliveries
        await eventually(lambda: redelivered.value > 0, WITHIN_S)
        gated.gate.set()
        await eventually(lambda: gated.has("old", "new"), WITHIN_S)
        await eventually(jobs.all_settled, WITHIN_S)
    assert gated.done == {"old": 1, "new": 1}


async def test_a_full_worker_makes_a_deleted_stream_again(jobs: JobKit, gated: Gated) -> None:
    async with jobs.app(gated.handle, max_capacity=1, fetch_batch_size=1).running():
        await jobs.publish("old", "lost")
        await eventually(lambda: gated.begun == ["old"])
        await jobs.kit.api.call(f"STREAM.DELETE.{jobs.stream}")
        gated.gate.set()

        async def published() -> bool:
            try:
                await jobs.publish("new")
            except PartiError:
                return False
            return True

        await eventually(published, WITHIN_S)
        await eventually(lambda: gated.has("new"), WITHIN_S)
        await eventually(jobs.all_settled, WITHIN_S)
    assert gated.done == {"old": 1, "new": 1}
