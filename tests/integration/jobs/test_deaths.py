"""A part of a job worker meets an error that nobody has foreseen: jobs go on, and it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.integration.conftest import eventually
from tests.integration.jobs.kit import JobKit

from parti.config import Settings
from parti.core.consumer_config import ConsumerTuning, build_config
from parti.core.job_claims import Claimant, Start, Verdict
from parti.core.priority import PullOptions
from parti.core.retry import RetryPolicy
from parti.errors import RequestTimeout
from parti.jetstream.dead_letters import DeadLetterStream
from parti.jetstream.kv import Bucket
from parti.jetstream.priority import put_consumer
from parti.jetstream.vitals import Vitals
from parti.jetstream.wire import Wire
from parti.jobs import Job
from parti.jobs.board import JobBoard
from parti.jobs.calls import Calls
from parti.jobs.hand import Hand, HandPorts
from parti.jobs.job import Held
from parti.jobs.pulling import JobPull
from parti.jobs.scheduler import WeightedScheduler
from parti.model.message import Message, Ownership
from parti.model.partition import Partition

SOON_S = 15.0


def pull_into(jobs: JobKit, vitals: Vitals, wire: Wire, held: Callable[[], int], deliver: Any) -> JobPull:
    async def prepare() -> None:
        """The consumer is there."""

    return JobPull(
        jobs.kit.connection,
        wire,
        vitals.metrics,
        vitals.health,
        stream=jobs.stream,
        consumer=jobs.durable,
        batch=1,
        limit=1,
        timeout_s=0.5,
        options=PullOptions(),
        held=held,
        deliver=deliver,
        prepare=prepare,
    )


async def test_a_pull_that_dies_pulls_again(jobs: JobKit) -> None:
    """The room is asked for before each pull; twice, that fails."""
    await jobs.create_stream()
    vitals, taken = Vitals("w0"), list[bytes]()
    config = build_config(jobs.durable, [f"{jobs.prefix}.>"], ConsumerTuning(30.0, 10, 10, 0.0))
    await put_consumer(jobs.kit.connection, jobs.stream, config, action="create")
    odd: list[BaseException] = [RuntimeError("a mistake"), asyncio.CancelledError()]

    def held() -> int:
        if odd:
            raise odd.pop()
        return 0

    def deliver(subject: bytes, reply: bytes, header: bytes | None, payload: bytes) -> None:
        taken.append(payload)

    pull = pull_into(jobs, vitals, Wire(jobs.kit.connection.client), held, deliver)
    pull.start()
    try:
        await jobs.publish(1, 2)
        await eventually(lambda: len(taken) == 2, SOON_S)
        assert vitals.metrics.task_deaths.child("job-pull").value == 2
        assert "a mistake" in vitals.health.reasons["task-job-pull"], "it was well for no time at all"
    finally:
        await pull.stop()
    assert vitals.health.healthy


class Deaf(Wire):
    """A connection on which pulls get lost, and nothing else."""

    def write(self, data: bytes) -> bool:
        return b".MSG.NEXT." in data or super().write(data)


async def test_pulls_without_an_answer_are_no_progress(jobs: JobKit) -> None:
    """Each session asks for the consumer, which is answered: that must not look like an answer to a pull."""
    await jobs.create_stream()
    vitals = Vitals("w0")
    config = build_config(jobs.durable, [f"{jobs.prefix}.>"], ConsumerTuning(30.0, 10, 10, 0.0))
    await put_consumer(jobs.kit.connection, jobs.stream, config, action="create")
    pull = pull_into(jobs, vitals, Deaf(jobs.kit.connection.client), lambda: 0, lambda *_: None)
    pull.start()
    try:
        await eventually(lambda: pull.sign is not None)
        before = pull.sign
        missed = vitals.metrics.pull_missed_heartbeats
        await eventually(lambda: missed.value >= 2, SOON_S)
        assert pull.sign == before
    finally:
        await pull.stop()


async def test_a_record_that_cannot_be_written_keeps_no_job_from_being_acknowledged(jobs: JobKit) -> None:
    done: list[int] = []

    async def handle(job: Job) -> None:
        job.progress(50, "\ud800" if job.json["odd"] else "halfway")
        done.append(job.seq)

    async with jobs.app(handle).running():
        odd, plain = await jobs.publish({"odd": True}, {"odd": False})
        await eventually(lambda: set(done) == {odd, plain}, SOON_S)
        await eventually(jobs.all_settled, SOON_S)
    assert sorted(done) == [odd, plain], "acknowledged, not tried again"


class OddBoard(JobBoard):
    """A board that cannot make anything of one job."""

    odd = 1

    async def claim(self, held: Held, cancelled: Callable[[], bool]) -> Verdict:
        if held.seq == self.odd:
            raise RecursionError("nested too deeply")
        return await super().claim(held, cancelled)


def board_of(jobs: JobKit, vitals: Vitals, bucket: Bucket, kind: type[JobBoard] = JobBoard) -> JobBoard:
    return kind(
        jobs.kit.connection,
        jobs.kit.api,
        bucket,
        vitals.metrics,
        vitals.health,
        durable=jobs.durable,
        claimant=Claimant("this", 30.0, 3),
        replicas=1,
        keep_s=60.0,
        report_interval_s=60.0,
    )


async def test_a_job_that_can_never_be_claimed_is_dead_lettered_and_others_go_on(jobs: JobKit) -> None:
    """Tried five times, which takes 7.5 s; one place for jobs in hand is enough for the others."""
    await jobs.create_stream()
    kit, vitals, done = jobs.kit, Vitals("w0"), list[int]()
    config = build_config(jobs.durable, [f"{jobs.prefix}.>"], ConsumerTuning(30.0, 10, 10, 0.0))
    await put_consumer(kit.connection, jobs.stream, config, action="create")
    settings = Settings(**{k: v for k, v in jobs.settings.items() if k in Settings.model_fields})

    async def handle(job: Job) -> None:
        done.append(job.seq)

    bucket = await Bucket.open(kit.api, f"{jobs.prefix}-jobs", replicas=1)
    board = board_of(jobs, vitals, bucket, OddBoard)
    wire = Wire(kit.connection.client)
    letters = await DeadLetterStream.open(kit.api, vitals.health, settings, max_payload=1 << 20, omit_large=False)
    scheduler, calls = WeightedScheduler(1), Calls(handle, threads=1, timeout_s=None)
    ports = HandPorts(kit.connection, wire, board, calls, scheduler, letters, vitals.metrics, None, vitals.health)
    hand = Hand(
        ports,
        stream=jobs.stream,
        durable=jobs.durable,
        worker_id="w0",
        policy=RetryPolicy(3, (0.1,)),
        heartbeat_s=5.0,
    )
    pull = pull_into(jobs, vitals, wire, lambda: hand.count, hand.deliver)
    hand.on_room = pull.room_changed
    pull.start()
    try:
        sent = await jobs.publish({}, {}, {})
        await eventually(lambda: set(done) == set(sent[1:]), SOON_S)
        await eventually(jobs.all_settled, 3 * SOON_S)
        assert await jobs.letters() == 1
        assert vitals.metrics.task_deaths.child("job").value == 5
    finally:
        await pull.stop()
        await hand.stop()


class UnansweredBucket(Bucket):
    """The first writes get no answer."""

    unanswered = 0

    async def put(self, key: str, value: bytes, *, revision: int, ttl_s: float | None = None) -> int:
        if self.unanswered:
            self.unanswered -= 1
            raise RequestTimeout(f"no answer on {key!r} within 5 s")
        return await super().put(key, value, revision=revision, ttl_s=ttl_s)


@pytest.mark.parametrize(("unanswered", "signals"), [(1, 0), (2, 1), (4, 1)])
async def test_a_second_write_of_a_record_without_an_answer_is_told_until_there_is_one(
    jobs: JobKit, unanswered: int, signals: int
) -> None:
    vitals, seen = Vitals("w0"), list[str]()
    await Bucket.open(jobs.kit.api, f"{jobs.prefix}-jobs", replicas=1)
    bucket = UnansweredBucket(jobs.kit.api, f"{jobs.prefix}-jobs")
    bucket.unanswered = unanswered
    vitals.health.on_change(lambda health: seen.extend(health.reasons.values()))
    ownership = Ownership(Partition("p", "p", {}), jobs.stream, "w0")
    message = Message(jobs.subject, b"", 7, ownership, f"$JS.ACK.{jobs.stream}.c.1.7.1.1.0".encode(), None, 0.0)
    held = Held(Job(message, jobs.durable, WeightedScheduler(1)))
    assert await board_of(jobs, vitals, bucket).claim(held, lambda: False) == Start()
    assert len(seen) == signals
    assert all("no answer" in reason for reason in seen)
    assert vitals.health.healthy
