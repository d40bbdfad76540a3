"""Texts that come from payloads: an exception echoes one, and it reaches heartbeats, records, letters and logs."""

from __future__ import annotations

import io
import json
import logging
from datetime import UTC, datetime
from typing import Any

import structlog

from fuzz.feed import Feed
from fuzz.hostile import TEXTS, VALUES
from fuzz.target import Target, WrongError
from fuzz.targets.screen import check_clean
from parti.core.dead_letter import reason_of
from parti.core.retry import GiveUp, Reject, Retry, RetryPolicy, TryAgain, after_failure, describe
from parti.model.fleet import HealthRecord, LeaderRecord, decode, encode
from parti.model.job import JobRecord, JobState, decode_job, encode_job
from parti.model.safe_text import text_of
from parti.telemetry.health import Health
from parti.telemetry.logs import configure_logging

_AT = datetime(2026, 11, 18, tzinfo=UTC)
_LONGEST_S = 30 * 86_400.0


class _MuteError(Exception):
    """An error that cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class _OddRetry(Retry):
    """Asks for a delay that may be anything."""

    def __init__(self, delay: Any) -> None:  # that of the base class would refuse it
        self.delay = delay


def one(data: bytes) -> None:
    """One text, through all that is made of it."""
    feed = Feed(data)
    kind, text = feed.byte() % 6, feed.text()
    errors: tuple[BaseException, ...] = (
        ValueError(text),
        Reject(text),
        Retry(1.0, text),
        KeyError(text),
        _MuteError(),
    )
    error = errors[kind] if kind < len(errors) else _OddRetry(feed.pick(VALUES))
    _records(error, text_of(feed.chunk()))
    _health(text)
    _logs(feed, error, text)


def _records(error: BaseException, subject: str) -> None:
    """What a worker says of a failure can be written, and read again; and it can wait as long as it is told."""
    said = describe(error)
    again = after_failure(RetryPolicy(), 1, error)
    if isinstance(again, TryAgain) and not (type(again.delay_s) is float and 0 <= again.delay_s <= _LONGEST_S):
        raise WrongError(f"no timer takes a delay of {again.delay_s!r}")
    given = after_failure(RetryPolicy(), 3, error)
    reason = given.reason if isinstance(given, GiveUp) else said
    reason_of(reason)
    for text in (said, reason):
        failing = {subject: f"message 1, try 1: {text}"}
        decode(encode(HealthRecord(incarnation=1, failing=failing, at=_AT)), HealthRecord)
        record = JobRecord(stream="S", seq=1, subject=subject, published_ns=1, state=JobState.FAILED, error=text)
        if decode_job(encode_job(record)) is None:
            raise WrongError("the record of a failed job cannot be read again")


def _health(text: str) -> None:
    health = Health()
    health.raise_signal("dead-letters", f"dead letters cannot be stored: {describe(ValueError(text))}")
    problems = tuple(health.reasons.values())
    decode(encode(HealthRecord(incarnation=1, problems=problems, at=_AT)), HealthRecord)
    leader = LeaderRecord(holder="w-0", token="t", term=1, reason=problems[0], since=_AT, ttl_seconds=2.0)
    decode(encode(leader), LeaderRecord)


class _Strict(logging.Handler):
    """Lets errors of the formatter through, which logging would print and forget."""

    def __init__(self, inner: logging.Handler) -> None:
        super().__init__()
        self._inner = inner
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Format a line."""
        self.lines.append(self._inner.format(record))


def _logs(feed: Feed, error: BaseException, text: str) -> None:
    """Every line can be written as UTF-8; JSON stays JSON, and no line moves a cursor."""
    form = feed.pick(("json", "console"))
    root = logging.getLogger()
    before, level, known = list(root.handlers), root.level, structlog.get_config()
    try:
        configure_logging("info", form, stream=io.StringIO())  # type: ignore[arg-type]
        (ours,) = (handler for handler in root.handlers if handler not in before)
        strict = _Strict(ours)
        root.handlers[:] = [strict]
        log = structlog.get_logger("parti.fuzz")
        try:
            raise error
        except BaseException:
            log.exception("handler failed", error=text, fields={text[:50]: [text]}, subject=text)
        logging.getLogger("other").warning("a text of others: %s", text)
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        structlog.configure(**known)
    for line in strict.lines:
        line.encode("utf-8")
        check_clean(line, "in the log")
        if form == "json":
            json.loads(line)
            if "\n" in line:
                raise WrongError("a line of the log is two")


def seeds() -> list[bytes]:
    """Each hostile text once, in each kind of error."""
    texts = [bytes((kind, 0, number)) for number in range(len(TEXTS)) for kind in (0, 1)]
    return [*texts, *(text + b"\1" for text in texts), b"\0\7\x20an ordinary text", b"\0\0\1\3j.\xff"]


TARGET = Target("texts", one, seeds)
