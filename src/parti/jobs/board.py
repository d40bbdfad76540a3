"""The records of jobs in their bucket: claimed before a job starts, and final before it is acknowledged.

Few writes: one when a job is claimed and one when it ends; in between at most one each `report_interval_s` if
something changed, and one with each heartbeat.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import msgspec
import structlog

from parti.core.job_claims import Claimant, Condemn, Start, Verdict, judge
from parti.errors import ConnectionFailed, DecodeError, NotFound, PartiError, RequestTimeout, WrongRevision
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.kv import Bucket, Entry
from parti.jobs.job import Held
from parti.model.headers import parse_reply
from parti.model.job import JobRecord, JobState, encode_job, record_key
from parti.model.records import decode
from parti.model.safe_text import abbreviate
from parti.telemetry.health import Health
from parti.telemetry.metrics import Metrics

_log = structlog.get_logger("parti.jobs.board")

_SIGNAL = "job-records"
_UNANSWERED = 2
"""So many tries in a row without an answer are told: no job can be claimed, and all places are taken soon."""
_RETRY_MIN_S, _RETRY_MAX_S = 0.05, 2.0
_UNFINISHED_TTL_S = 14 * 86_400.0
"""A record that nobody touches any more, such as that of a job whose stream was deleted, ends by itself."""
_MOST_SUBJECT = 1_000
_T = TypeVar("_T")


class JobBoard:
    """Writes the records of one worker's jobs. Every write is a compare-and-set."""

    def __init__(
        self,
        connection: Connection,
        api: JetStreamApi,
        bucket: Bucket,
        metrics: Metrics,
        health: Health,
        *,
        durable: str,
        claimant: Claimant,
        replicas: int,
        keep_s: float,
        report_interval_s: float,
    ) -> None:
        self._connection = connection
        self._api = api
        self._bucket = bucket
        self._metrics = metrics
        self._health = health
        self._durable = durable
        self._claimant = claimant
        self._replicas = replicas
        self._keep_s = keep_s
        self._report_interval_s = report_interval_s
        self._base: dict[Held, JobRecord] = {}

    # ── the life of a record ──────────────────────────────────────────────────────────────────────────────────

    async def claim(self, held: Held, cancelled: Callable[[], bool]) -> Verdict:
        """Find out what is to be done with a job; a `Start` is a claim that has been stored."""
        return await self._insist(lambda: self._claim(held, cancelled), "claim")

    async def _claim(self, held: Held, cancelled: Callable[[], bool]) -> Verdict:
        message = held.job.message
        entry = await self._bucket.get(record_key(self._durable, held.seq))
        found = self._readable(held, entry)
        published_ns = parse_reply(held.reply).timestamp_ns
        now_s = time.time()
        verdict = judge(found, published_ns, self._claimant, cancelled=cancelled(), now_s=now_s)
        held.revision = entry.revision if entry else 0
        start = verdict if isinstance(verdict, Start) else Start()
        self._base[held] = JobRecord(
            stream=message.stream,
            seq=held.seq,
            subject=abbreviate(message.subject, _MOST_SUBJECT),
            published_ns=published_ns,
            state=JobState.RUNNING,
            worker=message.worker_id,
            incarnation=self._claimant.incarnation,
            attempt=start.attempt,
            failures=start.failures,
            crashes=verdict.crashes if isinstance(verdict, Condemn) else start.crashes,
            received_s=message.received_s,
            started_s=now_s,
            seen_s=now_s,
        )
        if isinstance(verdict, Start):
            # One that has to wait until it may run alone is not to be accused of what happens meanwhile.
            state = JobState.WAITING if verdict.alone else JobState.RUNNING
            await self._put(held, msgspec.structs.replace(self._base[held], state=state), _UNFINISHED_TTL_S)
        return verdict

    def forget(self, held: Held) -> None:
        """It is not this worker's any more."""
        self._base.pop(held, None)

    async def report(self, held: Held) -> None:
        """Write what the job is doing, if this works at once: the next time will tell as well."""
        if held.lock.locked() or held not in self._base or held.superseded:
            return
        held.dirty, held.written_s = False, time.monotonic()
        try:
            async with held.lock:
                if held in self._base:
                    await self._put(held, self._now(held), _UNFINISHED_TTL_S)
        except WrongRevision:
            await self._look_again(held)
        except PartiError as error:
            _log.debug("progress not written", job=held.job.id, error=str(error))
        except Exception:  # of one job: the others are reported all the same
            _log.exception("progress not written because of an error that nobody has foreseen", job=held.job.id)

    async def report_due(self, every: Iterable[Held]) -> None:
        """Write those that have changed and were not written for a while."""
        now_s = time.monotonic()
        due = [h for h in every if h.dirty and h.started_s and now_s - h.written_s >= self._report_interval_s]
        await asyncio.gather(*map(self.report, due))

    async def note_running(self, held: Held) -> None:
        """Write that it runs now, before it does; for one that may take the process with it."""

        async def write() -> None:
            async with held.lock:
                await self._put(held, self._now(held), _UNFINISHED_TTL_S)

        await self._insist(write, "note", held)

    async def give_back(self, held: Held, reason: str, *, failed: bool = False, delay_s: float = 0.0) -> None:
        """Nobody has it until its next attempt."""
        base = self._base[held]
        record = msgspec.structs.replace(
            self._now(held),
            state=JobState.WAITING,
            worker="",
            incarnation="",
            failures=base.failures + failed,
            slots=0,
            error=reason if failed else base.error,
            phrase=reason,
            next_s=time.time() + delay_s if delay_s else 0.0,
        )
        await self._end(held, record, _UNFINISHED_TTL_S)

    async def finish(
        self, held: Held, state: JobState, *, failed: bool = False, error: str = "", dead_letter: int = 0
    ) -> None:
        """It has ended; returns when that is stored, so that it may be acknowledged."""
        now = self._now(held)
        record = msgspec.structs.replace(
            now,
            state=state,
            slots=0,
            percent=100.0 if state is JobState.DONE else now.percent,
            failures=now.failures + failed,
            finished_s=time.time(),
            error=error,
            dead_letter=dead_letter,
        )
        await self._end(held, record, self._keep_s)

    async def _end(self, held: Held, record: JobRecord, ttl_s: float) -> None:
        async def write() -> None:
            async with held.lock:
                await self._put(held, record, ttl_s)

        await self._insist(write, "finish", held)
        self.forget(held)

    def _now(self, held: Held) -> JobRecord:
        job = held.job
        return msgspec.structs.replace(
            self._base[held],
            state=job.state,
            percent=round(job._percent, 1),
            phrase=job._phrase,
            slots=job.held_slots,
            seen_s=time.time(),
        )

    # ── the bucket ────────────────────────────────────────────────────────────────────────────────────────────

    async def _put(self, held: Held, record: JobRecord, ttl_s: float) -> None:
        key = record_key(self._durable, held.seq)
        held.revision = await self._bucket.put(key, encode_job(record), revision=held.revision, ttl_s=ttl_s)
        self._metrics.jobs_writes.inc()

    def _readable(self, held: Held, entry: Entry | None) -> JobRecord | None:
        """The record of a job; one that cannot be read counts as none, so its attempts are counted anew."""
        if entry is None or not entry.value:
            return None
        try:
            return decode(entry.value, JobRecord)
        except DecodeError as error:
            key = record_key(self._durable, held.seq)
            self._metrics.refusals.note(key, entry.revision, error, "the job is handled as if it were new")
            return None

    async def _look_again(self, held: Held) -> None:
        """A write lost: learn the revision, whoever has made it."""
        try:
            entry = await self._bucket.get(record_key(self._durable, held.seq))
        except PartiError:
            return
        held.revision = entry.revision if entry else 0
        found = self._readable(held, entry)
        if found and found.worker and found.incarnation != self._claimant.incarnation:
            held.superseded = True
            _log.warning("this job was taken over, and runs twice", job=held.job.id, by=found.worker)

    async def _insist(self, work: Callable[[], Awaitable[_T]], what: str, held: Held | None = None) -> _T:
        """Do it until it works; ConnectionFailed when the connection was closed for good."""
        delay_s, unanswered = _RETRY_MIN_S, 0
        while True:
            try:
                await self._connection.wait_connected()
                result = await work()
                self._health.clear(_SIGNAL)
                return result
            except (WrongRevision, RequestTimeout) as error:
                unanswered = unanswered + 1 if isinstance(error, RequestTimeout) else 0
                if unanswered >= _UNANSWERED:
                    self._tell(what, error, delay_s)
                # Somebody else wrote, or an earlier try of ours did: look, and decide again.
                if held is not None:
                    await self._look_again(held)
            except NotFound:
                await self._reopen()
            except ConnectionFailed:
                if self._connection.closed:
                    raise
            except PartiError as error:
                self._tell(what, error, delay_s)
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(2 * delay_s, _RETRY_MAX_S)

    def _tell(self, what: str, error: PartiError, delay_s: float) -> None:
        self._health.raise_signal(_SIGNAL, f"records of jobs cannot be stored: {error}")
        _log.error("record not stored, will try again", what=what, error=str(error), delay_s=delay_s)

    async def _reopen(self) -> None:
        """The bucket is gone: make it anew, for no job starts before its claim is stored."""
        try:
            self._bucket = await Bucket.open(self._api, self._bucket.name, replicas=self._replicas)
            _log.warning("the bucket of job records was gone and was made anew", bucket=self._bucket.name)
        except PartiError as error:
            self._health.raise_signal(_SIGNAL, f"the bucket of job records is gone: {error}")
            _log.warning("the bucket of job records is gone", bucket=self._bucket.name, error=str(error))
