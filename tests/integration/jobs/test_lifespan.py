"""What an app opens for as long as a worker runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.integration.conftest import eventually
from tests.integration.jobs.kit import JobKit

from parti.errors import ConfigError, StreamNotFound
from parti.jobs import Job, JobWorker


async def test_it_is_entered_before_the_first_job_and_left_after_the_last(jobs: JobKit) -> None:
    happened: list[str] = []

    async def handle(job: Job) -> None:
        happened.append(f"begun with {job.resources}")
        begun.set()
        await asyncio.sleep(0.05)
        happened.append("ended")

    begun = asyncio.Event()
    app = jobs.app(handle)

    @app.lifespan
    @asynccontextmanager
    async def lifespan(worker: JobWorker) -> AsyncIterator[str]:
        assert worker.settings.nats == (jobs.kit.url,)
        happened.append("opened")
        yield "a store"
        happened.append("closed")

    with pytest.raises(ConfigError, match="has a lifespan already"):
        app.lifespan(lifespan)
    await jobs.create_stream()
    await jobs.publish({})
    for _ in range(2):  # a worker of its own each time
        async with app.running():
            await begun.wait()
    assert happened == ["opened", "begun with a store", "ended", "closed", "opened", "closed"]


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (StreamNotFound("no stream 'X'"), StreamNotFound, "no stream 'X'"),
        (OSError("disk full"), ConfigError, "the app's lifespan could not be entered: OSError: disk full"),
    ],
)
async def test_what_it_raises_keeps_the_worker_from_starting(
    jobs: JobKit, error: Exception | None, kind: type[Exception], words: str
) -> None:
    started: list[int] = []

    async def handle(job: Job) -> None:
        started.append(job.seq)

    app = jobs.app(handle)

    @app.lifespan
    @asynccontextmanager
    async def lifespan(worker: JobWorker) -> AsyncIterator[None]:
        if error:
            raise error
        yield

    await jobs.create_stream()
    await jobs.publish({})
    worker = app.worker()
    with pytest.raises(kind, match=words):
        await worker.start()
    assert worker._connection is not None
    assert worker._connection.closed
    assert started == []
    async with jobs.app(handle).running():  # nothing was taken along
        await eventually(lambda: started == [1])


async def test_an_error_at_its_end_is_logged_and_the_worker_leaves_in_order(jobs: JobKit) -> None:
    async def handle(job: Job) -> None:
        pass

    app = jobs.app(handle)

    @app.lifespan
    @asynccontextmanager
    async def lifespan(worker: JobWorker) -> AsyncIterator[None]:
        yield
        raise OSError("cannot flush")

    worker = app.worker()
    await worker.start()
    assert await worker.stop()
    assert worker._connection is not None
    assert worker._connection.closed
