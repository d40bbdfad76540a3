"""A job worker: failures, dead letters, cancelling, draining, deliveries that come twice, servers that go away."""

from __future__ import annotations

import asyncio
import base64
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from tests.integration.conftest import eventually, open_kit
from tests.integration.jobs.kit import Gates, JobKit

import parti
from parti.embedded import Server
from parti.errors import ConfigError, SubjectMismatch
from parti.jobs import Job, JobWorker
from parti.model.headers import parse_headers
from parti.model.job import JobState


async def letter_headers(jobs: JobKit, seq: int) -> dict[str, str]:
    answer = await jobs.kit.api.call(f"STREAM.MSG.GET.d{jobs.prefix}", {"seq": seq})
    return parse_headers(base64.b64decode(answer["message"]["hdrs"]))


async def state_of(jobs: JobKit, seq: int) -> JobState | None:
    record = await jobs.record(seq)
    return record.state if record else None


def becomes(jobs: JobKit, seq: int, state: JobState) -> Callable[[], Any]:
    async def reached() -> bool:
        return await state_of(jobs, seq) is state

    return reached


# ── failures ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_job_that_fails_is_tried_again_with_backoff_and_succeeds(jobs: JobKit) -> None:
    tries: list[tuple[int, float]] = []

    async def handle(job: Job) -> None:
        tries.append((job.attempt, time.monotonic()))
        async with job.slots(3):
            if job.attempt < 3:
                raise OSError("disk full")

    async with jobs.app(handle, backoff_s=(0.2,)).running() as worker:
        (seq,) = await jobs.publish({"n": 1})
        await eventually(jobs.all_settled)
        assert worker.scheduler.current_usage == 0
        assert worker.metrics.jobs_ended.child("retry").value == 2
    assert [attempt for attempt, _ in tries] == [1, 2, 3]
    assert all(later[1] - earlier[1] >= 0.19 for earlier, later in pairwise(tries))
    record = await jobs.record(seq)
    assert record is not None
    assert (record.state, record.attempt, record.failures, record.percent) == ("done", 3, 2, 100)


async def test_a_job_that_always_fails_becomes_a_dead_letter_with_the_reason_and_others_go_on(jobs: JobKit) -> None:
    done: list[int] = []

    async def handle(job: Job) -> None:
        async with job.slots(14):
            if job.json["bad"]:
                raise ValueError("no video stream in it")
            done.append(job.seq)

    async with jobs.app(handle, attempts=2).running() as worker:
        bad, good = await jobs.publish({"bad": True}, {"bad": False})
        await eventually(becomes(jobs, bad, JobState.FAILED))
        await eventually(jobs.all_settled)
        assert worker.scheduler.current_usage == 0
    assert done == [good]
    record = await jobs.record(bad)
    assert record is not None
    assert (record.error, record.failures, record.dead_letter) == ("ValueError: no video stream in it", 2, 1)
    headers = await letter_headers(jobs, 1)
    assert headers["Parti-Error"] == "ValueError: no video stream in it"
    assert (headers["Parti-Sequence"], headers["Parti-Attempts"]) == (str(bad), "2")


async def test_what_is_no_json_and_what_is_rejected_is_dead_lettered_at_once(jobs: JobKit) -> None:
    calls: list[int] = []

    async def handle(job: Job) -> None:
        calls.append(job.seq)
        if not job.records[0]["good"]:
            raise parti.Reject("too large")

    async with jobs.app(handle).running():
        await jobs.kit.api.publish(jobs.subject, b"\xffnot json")
        await jobs.publish({"Records": [{"good": False}]}, [{"good": True}, {"good": True}])
        await jobs.kit.api.publish(jobs.subject, b"[" * 100_000)
        await eventually(jobs.all_settled)
    assert calls == [1, 2, 3, 4]
    assert await jobs.states() == {"failed": 3, "done": 1}
    letters = [await letter_headers(jobs, number) for number in (1, 2, 3)]
    reasons = {headers["Parti-Sequence"]: headers["Parti-Error"] for headers in letters}
    assert "is no JSON" in reasons["1"]
    assert reasons["2"] == "too large"
    assert "is no JSON" in reasons["4"]


