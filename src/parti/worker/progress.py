"""Keeps a worker's positions in the control bucket: one small record, written in batches, by compare-and-set."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec
import structlog

from parti.core.progress import Progress, decode_progress, encode_progress
from parti.errors import DecodeError, PartiError, WrongRevision
from parti.jetstream.api import StreamInfo
from parti.jetstream.kv import Entry
from parti.telemetry.health import Health
from parti.telemetry.log_rate import LogRate
from parti.telemetry.metrics import Metrics

_log = structlog.get_logger("parti.progress")
_SIGNAL = "progress"
REWRITTEN_S = 60.0
"""Positions that do not change are stored this often all the same: somebody may have overwritten the record."""


class ProgressStore(Protocol):
    """Where the record is kept: the bucket itself, or the bucket under a lease."""

    async def get(self, key: str) -> Entry | None:
        """Read a key from the leader; None when it never existed."""

    async def put(self, key: str, value: bytes, *, revision: int) -> int:
        """Write a key if its revision is still `revision`; returns the new one."""
        ...


class ProgressKeeper:
    """Loads and stores `progress.<worker>`.

    A write that fails is tried again at the next turn with newer positions; the health signal `progress` says so
    in the meantime. Losing a write costs repeats after a crash, never a message.
    """

    def __init__(
        self, store: ProgressStore, worker_id: str, metrics: Metrics, health: Health, *, incarnation: int = 0
    ) -> None:
        self.closed = False
        """From now on the record says that the worker stopped in good order."""
        self.durable: Callable[[], Awaitable[bool]] | None = None
        """Asked before positions are stored: whether all that has to be stored before them is."""
        self._store = store
        self._incarnation = incarnation
        self._key = f"progress.{worker_id}"
        self._metrics = metrics
        self._health = health
        self._writer = uuid.uuid4().hex
        self._revision = 0
        self._lock = asyncio.Lock()
        self._written: Progress | None = None
        self._written_s = 0.0
        self._rate = LogRate()

    async def continues(self, store: ProgressStore, incarnation: int) -> bool:
        """Go on under another lease; False when somebody else has written the record since."""
        self._store, self._incarnation = store, incarnation
        entry = await store.get(self._key)
        if entry is None or not entry.value:
            # The bucket is a new one: what is known here is all that is left.
            self._revision, self._written = entry.revision if entry else 0, None
            return True
        try:
            ours = decode_progress(entry.value).writer == self._writer
        except DecodeError as error:
            # Whoever wrote that was no worker: what is known here is still the newest.
            self._metrics.refusals.note(self._key, entry.revision, error, "it is written again")
            self._written, ours = None, True
        self._revision = entry.revision
        return ours

    async def load(self, stream: StreamInfo) -> Progress:
        """Read the record; a fresh one when there is none, or when it does not belong to this very stream."""
        fresh = Progress(stream=stream.name, stream_created=stream.created, writer=self._writer)
        entry = await self._store.get(self._key)
        if entry is None:
            return fresh
        self._revision = entry.revision
        if not entry.value:
            return fresh
        try:
            found = decode_progress(entry.value)
        except DecodeError as error:
            then = "partitions begin where their claims say, or where the consumer has stopped"
            self._metrics.refusals.note(self._key, entry.revision, error, then)
            return fresh
        if (found.stream, found.stream_created) != (stream.name, stream.created):
            _log.warning(
                "progress record belongs to another stream and is ignored", key=self._key, stream=found.stream
            )
            return fresh
        if found.highest > stream.last_seq + 1:
            _log.error(
                "progress is ahead of the stream, as after a restore from backup; starting over",
                position=found.highest,
                last_seq=stream.last_seq,
            )
            return fresh
        return found

    async def save(self, summarise: Callable[[str], Progress]) -> bool:
        """Store the positions if they changed; True when they are stored (or were already)."""
        async with self._lock:
            return await self._save(summarise)

    async def _save(self, summarise: Callable[[str], Progress], *, again: bool = False) -> bool:
        progress = msgspec.structs.replace(summarise(self._writer), incarnation=self._incarnation, closed=self.closed)
        if progress == self._written and time.monotonic() - self._written_s < REWRITTEN_S:
            return True
        if self.durable and not await self.durable():
            return False
        try:
            self._revision = await self._store.put(self._key, encode_progress(progress), revision=self._revision)
        except WrongRevision:
            if not again and await self._adopt():
                return await self._save(summarise, again=True)
            return False
        except Exception as error:  # whatever it is, others wait for these positions: it is tried again
            self._failed(f"positions cannot be stored: {_told(error)}", error)
            return False
        self._written, self._written_s = progress, time.monotonic()
        self._metrics.progress_writes.inc()
        self._health.clear(_SIGNAL)
        return True

    async def _adopt(self) -> bool:
        """Another revision is stored: our own write whose answer got lost (True), or another process with our id."""
        try:
            entry = await self._store.get(self._key)
            self._revision = entry.revision if entry else 0
            foreign = entry and entry.value and decode_progress(entry.value).writer != self._writer
        except DecodeError as error:
            self._metrics.refusals.note(self._key, self._revision, error, "it is written again")
            return True
        except PartiError as error:
            self._failed(f"positions cannot be stored: {error}", error)
            return False
        if foreign:
            self._failed(
                f"another process writes {self._key}: two workers with the same worker_id; give each its own"
            )
        return not foreign

    def _failed(self, reason: str, error: Exception | None = None) -> None:
        self._metrics.progress_failures.inc()
        self._health.raise_signal(_SIGNAL, reason)
        # It is tried again at every turn, twice a second, and may fail for ever.
        left_out = self._rate.passes(type(error).__name__)
        if left_out is not None:
            unforeseen = None if isinstance(error, PartiError) else error
            tell = _log.error if unforeseen else _log.warning
            tell(
                "progress not stored",
                reason=reason,
                exc_info=unforeseen,
                **({"left_out": left_out} if left_out else {}),
            )


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, PartiError) else repr(error)
