"""Records who owned which partition and why it changed hands, in a bounded stream beside the bucket.

The rebalancer notes each change after its batch was accepted and goes on; a task of its own publishes. Invariant
guarded here: nothing that happens to the history holds up a move or fails it. What cannot be recorded within half a
minute, or is refused, is dropped, with one warning for each kind of trouble.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import structlog

from parti.errors import ApiError, ConfigError, DecodeError, NoResponders, NotFound, PartiError, PermissionDenied
from parti.jetstream.api import JetStreamApi
from parti.model.fleet import decode, encode
from parti.model.history import (
    KEEP_RECORDS,
    KEEP_S,
    HistoryRecord,
    history_pattern,
    history_stream,
    history_subject,
)
from parti.telemetry.instruments import Counter

_log = structlog.get_logger("parti.history")

_MOST_WAITING = 20_000
_CHUNK = 200
_TRIES = 30
_RETRY_S = 1.0
_ANSWER_S = 2.0
_CLOSE_S = 0.2
_NANOSECONDS = 1_000_000_000
_OVERLAP = 10065


class History:
    """Takes notes of changes and publishes them; `run` until cancelled, then `close`."""

    def __init__(self, api: JetStreamApi, bucket: str, lost: Counter, *, replicas: int) -> None:
        """`lost` counts the records that could not be stored."""
        self._lost = lost
        self._api = api
        self._bucket = bucket
        self._replicas = replicas
        self._waiting: deque[HistoryRecord] = deque()
        self._news = asyncio.Event()
        self._open = False
        self._refused = False
        self._failures = 0
        """In a row."""
        self._trouble = ""

    def note(self, records: Sequence[HistoryRecord]) -> None:
        """Have these recorded soon, or not at all; neither waits nor raises."""
        if self._refused:
            self._lost.inc(len(records))
            return
        self._waiting.extend(records)
        while len(self._waiting) > _MOST_WAITING:
            self._waiting.popleft()
            self._lost.inc()
        self._news.set()

    async def run(self) -> None:
        """Publish what is noted."""
        while not self._refused:
            await self._news.wait()
            self._news.clear()
            if not await self._publish_all():
                await asyncio.sleep(_RETRY_S)
                self._news.set()

    async def close(self) -> None:
        """Publish what is left, if that takes no time."""
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._publish_all()
        except TimeoutError:
            pass
        self._lost.inc(len(self._waiting))

    async def _publish_all(self) -> bool:
        """True when nothing is left to try."""
        while self._waiting and not self._refused:
            chunk = [self._waiting.popleft() for _ in range(min(_CHUNK, len(self._waiting)))]
            try:
                await self._store(chunk)
            except (PermissionDenied, ConfigError) as error:
                self._refused = True
                self._lost.inc(len(chunk) + len(self._waiting))
                self._waiting.clear()
                self._complain(error)
            except PartiError as error:
                self._failures += 1
                self._complain(error)
                if self._failures < _TRIES:
                    # What is sent again is recognised by its id.
                    self._waiting.extendleft(reversed(chunk))
                    return False
                self._lost.inc(len(chunk))
            except Exception:
                self._lost.inc(len(chunk))
                self._news.set()  # whoever begins this again goes on with the next ones
                raise
            else:
                self._failures, self._trouble = 0, ""
        return True

    async def _store(self, chunk: Sequence[HistoryRecord]) -> None:
        try:
            if not self._open:
                await self._ensure()
            await self._publish(chunk)
        except (NoResponders, ApiError):
            if not self._open:
                raise
            # The stream was there and is no longer.
            self._open = False
            await self._ensure()
            await self._publish(chunk)

    async def _publish(self, chunk: Sequence[HistoryRecord]) -> None:
        # A denial of a mere publish would reach the worker's health; that of a request reaches this one only. So the
        # first is a request until it is known that we may; the last is one because its answer tells of the others.
        for number, record in enumerate(chunk):
            subject, headers = history_subject(self._bucket, record.partition), {"Nats-Msg-Id": _id(record)}
            if number + 1 == len(chunk) or not self._open:
                await self._api.publish(subject, encode(record), headers=headers, timeout_s=_ANSWER_S)
                self._open = True
            else:
                await self._api.send(subject, encode(record), headers=headers)

    async def _ensure(self) -> None:
        name, pattern = history_stream(self._bucket), history_pattern(self._bucket)
        config = {
            "name": name,
            "description": "who owned which partition, and why it changed hands",
            "subjects": [pattern],
            "retention": "limits",
            "storage": "file",
            "discard": "old",
            "max_age": KEEP_S * _NANOSECONDS,
            "max_msgs_per_subject": KEEP_RECORDS,
            "num_replicas": self._replicas,
            "allow_direct": True,
        }
        try:
            info = await self._api.ensure_stream(config)
        except ApiError as error:
            if error.code != _OVERLAP:
                raise
            raise ConfigError(
                f"another stream takes {pattern!r}; choose another bucket, or set history=false"
            ) from None
        if pattern not in info.subjects:
            raise ConfigError(
                f"stream {name!r} exists but does not take {pattern!r}; rename it, or set history=false"
            )

    def _complain(self, error: PartiError) -> None:
        if self._trouble != type(error).__name__:
            self._trouble = type(error).__name__
            _log.warning(
                "moves are made but not recorded in the history",
                stream=history_stream(self._bucket),
                error=str(error),
            )


def _id(record: HistoryRecord) -> str:
    """The same for each try; a fence token can be kept and freed more than once, but not at the same time."""
    return f"{record.partition}:{record.fence_token}:{record.step}:{record.at.timestamp():.6f}"


async def read_history(api: JetStreamApi, bucket: str, partition: str) -> list[HistoryRecord] | None:
    """The records of a partition, oldest first; None when no history is kept here."""
    records: list[HistoryRecord] = []
    stream, subject, seq = history_stream(bucket), history_subject(bucket, partition), 1
    try:
        while found := await api.next_on_subject(stream, subject, seq):
            seq = found.seq + 1
            try:
                records.append(decode(found.data, HistoryRecord))
            except DecodeError:
                continue  # of another version
    except NotFound:
        return None
    return records