async def test_a_handler_that_takes_too_long_has_failed(jobs: JobKit) -> None:
    async def handle(job: Job) -> None:
        async with job.slots(1):
            await asyncio.sleep(60)

    async with jobs.app(handle, attempts=1, handler_timeout_s=0.05).running() as worker:
        (seq,) = await jobs.publish({})
        await eventually(becomes(jobs, seq, JobState.FAILED))
        assert worker.scheduler.current_usage == 0
    record = await jobs.record(seq)
    assert record is not None
    assert "HandlerTimeout" in record.error


async def test_a_handler_that_raises_cancellederror_by_itself_has_failed_and_is_not_repeated_for_ever(
    jobs: JobKit,
) -> None:
    async def handle(job: Job) -> None:
        raise asyncio.CancelledError

    async with jobs.app(handle, attempts=2).running():
        (seq,) = await jobs.publish({})
        await eventually(becomes(jobs, seq, JobState.FAILED))


# ── plain functions ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_plain_functions_run_in_a_few_threads_and_share_the_slots(jobs: JobKit) -> None:
    names: set[str] = set()
    most, running, lock = 0, 0, threading.Lock()

    def handle(job: Job) -> None:
        nonlocal most, running
        with job.slots_sync(job.json["cost"]) as slots:
            with lock:
                running += slots
                most = max(most, running)
                names.add(threading.current_thread().name)
            job.progress(50, "half")
            time.sleep(0.002)
            with lock:
                running -= slots

    async with jobs.app(handle, max_capacity=4, fetch_batch_size=2).running() as worker:
        await jobs.publish_many([{"cost": 1 + n % 5} for n in range(60)])
        await eventually(jobs.all_settled, 20)
        assert worker.scheduler.current_usage == 0
    assert most <= 4
    assert 1 <= len(names) <= 4
    assert await jobs.states() == {"done": 60}


async def test_a_plain_function_may_raise_anything(jobs: JobKit) -> None:
    def handle(job: Job) -> None:
        raise {"stop": StopIteration, "exit": SystemExit, "key": KeyError}[job.json["raise"]]("oops")

    async with jobs.app(handle, attempts=1).running():
        await jobs.publish({"raise": "stop"}, {"raise": "exit"}, {"raise": "key"})
        await eventually(jobs.all_settled)
    assert await jobs.states() == {"failed": 3}


# ── cancelling ────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_job_is_cancelled_while_it_runs_waits_or_is_still_on_the_server(jobs: JobKit, gates: Gates) -> None:
    app = jobs.app(gates.handle, max_capacity=2, fetch_batch_size=1)
    desk = parti.jobs.desk.JobDesk(jobs.kit.connection, jobs.prefix)
    async with app.running() as worker:
        running, waiting, pending = await jobs.publish({"cost": 2}, {"cost": 1}, {"cost": 1})
        await eventually(lambda: worker.scheduler.waiting == 1)
        assert await desk.cancel(jobs.durable, pending, None) is None
        for seq in (waiting, running):
            await desk.cancel(jobs.durable, seq, await jobs.entry(seq))
            ended = await desk.wait_final(jobs.durable, seq, 10)
            assert ended is not None
            assert ended.state is JobState.CANCELLED
        await eventually(becomes(jobs, pending, JobState.CANCELLED))
        assert worker.scheduler.current_usage == worker.scheduler.waiting == 0
        await eventually(jobs.all_settled)
        with pytest.raises(ConfigError, match="has ended already: cancelled; there is nothing to cancel"):
            await desk.cancel(jobs.durable, running, await jobs.entry(running))
        with pytest.raises(ConfigError, match="has no message 99"):
            await desk.cancel(jobs.durable, 99, None)
    assert gates.started == [running, waiting]
    assert gates.done == []
    assert await jobs.letters() == 0


