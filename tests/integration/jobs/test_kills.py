"""Real processes, killed: every job is completed, and only what was running is repeated."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import pytest
from tests.integration.conftest import eventually
from tests.integration.jobs.kit import JobKit
from tests.integration.jobs.processes import WORK, JobProcess, write_app

from parti.model.job import JobState


async def test_kill_9_in_the_middle_of_a_job_and_a_restart_completes_it_once(jobs: JobKit, tmp_path: Path) -> None:
    target = write_app(tmp_path, jobs)
    await jobs.create_stream()
    (seq,) = await jobs.publish({"cost": 64, "seconds": 0.5})
    with JobProcess(tmp_path, target, jobs.kit.url) as first:
        await eventually(lambda: first.seqs("start") == [seq])
        first.kill()
    with JobProcess(tmp_path, target, jobs.kit.url) as second:
        await eventually(lambda: second.seqs("done") == [seq], 20)
        await eventually(jobs.all_settled)
        assert second.terminate() == 0
        assert second.seqs("start") == [seq, seq]
        assert [attempt for word, _, attempt, _ in second.journal if word == "done"] == [2]
    assert await jobs.states() == {"done": 1}


async def test_sigterm_finishes_what_runs_gives_back_what_waits_and_exits_with_0(
    jobs: JobKit, tmp_path: Path
) -> None:
    target = write_app(tmp_path, jobs, ack_wait_minutes=1)
    await jobs.create_stream()
    running, waiting = await jobs.publish({"cost": 14, "seconds": 1}, {"cost": 1})
    with JobProcess(tmp_path, target, jobs.kit.url) as first:
        await eventually(lambda: (first.seqs("start"), first.seqs("work")) == ([running, waiting], [running]))
        assert await asyncio.to_thread(first.terminate) == 0
        assert first.seqs("done") == [running]
    with JobProcess(tmp_path, target, jobs.kit.url) as second:
        await eventually(lambda: second.seqs("done") == [running, waiting])
        await eventually(jobs.all_settled)
        assert second.terminate() == 0


async def test_a_plain_function_that_does_not_end_does_not_hold_up_the_exit(jobs: JobKit, tmp_path: Path) -> None:
    target = write_app(tmp_path, jobs, plain=True, body="time.sleep(60)", drain_timeout_s=0.2)
    await jobs.create_stream()
    (seq,) = await jobs.publish({})
    with JobProcess(tmp_path, target, jobs.kit.url) as worker:
        await eventually(lambda: worker.seqs("start") == [seq])
        assert await asyncio.to_thread(worker.terminate) == 1
    record = await jobs.record(seq)
    assert record is not None
    assert (record.state, record.worker) == (JobState.WAITING, "")


async def test_a_job_that_kills_its_process_ends_as_a_dead_letter_and_its_neighbours_do_not(
    jobs: JobKit, tmp_path: Path
) -> None:
    body = "os.abort() if job.json['bad'] else None; await asyncio.sleep(0.3)"
    target = write_app(
        tmp_path, jobs, body=body, ack_wait_minutes=1 / 60, heartbeat_interval_s=0.1, job_crash_limit=2
    )
    await jobs.create_stream()
    bad, *good = await jobs.publish({"bad": True}, *[{"bad": False}] * 4)

    async def finished() -> bool:
        return await jobs.states() == {"failed": 1, "done": 4}

    for _ in range(8):
        with JobProcess(tmp_path, target, jobs.kit.url) as worker:
            ending = asyncio.create_task(asyncio.to_thread(worker.process.wait))
            for _ in range(600):
                if ending.done() or await finished():
                    break
                await asyncio.sleep(0.02)
            worker.kill()
            await ending
        if await finished():
            break
    assert await finished()
    record = await jobs.record(bad)
    assert record is not None
    assert "died 2 times while it ran" in record.error
    assert await jobs.letters() == 1
    assert sorted(set(worker.seqs("done"))) == sorted(good)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kills", [2, pytest.param(4, marks=pytest.mark.slow)])
async def test_short_jobs_under_several_kills_are_all_completed_and_only_running_ones_repeated(
    jobs: JobKit, tmp_path: Path, kills: int
) -> None:
    """The small version of benchmarks/jobs_kills.py."""
    chance = random.Random(7)
    target = write_app(tmp_path, jobs, body=WORK, ack_wait_minutes=1 / 60, workers=2)
    await jobs.create_stream()
    work = [{"cost": chance.choice([1, 2, 4, 16]), "seconds": chance.uniform(0, 0.05)} for _ in range(200)]
    sent = await jobs.publish_many(work)
    cut: set[int] = set()
    workers = [JobProcess(tmp_path, target, jobs.kit.url) for _ in range(2)]
    try:
        for number in range(kills):
            goal = 25 * (number + 1)
            await eventually(lambda goal=goal: len(workers[0].seqs("done")) >= goal, 30)  # type: ignore[misc]
            victim = workers.pop(0)
            victim.kill()
            mine = {seq for _, seq, _, pid in victim.journal if pid == victim.process.pid}
            records = {seq: await jobs.record(seq) for seq in mine}
            cut |= {seq for seq, record in records.items() if record is None or not record.state.final}
            workers.append(JobProcess(tmp_path, target, jobs.kit.url))
        await eventually(jobs.all_settled, 60)
        started = workers[0].seqs("start")
        done = workers[0].seqs("done")
        for worker in workers:
            # One that has just been started may not have come to listen to signals yet.
            assert await asyncio.to_thread(worker.terminate) in {0, -signal.SIGTERM}
    finally:
        for worker in workers:
            worker.__exit__(None, None, None)
    assert set(done) == set(sent)
    repeated = {seq for seq in started if started.count(seq) > 1}
    assert repeated <= cut
    assert await jobs.states() == {"done": 200}
