"""The five scenarios of the source document, on a real server."""

from __future__ import annotations

import asyncio

from tests.integration.conftest import becomes_pending, eventually
from tests.integration.jobs.kit import Gates, JobKit

from parti.jobs import Job


async def test_one_large_job_alone_uses_all_slots_and_no_other_gets_any(jobs: JobKit, gates: Gates) -> None:
    app = jobs.app(gates.handle)
    async with app.running() as worker:
        (large,) = await jobs.publish({"cost": 64})
        await eventually(lambda: gates.holding == [large])
        assert (worker.scheduler.current_usage, worker.scheduler.usage_percent) == (14, 100.0)
        (other,) = await jobs.publish({"cost": 1})
        await eventually(lambda: worker.scheduler.waiting == 1)
        assert gates.started == [large, other]
        assert gates.holding == [large]
        gates.opened.set()
        await eventually(jobs.all_settled)
    assert gates.done == [large, other]
    assert gates.usage == [14, 1]


async def test_fourteen_small_jobs_run_at_once_in_fourteen_slots(jobs: JobKit, gates: Gates) -> None:
    app = jobs.app(gates.handle)
    async with app.running() as worker:
        sent = await jobs.publish_many([{"cost": 1}] * 15)
        await eventually(lambda: len(gates.holding) == 14)
        assert worker.scheduler.current_usage == 14
        assert worker.held == await jobs.held_by_server() == 14  # the fifteenth stays on the server
        info = await jobs.kit.api.consumer_info(jobs.stream, jobs.durable)
        assert info.config["max_ack_pending"] == 14
        await becomes_pending(jobs.kit.api, jobs.stream, {jobs.durable: 1})
        gates.opened.set()
        await eventually(jobs.all_settled)
    assert sorted(gates.done) == sorted(sent)
    assert await jobs.states() == {"done": 15}


async def test_one_large_and_ten_small_jobs_the_small_ones_wait_and_then_run_together(
    jobs: JobKit, gates: Gates
) -> None:
    app = jobs.app(gates.handle)
    most = 0

    async def watch_usage() -> None:
        nonlocal most
        while len(gates.done) < 11:
            if gates.done:
                most = max(most, worker.scheduler.current_usage)
            await asyncio.sleep(0)

    async with app.running() as worker:
        large, *small = await jobs.publish({"cost": 64}, *[{"cost": 1}] * 10)
        await eventually(lambda: worker.scheduler.waiting == 10)
        assert gates.holding == [large]
        assert worker.scheduler.current_usage == 14
        watching = asyncio.create_task(watch_usage())
        gates.opened.set()
        await eventually(jobs.all_settled)
        await watching
    assert gates.done[0] == large
    assert sorted(gates.done[1:]) == sorted(small)
    assert most == 10


async def test_a_long_job_with_many_heartbeats_is_delivered_once_also_while_it_waits_for_slots(
    jobs: JobKit, gates: Gates
) -> None:
    app = jobs.app(gates.handle, ack_wait_minutes=1 / 60, heartbeat_interval_s=0.1)
    async with app.running() as worker:
        sent = await jobs.publish({"cost": 14}, {"cost": 1})  # the second only waits
        await eventually(lambda: worker.metrics.jobs_heartbeats.value >= 50, 20)  # some 2.5 s, with ack_wait 1 s
        assert worker.scheduler.waiting == 1
        assert worker.metrics.redeliveries.value == 0
        gates.opened.set()
        await eventually(jobs.all_settled)
        assert worker.metrics.redeliveries.value == 0
    assert gates.done == sent
    record = await jobs.record(sent[0])
    assert record is not None
    assert (record.state, record.attempt) == ("done", 1)


async def test_a_job_of_a_killed_worker_is_delivered_again_and_completed_once(jobs: JobKit, gates: Gates) -> None:
    """The worker vanishes without a word, as after kill -9; real processes are in test_kills.py."""
    lost = jobs.app(gates.handle).worker(worker_id="lost")
    await lost.start()
    (seq,) = await jobs.publish({"cost": 3})
    await eventually(lambda: gates.holding == [seq])
    assert lost._connection
    await lost._connection.close()

    attempts: list[int] = []

    async def handle(job: Job) -> None:
        async with job.slots(3):
            attempts.append(job.attempt)

    async with jobs.app(handle).running(worker_id="next"):
        await eventually(lambda: bool(attempts), 15)
        await eventually(jobs.all_settled)
    await lost.stop(drain=False)
    assert attempts == [2]
    record = await jobs.record(seq)
    assert record is not None
    assert (record.state, record.worker, record.attempt, record.crashes) == ("done", "next", 2, 1)