async def test_a_plain_function_sees_that_it_is_cancelled(jobs: JobKit) -> None:
    entered = threading.Event()

    def handle(job: Job) -> None:
        with job.slots_sync(1):
            entered.set()
            while not job.cancelled:
                time.sleep(0.005)
            raise RuntimeError("stopped half way")

    desk = parti.jobs.desk.JobDesk(jobs.kit.connection, jobs.prefix)
    async with jobs.app(handle).running():
        (seq,) = await jobs.publish({})
        await eventually(entered.is_set)
        await desk.cancel(jobs.durable, seq, await jobs.entry(seq))
        await eventually(becomes(jobs, seq, JobState.CANCELLED))


# ── leaving ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_worker_that_leaves_finishes_what_runs_and_gives_the_rest_back_at_once(
    jobs: JobKit, gates: Gates
) -> None:
    worker = jobs.app(gates.handle, ack_wait_minutes=1, heartbeat_interval_s=0.5).worker()
    await worker.start()
    running, waiting = await jobs.publish({"cost": 14}, {"cost": 1})
    await eventually(lambda: worker.scheduler.waiting == 1)
    leaving = asyncio.create_task(worker.stop())
    other = Gates()
    other.opened.set()
    async with jobs.app(other.handle, ack_wait_minutes=1, heartbeat_interval_s=0.5, workers=2).running():
        await eventually(lambda: other.done == [waiting])  # at once, not after ack_wait
        assert not leaving.done()
        gates.opened.set()
        assert await leaving
        await eventually(jobs.all_settled)
    assert gates.done == [running]
    assert other.started == [waiting]
    record = await jobs.record(waiting)
    assert record is not None
    assert (record.attempt, record.failures, record.crashes) == (1, 0, 0)  # being given back is no failure


async def test_what_runs_too_long_for_a_drain_is_interrupted_and_given_back(jobs: JobKit, gates: Gates) -> None:
    worker = jobs.app(gates.handle, drain_timeout_s=0.1, ack_wait_minutes=1).worker()
    await worker.start()
    (seq,) = await jobs.publish({"cost": 3})
    await eventually(lambda: gates.holding == [seq])
    assert not await worker.stop()
    assert worker.scheduler.current_usage == 0
    gates.opened.set()
    async with jobs.app(gates.handle, ack_wait_minutes=1).running():
        await eventually(lambda: gates.done == [seq])
        await eventually(jobs.all_settled)


def _has_finished(worker: JobWorker, number: int) -> bool:
    return worker.finished >= number


async def test_a_worker_that_leaves_while_jobs_stream_in_loses_none_of_them(jobs: JobKit) -> None:
    done: list[int] = []

    async def handle(job: Job) -> None:
        async with job.slots(1):
            await asyncio.sleep(0.001)
            done.append(job.seq)

    app = jobs.app(handle, ack_wait_minutes=1, heartbeat_interval_s=0.5)
    await jobs.create_stream()
    sent = await jobs.publish_many([{}] * 300)
    for _ in range(6):
        async with app.running() as worker:
            await eventually(partial(_has_finished, worker, 20))
    async with app.running():
        await eventually(jobs.all_settled, 20)  # nothing is missing for the length of ack_wait, a minute here
    assert sorted(done) == sorted(sent)


# ── deliveries and servers ────────────────────────────────────────────────────────────────────────────────────────


async def test_no_more_jobs_are_held_than_there_are_slots(jobs: JobKit, gates: Gates) -> None:
    await jobs.create_stream()
    await jobs.publish_many([{"cost": 1}] * 30)
    app = jobs.app(gates.handle, max_capacity=3, fetch_batch_size=2, workers=4)
    async with app.running() as one, app.running() as two:
        await eventually(lambda: one.held == two.held == 3)
        assert await jobs.held_by_server() == 6
        gates.opened.set()
        await eventually(jobs.all_settled, 20)
    assert len(gates.done) == 30


