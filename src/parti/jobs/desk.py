"""The operator's side of jobs: list them, cancel one, send a failed one again.

What `parti jobs` and the console show comes from here. Nothing in here runs in a worker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import structlog

from parti.core.dead_letter import sendable_headers_of
from parti.errors import ConfigError, NotFound, WrongRevision
from parti.jetstream.api import ConsumerInfo, JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.direct import Stored
from parti.jetstream.kv import Bucket, Entry
from parti.jetstream.letters import Letters
from parti.jetstream.watch import Watch
from parti.model.job import (
    BUCKET_SUFFIX,
    JobRecord,
    JobState,
    cancel_key,
    decode_job,
    encode_job,
    job_id,
    parse_key,
    record_key,
)

_log = structlog.get_logger("parti.jobs.desk")

CANCEL_TTL_S = 86_400.0
_RECORDS = "jobs.>"
_POLL_S = 0.05
_SILENT = 0.8
"""A job whose worker was not heard of for this share of ack_wait is probably without one."""
_ORDER = (JobState.RUNNING, JobState.WAITING, JobState.FAILED, JobState.CANCELLED, JobState.DONE)


@dataclass(frozen=True, slots=True)
class Line:
    """One job as it is shown."""

    id: str
    record: JobRecord
    silent: bool = False
    """Its worker has not been heard of for so long that the job is about to be given to another."""

    @property
    def seconds(self) -> float:
        """How long it has run, or has taken; 0 before its start."""
        record = self.record
        if not record.started_s:
            return 0.0
        return max(0.0, (record.finished_s or time.time()) - record.started_s)


@dataclass(frozen=True, slots=True)
class Queue:
    """What the server says of the consumer of some jobs."""

    stream: str
    durable: str
    pending: int
    """Jobs that nobody has received yet."""
    held: int
    """Jobs that workers hold."""
    limit: int
    ack_wait_s: float


@dataclass(frozen=True, slots=True)
class Picture:
    """All that there is to show."""

    lines: Sequence[Line] = ()
    queues: Sequence[Queue] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    """Records by state."""


class JobDesk:
    """The jobs of one deployment, by its prefix."""

    def __init__(self, connection: Connection, prefix: str) -> None:
        self._connection = connection
        self._api = JetStreamApi(connection)
        self.bucket = Bucket(self._api, f"{prefix}{BUCKET_SUFFIX}")
        self._consumers: dict[str, str] = {}

    async def check(self) -> None:
        """Raise `ConfigError` when no job worker has ever run here."""
        try:
            await self.bucket.info()
        except NotFound:
            raise ConfigError(
                f"bucket {self.bucket.name!r} does not exist: no job worker has ever run here; start one with 'parti "
                f"jobs run MODULE:APP', or name another place with --nats or --prefix"
            ) from None

    # ── looking ───────────────────────────────────────────────────────────────────────────────────────────────

    async def entries(self) -> dict[str, Entry]:
        """Every record as it is now."""
        found: dict[str, Entry] = {}
        watch = Watch(self._connection, self._api, self.bucket.name, (_RECORDS,), found.__setitem__)
        await watch.start()
        await watch.stop()
        return found

    def watch(self, entries: dict[str, Entry], changed: asyncio.Event) -> Watch:
        """A watch that keeps `entries` up to date."""

        def take(key: str, entry: Entry) -> None:
            entries[key] = entry
            changed.set()

        return Watch(self._connection, self._api, self.bucket.name, (_RECORDS,), take)

    async def picture(self, entries: Mapping[str, Entry], states: frozenset[JobState] | None = None) -> Picture:
        """What is to be shown of the records, with what the server says of their consumers."""
        known = list(_readable(entries))
        queues = await self._queues({(record.stream, durable) for (durable, _), record in known})
        ack_waits = {queue.durable: queue.ack_wait_s for queue in queues}
        counts = {state.value: 0 for state in _ORDER}
        lines = []
        for (durable, seq), record in known:
            counts[record.state.value] += 1
            if states is None or record.state in states:
                alive_s = _SILENT * ack_waits.get(durable, float("inf"))
                silent = bool(record.worker) and not record.state.final and time.time() - record.seen_s > alive_s
                lines.append(Line(job_id(durable, seq), record, silent))
        lines.sort(key=lambda line: (_ORDER.index(line.record.state), -line.record.finished_s, line.record.seq))
        return Picture(lines, queues, counts)

    async def _queues(self, names: set[tuple[str, str]]) -> list[Queue]:
        queues = []
        for stream, durable in sorted(names):
            try:
                info = await self._api.consumer_info(stream, durable)
            except NotFound:
                continue
            queues.append(_queue(stream, durable, info))
        return queues

    # ── doing ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def find(self, wanted: str, default: str = "") -> tuple[str, int, Entry | None]:
        """Consumer, sequence and record of a job by its id, or by its sequence alone if that is clear."""
        durable, seq = parse_key(wanted if "." in wanted else f"{default}.{wanted}")
        return durable, seq, await self.bucket.get(record_key(durable, seq))

    async def cancel(self, durable: str, seq: int, entry: Entry | None) -> JobRecord | None:
        """Ask for the end of a job; returns its record, or None while nobody has received it.

        Raises `ConfigError` for one that has ended, and for one that does not exist.
        """
        record = decode_job(entry.value) if entry and entry.value else None
        name = job_id(durable, seq)
        if record is not None and record.state.final:
            raise ConfigError(f"job {name} has ended already: {record.state.value}; there is nothing to cancel")
        stream = record.stream if record else await self._stream_of(durable)
        if record is None:
            await self._message(stream, seq, name)
        created = (await self._api.stream_info(stream)).created
        key = cancel_key(durable, seq)
        for _ in range(5):
            found = await self.bucket.get(key)
            try:
                revision = found.revision if found else 0
                await self.bucket.put(key, created.encode(), revision=revision, ttl_s=CANCEL_TTL_S)
                return record
            except WrongRevision:
                continue
        raise ConfigError(f"job {name} is being cancelled by others at this moment; look at 'parti jobs ls'")

    async def wait_final(self, durable: str, seq: int, timeout_s: float) -> JobRecord | None:
        """The record once the job has ended; None when it has not within the time."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            entry = await self.bucket.get(record_key(durable, seq))
            record = decode_job(entry.value) if entry and entry.value else None
            if record is not None and record.state.final:
                return record
            await asyncio.sleep(_POLL_S)
        return None

    async def retry(self, durable: str, seq: int, entry: Entry | None, dead_letter_stream: str) -> int:
        """Send a failed job again; returns its new sequence. Raises `ConfigError` for one that has not failed."""
        name = job_id(durable, seq)
        record = decode_job(entry.value) if entry and entry.value else None
        if entry is None or record is None:
            raise ConfigError(f"there is no record of job {name}; 'parti jobs ls --all' lists those that there are")
        if record.state is not JobState.FAILED:
            raise ConfigError(f"job {name} is {record.state.value}; only a failed job can be sent again")
        if record.retried_as:
            again = job_id(durable, record.retried_as)
            raise ConfigError(f"job {name} was sent again before, as {again}; if that failed too, retry that one")
        subject, payload, headers = await self._letter(record, dead_letter_stream, name)
        # Of two operators with the same idea one sends it.
        headers["Nats-Msg-Id"] = f"retry:{record.stream}:{seq}:{record.dead_letter}"
        headers["Parti-Retry-Of"] = name
        new = await self._api.publish(subject, payload, headers=headers)
        try:
            changed = msgspec.structs.replace(record, retried_as=new)
            await self.bucket.put(
                record_key(durable, seq), encode_job(changed), revision=entry.revision, ttl_s=CANCEL_TTL_S
            )
        except WrongRevision:
            _log.debug("the record changed meanwhile", job=name)
        return new

    async def _letter(self, record: JobRecord, stream: str, name: str) -> tuple[str, bytes, dict[str, str]]:
        """Subject, payload and headers of what was dead-lettered, without what was added to tell its story."""
        try:
            letters = await Letters.open(self._connection, self._api, stream)
            found = await letters.get(record.dead_letter)
        except ConfigError:
            found = None
        if found is None:
            raise ConfigError(
                f"the dead letter of job {name} (sequence {record.dead_letter} of stream {stream!r}) is gone, so it "
                f"cannot be sent again; publish it anew"
            )
        letter, payload = found
        if "subject" in letter.cut:
            raise ConfigError(
                f"the subject of job {name}, {letter.subject!r}, is no UTF-8 text or too long to be sent again; "
                f"publish it anew"
            )
        if not letter.cut:
            return letter.subject or record.subject, payload, letter.own_headers
        original = await letters.original(letter)
        if original is None:
            missing = " and ".join(sorted(letter.cut))
            raise ConfigError(f"the {missing} of job {name} was left in stream {record.stream!r} and is gone there")
        headers, complete = sendable_headers_of(original.header)
        if not complete:
            raise ConfigError(f"a header of job {name} cannot be sent again as it was; publish it anew")
        return letter.subject or record.subject, original.data, headers

    async def _stored(self, stream: str, seq: int) -> Stored | None:
        try:
            found = await self._api.next_on_subject(stream, ">", seq)
        except NotFound:
            return None
        return found if found is not None and found.seq == seq else None

    async def _message(self, stream: str, seq: int, name: str) -> None:
        if await self._stored(stream, seq) is None:
            raise ConfigError(f"there is no job {name}: stream {stream!r} has no message {seq}; see 'parti jobs ls'")

    async def _stream_of(self, durable: str) -> str:
        for stream in await self._api.stream_names():
            if durable in await self._api.consumer_names(stream):
                return stream
        raise ConfigError(f"there is no consumer {durable!r} here; see 'parti jobs ls' for the ids of jobs")


def _readable(entries: Mapping[str, Entry]) -> Iterator[tuple[tuple[str, int], JobRecord]]:
    """Consumer, sequence and record of each job; what is no record, or lies under no key of a job, is left out."""
    for key, entry in entries.items():
        record = decode_job(entry.value) if entry.value else None
        if record is not None:
            with suppress(ConfigError):
                yield parse_key(key), record


def _queue(stream: str, durable: str, info: ConsumerInfo) -> Queue:
    limit, ack_wait_s = int(info.config.get("max_ack_pending", 0)), info.config.get("ack_wait", 0) / 1e9
    return Queue(stream, durable, info.pending, info.ack_pending, limit, ack_wait_s)
