"""The record of a job: what a worker says of it while it has it, and of how it ended."""

from __future__ import annotations

import enum

import msgspec

from parti.errors import ConfigError, DecodeError
from parti.model.records import TAG, Count, Nanoseconds, Real, Seconds, decode, encode, number_in

BUCKET_SUFFIX = "-jobs"
"""Added to the prefix it names the bucket of the records."""


class JobState(enum.StrEnum):
    """What can be said of a job."""

    WAITING = "waiting"
    """Nobody works on it: it waits for slots, or for its next attempt."""
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    """Its attempts are used up, and it is a dead letter."""
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        """Whether nothing follows."""
        return self in {JobState.DONE, JobState.FAILED, JobState.CANCELLED}


class JobRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field=TAG, tag="job"):
    """What is known of one job. Times are seconds since 1970, by the clock of the worker; 0 is "not yet"."""

    stream: str
    seq: Count
    subject: str
    published_ns: Nanoseconds
    """Tells a message from one with the same sequence of a stream that was made anew."""
    state: JobState
    worker: str = ""
    """Who has it; nobody while it waits for its next attempt."""
    incarnation: str = ""
    """The process of that worker."""
    attempt: Count = 1
    failures: Count = 0
    """Attempts that ended with an error."""
    crashes: Count = 0
    """Attempts whose process died."""
    percent: Real = 0.0
    phrase: str = ""
    slots: Count = 0
    received_s: Seconds = 0.0
    started_s: Seconds = 0.0
    seen_s: Seconds = 0.0
    """When its worker was last heard of."""
    finished_s: Seconds = 0.0
    next_s: Seconds = 0.0
    """When its next attempt is due."""
    error: str = ""
    dead_letter: Count = 0
    """Its sequence in the dead-letter stream."""
    retried_as: Count = 0
    """The sequence under which an operator has sent it again."""


def record_key(durable: str, seq: int) -> str:
    """Where the record of a job lies in its bucket."""
    return f"jobs.{durable}.{seq}"


def cancel_key(durable: str, seq: int) -> str:
    """Where an operator asks for the end of a job."""
    return f"cancel.{durable}.{seq}"


def job_id(durable: str, seq: int) -> str:
    """What people call a job.

    >>> job_id("parti-jobs", 42)
    'parti-jobs.42'
    """
    return f"{durable}.{seq}"


def parse_key(key: str) -> tuple[str, int]:
    """Consumer and sequence of a record's key, a cancel's key or a job's id; raises `ConfigError`."""
    durable, _, seq = key.rpartition(".")
    durable = durable.removeprefix("jobs.").removeprefix("cancel.")
    if not number_in(seq):
        raise ConfigError(f"{key!r} is no id of a job; expected something like 'parti-jobs.42', see 'parti jobs ls'")
    return durable, number_in(seq)


def encode_job(record: JobRecord) -> bytes:
    """A record as it lies in the bucket."""
    return encode(record)


def decode_job(value: bytes) -> JobRecord | None:
    """The record, or None for what is none: another version of parti may be at work."""
    try:
        return decode(value, JobRecord)
    except DecodeError:
        return None