async def test_a_delivery_of_a_job_that_runs_here_is_recognised(jobs: JobKit, gates: Gates) -> None:
    async with jobs.app(gates.handle).running() as worker:
        (seq,) = await jobs.publish({"cost": 1})
        await eventually(lambda: gates.holding == [seq])
        held = worker._hand._held[seq]  # type: ignore[union-attr]
        # As if somebody had given it back, or the server had forgotten that it was delivered.
        await jobs.kit.connection.request(held.reply.decode(), b"-NAK")
        await eventually(lambda: worker.metrics.jobs_recognised.value == 1)
        gates.opened.set()
        await eventually(jobs.all_settled)
        assert held.reply.split(b".")[4] == b"2"  # it was the newest delivery that was acknowledged
    assert gates.started == gates.done == [seq]


async def test_a_delivery_of_a_job_that_runs_elsewhere_is_left_to_that_worker(jobs: JobKit, gates: Gates) -> None:
    other = Gates()
    other.opened.set()
    async with jobs.app(gates.handle, max_capacity=1, fetch_batch_size=1).running(worker_id="one", workers=2) as one:
        (seq,) = await jobs.publish({"cost": 1})
        await eventually(lambda: gates.holding == [seq])
        async with jobs.app(other.handle).running(worker_id="two") as two:
            reply = one._hand._held[seq].reply  # type: ignore[union-attr]
            await jobs.kit.connection.request(reply.decode(), b"-NAK")
            await eventually(lambda: two.metrics.jobs_ended.child("elsewhere").value >= 1)
            gates.opened.set()
            await eventually(jobs.all_settled)
    assert other.started == []
    assert gates.done == [seq]
    assert await jobs.states() == {"done": 1}


