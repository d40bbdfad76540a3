"""`parti jobs ls`, `top`, `cancel` and `retry`, as an operator types them."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import subprocess
from pathlib import Path
from typing import Any

import pytest
import structlog
from tests.integration.commands import type_command
from tests.integration.conftest import eventually
from tests.integration.jobs.kit import Gates, JobKit
from tests.integration.processes import command, environment

from parti.cli import jobs as commands
from parti.jetstream.kv import Bucket
from parti.jobs import Job
from parti.model.job import record_key


class Operator:
    """Types commands; each runs in a thread, beside the workers of the test."""

    def __init__(self, jobs: JobKit, capsys: pytest.CaptureFixture[str]) -> None:
        self._jobs = jobs
        self._capsys = capsys

    async def types(self, *words: str, code: int = 0) -> str:
        place = ("--nats", self._jobs.kit.url, "--prefix", self._jobs.prefix)
        said = await type_command(self._capsys, "jobs", *words, *place)
        assert said.code == code, said
        return said.out if code != 2 else said.err

    async def reads(self, *words: str) -> Any:
        return json.loads(await self.types(*words, "--json"))


@pytest.fixture
def operator(jobs: JobKit, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Operator:
    for name in ("dead_letter_stream", "dead_letter_subject"):
        monkeypatch.setenv(f"PARTI_{name.upper()}", f"d{jobs.prefix}")
    return Operator(jobs, capsys)


async def test_jobs_are_listed_with_state_progress_and_worker(jobs: JobKit, operator: Operator) -> None:
    opened = asyncio.Event()

    async def handle(job: Job) -> None:
        if job.json["cost"] == 1:
            raise OSError("disk full")
        async with job.slots(job.json["cost"]):
            job.progress(42, "pass 1 of 2")
            await opened.wait()

    async with jobs.app(handle, attempts=1).running(worker_id="w1"):
        running, waiting, failed = await jobs.publish({"cost": 14}, {"cost": 14}, {"cost": 1})

        async def shown() -> bool:
            states = await jobs.states()
            record = await jobs.record(running)
            return states == {"running": 1, "waiting": 1, "failed": 1} and record is not None and record.percent == 42

        await eventually(shown)
        found = await operator.reads("ls")
        assert found["counts"] == {"running": 1, "waiting": 1, "failed": 1, "cancelled": 0, "done": 0}
        assert found["consumers"][0] | {"stream": ""} == {
            "stream": "",
            "consumer": jobs.durable,
            "pending": 0,
            "held": 2,
            "limit": 14,
        }
        by_seq = {job["seq"]: job for job in found["jobs"]}
        assert [by_seq[seq]["state"] for seq in (running, waiting, failed)] == ["running", "waiting", "failed"]
        one = by_seq[running]
        assert (one["percent"], one["phrase"], one["slots"], one["worker"]) == (42, "pass 1 of 2", 14, "w1")
        assert by_seq[failed]["error"] == "OSError: disk full"
        text = await operator.types("ls")
        assert "1 running, 1 waiting, 1 failed" in text
        assert "pass 1 of 2" in text
        assert "OSError: disk full" in text
        assert jobs.durable in await operator.types("ls", "--state", "failed")
        opened.set()
        await eventually(jobs.all_settled)
        assert len((await operator.reads("ls"))["jobs"]) == 1
        assert len((await operator.reads("ls", "--all"))["jobs"]) == 3


async def test_a_running_job_is_cancelled_and_one_that_has_ended_is_not(
    jobs: JobKit, operator: Operator, gates: Gates
) -> None:
    async with jobs.app(gates.handle).running():
        (seq,) = await jobs.publish({"cost": 1})
        await eventually(lambda: gates.holding == [seq])
        name = f"{jobs.durable}.{seq}"
        assert await operator.types("cancel", name) == f"Job {name} ended: cancelled.\n"
        assert "has ended already: cancelled" in await operator.types("cancel", str(seq), code=2)
        assert "stream" in await operator.types("cancel", "77", code=2)
        assert "is no id of a job" in await operator.types("cancel", "x", code=2)
        assert "there is no consumer 'nobody'" in await operator.types("cancel", "nobody.1", code=2)
        assert "only a failed job can be sent again" in await operator.types("retry", str(seq), code=2)


async def test_a_job_that_nobody_has_received_is_dropped_when_its_turn_comes(
    jobs: JobKit, operator: Operator, gates: Gates
) -> None:
    async with jobs.app(gates.handle).running():
        pass
    (seq,) = await jobs.publish({"cost": 1})
    assert "is dropped when its turn comes" in await operator.types("cancel", str(seq))
    async with jobs.app(gates.handle).running():
        await eventually(jobs.all_settled)
    assert gates.started == []
    assert await jobs.states() == {"cancelled": 1}


async def test_a_failed_job_is_sent_again_once_with_its_payload_and_headers(jobs: JobKit, operator: Operator) -> None:
    mended = False
    seen: list[tuple[int, bytes, dict[str, str]]] = []

    async def handle(job: Job) -> None:
        seen.append((job.seq, job.data, dict(job.headers)))
        if not mended:
            raise OSError("disk full")

    async with jobs.app(handle, attempts=1).running():
        await jobs.kit.api.publish(jobs.subject, b'{"a":1}', headers={"Trace": "t1"})
        await eventually(jobs.all_settled)
        mended = True
        assert await operator.reads("retry", "1") == {"id": f"{jobs.durable}.1", "retried_as": f"{jobs.durable}.2"}
        await eventually(lambda: len(seen) == 2)
        await eventually(jobs.all_settled)
        assert "was sent again before" in await operator.types("retry", "1", code=2)
        assert "there is no record of job" in await operator.types("retry", "9", code=2)
    (_, data, headers), (again, data_again, headers_again) = seen
    assert (again, data_again) == (2, data)
    assert headers == {"Trace": "t1"}
    assert headers_again["Trace"] == "t1"
    assert headers_again["Parti-Retry-Of"] == f"{jobs.durable}.1"
    assert not any(name in headers_again for name in ("Parti-Error", "Parti-Sequence"))


async def test_without_a_worker_ever_it_says_so(jobs: JobKit, operator: Operator) -> None:
    assert "no job worker has ever run here" in await operator.types("ls", code=2)


async def test_top_shows_bars_on_a_terminal(jobs: JobKit, gates: Gates, tmp_path: Path) -> None:
    async with jobs.app(gates.handle).running():
        await jobs.publish({"cost": 14}, {"cost": 1})
        await eventually(lambda: len(gates.started) == 2)
        ours, theirs = pty.openpty()
        process = subprocess.Popen(  # noqa: ASYNC220 - it starts in no time
            command("jobs", "top", "--nats", jobs.kit.url, "--prefix", jobs.prefix),
            cwd=tmp_path,
            env=environment(TERM="xterm", COLUMNS="140", LINES="30"),
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        seen = b""
        try:
            while b"waiting" not in seen or f"{jobs.durable}.2".encode() not in seen:
                seen += await asyncio.to_thread(os.read, ours, 65536)
        finally:
            process.send_signal(2)
            code = await asyncio.to_thread(_drain, process, ours)
            os.close(ours)
        assert code == 0
        assert "━".encode() in seen
        gates.opened.set()
        await eventually(jobs.all_settled)


def _drain(process: subprocess.Popen[bytes], terminal: int) -> int:
    try:
        while os.read(terminal, 65536):
            pass
    except OSError:
        pass  # the other side is closed
    return process.wait(10)


async def test_records_that_cannot_be_read_stop_neither_jobs_nor_those_who_look(
    jobs: JobKit, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The commands run in the process of the worker, whose log is looked at.
    monkeypatch.setattr(commands, "configure_logging", lambda *arguments: None)
    opened = asyncio.Event()
    odd = (
        b'{"kind":"\xff"}',
        b"[" * 100_000,
        b'{"stream":"S","seq":4}',
        b'{"kind":"job","seq":' + b"9" * 5000 + b"}",
        b'{"kind":"job","stream":"S","seq":5,"subject":"s","published_ns":5,"state":"running","received_s":1e13}',
    )

    async def handle(job: Job) -> None:
        await opened.wait()

    with structlog.testing.capture_logs() as lines:
        async with jobs.app(handle).running(worker_id="w1"):
            sent = await jobs.publish({}, {}, {}, {}, {})
            await eventually(lambda: has_states(jobs, running=5))
            bucket = Bucket(jobs.kit.api, f"{jobs.prefix}-jobs")
            for seq, value in zip(sent, odd, strict=True):
                found = await jobs.entry(seq)
                assert found
                await bucket.put(record_key(jobs.durable, seq), value, revision=found.revision)
            await bucket.put(f"jobs.{jobs.durable}.nonsense", odd[0], revision=0)
            for view in (("ls",), ("ls", "--all"), ("ls", "--json")):
                await operator.types(*view)
            opened.set()
            await eventually(jobs.all_settled)
            await eventually(lambda: has_states(jobs, done=5))
    told = [line["key"] for line in lines if "is unreadable" in line["event"]]
    assert sorted(told) == sorted(record_key(jobs.durable, seq) for seq in sent)


async def has_states(jobs: JobKit, **wanted: int) -> bool:
    return await jobs.states() == wanted
