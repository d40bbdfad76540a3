"""Jobs that used to be settled never: subjects that are no UTF-8 text, exceptions with lone surrogates."""

from __future__ import annotations

import time
from collections.abc import Iterator, MutableMapping
from decimal import Decimal
from typing import Any, TypeAlias

import pytest
import structlog
from tests.integration.conftest import eventually
from tests.integration.hostile import ESCAPES, raw_publisher
from tests.integration.jobs.kit import JobKit

import parti
from parti.errors import ConfigError
from parti.jetstream.letters import Letters
from parti.jobs import Job
from parti.jobs.desk import JobDesk
from parti.model.job import JobState

SOON_S = 10.0
Lines: TypeAlias = list[MutableMapping[str, Any]]


@pytest.fixture
def lines() -> Iterator[Lines]:
    """Every line that is logged."""
    with structlog.testing.capture_logs() as captured:
        yield captured


async def test_jobs_whose_subjects_are_no_text_are_done_like_others(jobs: JobKit, lines: Lines) -> None:
    done: list[bytes] = []

    async def handle(job: Job) -> None:
        if job.data == b"bad":
            raise ValueError(f"cannot do {job.subject}")
        done.append(job.data)

    async with jobs.app(handle, attempts=1).running() as worker, raw_publisher(jobs.kit.url) as publisher:
        for number in range(17):
            # More than the places of the consumer.
            await publisher.pub(f"{jobs.prefix}.".encode() + bytes([0xF0 + number % 8, 0xFF]), b"odd %d" % number)
        await publisher.pub(f"{jobs.prefix}.\ud7ff".encode() + b"\xff", b"bad")
        (last,) = await jobs.publish({"n": 1})
        await eventually(lambda: len(done) == 18, SOON_S)
        await eventually(jobs.all_settled, SOON_S)
        assert worker.health.healthy, dict(worker.health.reasons)
    assert {f"odd {n}".encode() for n in range(17)} < set(done)
    assert await jobs.states() == {JobState.DONE: 18, JobState.FAILED: 1}
    failed = [line for line in lines if line["event"] == "job failed for good, dead-lettered"]
    assert [line["subject"] for line in failed] == [f"{jobs.prefix}.\ud7ff\\xff"]
    record = await jobs.record(last - 1)
    assert record is not None
    assert (record.subject, record.error) == (failed[0]["subject"], f"ValueError: cannot do {failed[0]['subject']}")
    letters = await Letters.open(jobs.kit.connection, jobs.kit.api, f"d{jobs.prefix}")
    (letter,) = [each async for each in letters.all()]
    assert letter.cut == {"subject"}
    desk = JobDesk(jobs.kit.connection, jobs.prefix)
    durable, seq, entry = await desk.find(str(last - 1), jobs.durable)
    with pytest.raises(ConfigError, match="is no UTF-8 text or too long to be sent again"):
        await desk.retry(durable, seq, entry, letters.name)


async def test_an_exception_with_a_lone_surrogate_does_not_keep_a_job_from_being_settled(jobs: JobKit) -> None:
    tries: list[int] = []

    async def handle(job: Job) -> None:
        tries.append(job.attempt)
        job.progress(10, "at \ud800" + ESCAPES)
        raise ValueError("no such customer: \ud800" + ESCAPES)

    async with jobs.app(handle, attempts=2).running() as worker:
        (seq,) = await jobs.publish({"n": 1})
        await eventually(jobs.all_settled, SOON_S)
        assert worker.health.healthy, dict(worker.health.reasons)
    record = await jobs.record(seq)
    assert record is not None
    assert (record.state, tries) == (JobState.FAILED, [1, 2])
    assert record.error.startswith("ValueError: no such customer: \\ud800\\x1b[2J")
    assert record.phrase.startswith("at \\ud800\\x1b[2J")
    assert await jobs.letters() == 1


DECIMAL: Any = Decimal("0.05")


class BareRetry(parti.Retry):
    def __init__(self) -> None:
        """Without a call of the base class."""


@pytest.mark.parametrize("error", [BareRetry(), parti.Retry(DECIMAL)], ids=["bare", "Decimal"])
async def test_a_job_that_asks_for_an_odd_delay_is_tried_as_often_as_any_other(
    jobs: JobKit, error: parti.Retry
) -> None:
    tries: list[int] = []

    async def handle(job: Job) -> None:
        tries.append(job.attempt)
        raise error

    async with jobs.app(handle, attempts=2).running() as worker:
        (seq,) = await jobs.publish({"n": 1})
        await eventually(jobs.all_settled, SOON_S)
        assert worker.health.healthy, dict(worker.health.reasons)
    record = await jobs.record(seq)
    assert record is not None
    assert (record.state, record.failures, tries) == (JobState.FAILED, 2, [1, 2])
    assert await jobs.letters() == 1


async def test_a_job_that_asks_for_an_endless_delay_waits_for_a_day(jobs: JobKit) -> None:
    async def handle(job: Job) -> None:
        raise parti.Retry(10**400)

    async with jobs.app(handle, attempts=2).running() as worker:
        (seq,) = await jobs.publish({"n": 1})

        async def waits() -> bool:
            record = await jobs.record(seq)
            return record is not None and record.failures == 1 and worker.held == 0

        await eventually(waits, SOON_S)
        record = await jobs.record(seq)
        assert record is not None
        assert record.state is JobState.WAITING
        assert time.time() + 2_591_000 < record.next_s <= time.time() + 2_592_000
        assert worker.health.healthy, dict(worker.health.reasons)


async def test_a_failed_job_with_a_large_payload_is_sent_again_from_its_original(jobs: JobKit) -> None:
    seen: list[int] = []

    async def handle(job: Job) -> None:
        seen.append(len(job.data))
        if "Parti-Retry-Of" not in job.headers:
            raise ValueError("not the first time")

    data = b"d" * (jobs.kit.connection.max_payload - 1_000)
    async with jobs.app(handle, attempts=1).running():
        seq = await jobs.kit.api.publish(jobs.subject, data, headers={"Trace": "t"})
        await eventually(jobs.all_settled, SOON_S)
        letters = await Letters.open(jobs.kit.connection, jobs.kit.api, f"d{jobs.prefix}")
        (letter,) = [each async for each in letters.all()]
        # The stream of jobs has forgotten it, so it lies beside its letter.
        assert letter.cut == {"payload"}
        assert letter.original is not None
        desk = JobDesk(jobs.kit.connection, jobs.prefix)
        await desk.retry(*await desk.find(str(seq), jobs.durable), letters.name)
        await eventually(lambda: len(seen) == 2, SOON_S)
        await eventually(jobs.all_settled, SOON_S)
    assert seen == [len(data), len(data)]