async def test_a_job_whose_acknowledgement_was_lost_is_not_done_again(jobs: JobKit, gates: Gates) -> None:
    """It was done, and the record says so, but the process died before the server heard of it."""
    gates.opened.set()
    worker = jobs.app(gates.handle).worker()
    await worker.start()
    asked = asyncio.Event()

    async def never(*_: object, **__: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    worker._hand._settle = never  # type: ignore[union-attr, method-assign]
    (seq,) = await jobs.publish({"cost": 1})
    await asked.wait()
    assert worker._connection
    await worker._connection.close()
    other = Gates()
    async with jobs.app(other.handle).running() as next_one:
        await eventually(jobs.all_settled, 15)
        assert next_one.metrics.jobs_ended.child("repeated").value == 1
    await worker.stop(drain=False)
    assert gates.done == [seq]
    assert other.started == []


@pytest.mark.parametrize("how", ["restart", "kill"])
async def test_a_restarted_server_neither_loses_nor_doubles_a_running_job(
    nats_server_factory: Callable[..., Server], gates: Gates, how: str, no_settings_of_this_machine: None
) -> None:
    server = nats_server_factory()
    kit = await open_kit(server, "RESTART")
    jobs = JobKit(kit)
    app = jobs.app(gates.handle, ack_wait_minutes=3 / 60, heartbeat_interval_s=0.2)
    async with app.running() as worker:
        sent = await jobs.publish(*[{"cost": 2}] * 9)
        await eventually(lambda: len(gates.holding) == 7)
        for _ in range(2):
            if how == "kill":
                await server.kill()
                await server.start()
            else:
                await server.restart()
            await eventually(lambda: worker.health.healthy, 20)
        gates.opened.set()
        sent += await jobs.publish(*[{"cost": 2}] * 5)
        await eventually(jobs.all_settled, 20)
        assert worker.scheduler.current_usage == 0
    assert sorted(gates.started) == sorted(gates.done) == sorted(sent)
    await kit.connection.close()


async def test_a_deleted_consumer_and_a_deleted_bucket_are_made_anew(jobs: JobKit, gates: Gates) -> None:
    gates.opened.set()
    async with jobs.app(gates.handle).running():
        await jobs.publish({"cost": 1})
        await eventually(lambda: len(gates.done) == 1)
        await eventually(jobs.all_settled)
        await jobs.kit.api.delete_consumer(jobs.stream, jobs.durable)
        await jobs.kit.api.call(f"STREAM.DELETE.KV_{jobs.prefix}-jobs")
        await jobs.publish({"cost": 1})
        await eventually(lambda: len(gates.done) == 2)
        await eventually(jobs.all_settled)


async def answer_writes(jobs: JobKit, answered: bool) -> None:
    """Have the bucket of records confirm what it stores, or not: without a leader, clients wait in the same way."""
    stream = f"KV_{jobs.prefix}-jobs"
    config = await jobs.kit.api.stream_config(stream)
    await jobs.kit.api.call(f"STREAM.UPDATE.{stream}", {**config, "no_ack": not answered})


async def test_jobs_that_cannot_be_claimed_are_a_stall_and_go_on_when_they_can(jobs: JobKit, gates: Gates) -> None:
    gates.opened.set()
    told, left = list[str](), threading.Event()
    worker = jobs.app(gates.handle, max_capacity=2, fetch_batch_size=1, stall_after_s=1.0).worker()

    def leave(reason: str) -> None:
        told.append(reason)
        left.set()

    worker.on_stalled = leave
    await worker.start()
    try:
        await answer_writes(jobs, False)
        sent = await jobs.publish(*[{"cost": 1}] * 4)
        assert await asyncio.to_thread(left.wait, 15)
        assert f"messages of consumer {jobs.durable} wait and may be started, and none was" in told[0]
        assert "stall" in worker.health.reasons
        assert gates.started == []
        await answer_writes(jobs, True)
        await eventually(jobs.all_settled, 20)
    finally:
        await worker.stop()
    assert sorted(gates.done) == sent


async def test_a_job_that_takes_long_is_no_stall(jobs: JobKit, gates: Gates) -> None:
    """Neither while it waits for slots that another one has, nor with all places taken."""
    async with jobs.app(gates.handle, max_capacity=2, fetch_batch_size=1, stall_after_s=0.5).running() as worker:
        await jobs.publish(*[{"cost": 2}] * 2)
        await eventually(lambda: len(gates.started) == 2)
        heartbeats = worker.metrics.jobs_heartbeats
        await eventually(lambda: heartbeats.value >= 50)  # 2.5 s
        assert worker.metrics.stalls.child("handlers").value == 0
        gates.opened.set()
        await eventually(jobs.all_settled)


# ── what is refused at the start ──────────────────────────────────────────────────────────────────────────────────


async def refusal(worker: JobWorker) -> Exception:
    with pytest.raises(parti.PartiError) as caught:
        await worker.start()
    return caught.value


async def test_streams_and_consumers_that_do_not_fit_are_refused_and_left_alone(jobs: JobKit, gates: Gates) -> None:
    await jobs.create_stream(subjects=[f"{jobs.prefix}.other"], retention="limits")
    error = await refusal(jobs.app(gates.handle).worker())
    assert isinstance(error, SubjectMismatch)
    assert f"which takes {jobs.prefix}.other" in str(error)
    await jobs.kit.api.call(f"STREAM.DELETE.{jobs.stream}")
    await jobs.create_stream(retention="limits")
    config = {"name": jobs.durable, "durable_name": jobs.durable, "ack_policy": "explicit"}
    await jobs.kit.api.put_consumer(jobs.stream, {**config, "filter_subject": f"{jobs.prefix}.some"}, action="create")
    assert "reads j" in str(error := await refusal(jobs.app(gates.handle).worker()))
    assert "give these jobs another durable" in str(error)
    push = {**config, "name": "pushed", "durable_name": "pushed", "deliver_subject": "x", "ack_policy": "none"}
    await jobs.kit.api.put_consumer(jobs.stream, {**push, "filter_subject": f"{jobs.prefix}.>"}, action="create")
    assert "no pull consumer" in str(await refusal(jobs.app(gates.handle, durable="pushed").worker()))


async def test_a_changed_setting_changes_the_consumer(jobs: JobKit, gates: Gates) -> None:
    async with jobs.app(gates.handle).running():
        pass
    async with jobs.app(gates.handle, max_capacity=6, workers=3).running():
        info = await jobs.kit.api.consumer_info(jobs.stream, jobs.durable)
    assert (info.config["max_ack_pending"], info.config["ack_wait"]) == (18, 2_000_000_000)
