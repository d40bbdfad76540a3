"""The state store: snapshots of any size, in chunks, in a stream of their own.

Every chunk has a subject of its own, and the stream keeps one message of each. So a chunk may be sent again at any
time after an unknown outcome, chunks may arrive in any order, and any of them can be read alone: nothing here depends
on sequences, windows of de-duplication or consumers. Memory is bounded by the window, whatever the size of a state.

The stream does not expire its messages unless told to: the state of a partition that is quiet for months is still
its state. What is left over is removed by name, by the owner of the partition or by `sweep`.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from datetime import UTC, datetime
from typing import TypeVar

import structlog

from parti.errors import (
    ApiError,
    ConfigError,
    JetStreamUnavailable,
    NotFound,
    PartiError,
    StateCorrupt,
    StateRemoved,
)
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.streams import list_subjects
from parti.model.state import SnapshotName, StatePointer, chunk_subject, parse_chunk_subject, token_of

_log = structlog.get_logger("parti.state")
_T = TypeVar("_T")

CHUNK_BYTES = 256 * 1024
WINDOW = 4
"""Chunks under way at once. One MiB reaches most of the speed that any more would, and a lease that is renewed over
the same connection waits for no more than that."""
STALL_S = 30.0
"""How long one chunk is tried over lost connections and servers that do not answer."""
SWEEP_IDLE_S = 3600.0
"""A snapshot that nothing points at and that has not grown for so long is left over."""
MAX_PAUSE_S = SWEEP_IDLE_S / 2
"""A snapshot that stood still for so long, in a process that was stopped, say, may have been swept meanwhile."""

_RETRY_MIN_S, _RETRY_MAX_S = 0.05, 1.0
_ANSWER_S = 5.0
_CLEAN_UP_S = 2.0
_HEADER_ROOM = 1024
_STREAM_NOT_FOUND, _SUBJECTS_OVERLAP = 10059, 10065
_FULL = frozenset({10023, 10077})
"""The stream or the account has no room: a retry would not find any."""


class StateStore:
    """Keeps snapshots in the stream `<name>-state`, under `<name>.state.>`; made by `await StateStore.open(...)`.

    One store belongs to one control plane: give it the name of the bucket that the pointers are in. What a pointer
    of that bucket does not point at is a leftover to `remove_older` and `sweep`.
    """

    def __init__(
        self,
        connection: Connection,
        name: str,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        window: int = WINDOW,
        stall_s: float = STALL_S,
    ) -> None:
        self.stream = f"{name}-state"
        self.root = f"{name}.state"
        self._connection = connection
        self._answer_s = min(_ANSWER_S, stall_s)
        self._api = JetStreamApi(connection, timeout_s=self._answer_s)
        self._chunk_bytes = chunk_bytes
        self._window = window
        self._stall_s = stall_s

    @classmethod
    async def open(
        cls,
        connection: Connection,
        name: str,
        *,
        replicas: int,
        max_age_s: float = 0.0,
        chunk_bytes: int = CHUNK_BYTES,
        window: int = WINDOW,
        stall_s: float = STALL_S,
    ) -> StateStore:
        """Open the store, creating its stream when it is missing; an existing one is left as it is.

        `max_age_s` deletes states that were not saved again for so long, those in use too; 0: never. Raises
        `ConfigError` when the stream exists and cannot serve.
        """
        store = cls(connection, name, chunk_bytes=chunk_bytes, window=window, stall_s=stall_s)
        subjects = f"{store.root}.>"
        config = {
            "name": store.stream,
            "subjects": [subjects],
            "retention": "limits",
            "storage": "file",
            "discard": "new",
            "max_msgs_per_subject": 1,
            "max_age": int(max_age_s * 1e9),
            "num_replicas": replicas,
            "allow_direct": True,
        }
        try:
            info = await store._api.ensure_stream(config)
        except ApiError as error:
            if error.code != _SUBJECTS_OVERLAP:
                raise
            raise ConfigError(
                f"the subjects {subjects!r}, which states are to be kept under, belong to another stream; take them "
                f"out of it, or name another bucket"
            ) from None
        if subjects not in info.subjects or not info.allow_direct or info.retention != "limits":
            raise ConfigError(
                f"stream {store.stream!r} exists but cannot keep states: expected the subjects {subjects!r}, "
                f"allow_direct and limits retention; correct it, or name another bucket"
            )
        return store

    async def put(
        self,
        partition: str,
        chunks: AsyncIterable[bytes],
        *,
        fence: int,
        position: int,
        stream_created: str = "",
        worker: str = "",
    ) -> StatePointer:
        """Store a state, however it is cut; returns what points at it once the server has stored every byte.

        Nothing points at the snapshot yet: storing the pointer is the caller's part. When this fails, what was stored
        is removed if possible, and left to `sweep` otherwise. A cancelled call leaves it to `sweep`.
        """
        subject = SnapshotName(self.root, partition, fence, position, uuid.uuid4().hex[:12]).subject
        try:
            count, size, digest = await self._send(subject, chunks)
        except Exception:
            await self._clean_up(subject)
            raise
        return StatePointer(
            partition=partition,
            fence=fence,
            position=position,
            stream_created=stream_created,
            size=size,
            chunks=count,
            digest=digest,
            stream=self.stream,
            subject=subject,
            worker=worker,
            at=datetime.now(UTC),
        )

    async def _send(self, subject: str, chunks: AsyncIterable[bytes]) -> tuple[int, int, str]:
        digest = hashlib.sha256()
        count = size = 0
        under_way: deque[asyncio.Task[None]] = deque()
        acknowledged_s = time.time()
        try:
            async for chunk in _cut(chunks, self._fitting()):
                digest.update(chunk)
                size += len(chunk)
                under_way.append(asyncio.create_task(self._send_chunk(subject, count, chunk)))
                count += 1
                # The first chunk is stored before all others: a snapshot is found by it.
                if len(under_way) >= self._window or count == 1:
                    await under_way.popleft()
                    acknowledged_s = _without_pause(acknowledged_s)
            while under_way:
                await under_way.popleft()
            _without_pause(acknowledged_s)
        finally:
            await _drop(under_way)
        return count, size, digest.hexdigest()

    def _fitting(self) -> int:
        # Asked for each time: after a reconnect it may be a server with another limit.
        return max(1, min(self._chunk_bytes, self._connection.max_payload - _HEADER_ROOM))

    async def _send_chunk(self, subject: str, number: int, chunk: bytes) -> None:
        target = chunk_subject(subject, number)
        # A chunk that comes twice would only replace itself; the id spares the server even that.
        headers = {"Nats-Msg-Id": target}
        await self.persist(lambda: self._api.publish(target, chunk, headers=headers, timeout_s=self._answer_s))

    async def get(self, pointer: StatePointer) -> AsyncGenerator[bytes, None]:
        """Read a state, chunk by chunk.

        The last chunk is handed over only when count, size and digest of all of them are right; until then nothing
        that was read may be used for good. Raises `StateCorrupt` when they are not, `StateRemoved` when a chunk is
        gone: read the pointer again, there may be a newer one. Close the iterator if you leave it early.
        """
        digest = hashlib.sha256()
        size = asked = 0
        under_way: deque[asyncio.Task[bytes]] = deque()
        chunk = b""
        try:
            for number in range(pointer.chunks):
                while asked < min(pointer.chunks, number + self._window):
                    under_way.append(asyncio.create_task(self._fetch_chunk(pointer, asked)))
                    asked += 1
                chunk = await under_way.popleft()
                digest.update(chunk)
                size += len(chunk)
                if size > pointer.size:
                    break
                if number < pointer.chunks - 1:
                    yield chunk
        finally:
            await _drop(under_way)
        if size != pointer.size or digest.hexdigest() != pointer.digest:
            raise StateCorrupt(
                f"the state of partition {pointer.partition!r} at position {pointer.position} is damaged: {size} "
                f"bytes with digest {digest.hexdigest()[:12]}, expected {pointer.size} with {pointer.digest[:12]}; "
                f"restore stream {pointer.stream!r} from a copy, or delete the pointer to begin without state"
            )
        if chunk:
            yield chunk

    async def _fetch_chunk(self, pointer: StatePointer, number: int) -> bytes:
        subject = chunk_subject(pointer.subject, number)

        async def fetch() -> bytes:
            source = f"$JS.API.DIRECT.GET.{pointer.stream}.{subject}"
            reply = await self._connection.request(source, timeout_s=self._answer_s)
            if not reply.status:
                return reply.data
            # Any replica answers a direct read, also one that does not have the chunk yet: the leader decides.
            stored = await self._api.next_on_subject(pointer.stream, subject, 1)
            if stored is None:
                await self._api.stream_info(pointer.stream)  # A stream that is away for a moment proves nothing.
                raise StateRemoved(
                    f"chunk {number} of the state of partition {pointer.partition!r} at position {pointer.position} "
                    f"is not in stream {pointer.stream!r}; read the pointer again: the state may have been replaced"
                )
            return stored.data

        return await self.persist(fetch, unless=StateRemoved)

    async def remove(self, pointer: StatePointer) -> int:
        """Delete a snapshot; returns how many chunks there were.

        Whoever still reads it gets `StateRemoved`. Store the new pointer first.
        """
        return await self._purge(pointer.stream, pointer.subject) if pointer.holds_state else 0

    async def remove_older(self, partition: str, keep: StatePointer) -> int:
        """Delete the snapshots of a partition that are older than the one to keep; returns how many.

        Older: of a lower fence token, or of the same one at a lower position. So neither what the same owner begins
        meanwhile is deleted, nor, by an owner that has been replaced and does not know it, what the next one saves.
        """
        leftovers = [
            name
            for name in await self._snapshots(token_of(partition))
            if name.subject != keep.subject and (name.fence, name.position) < (keep.fence, keep.position)
        ]
        for name in leftovers:
            await self._purge(self.stream, name.subject)
        return len(leftovers)

    async def sweep(self, known: Iterable[StatePointer], *, idle_s: float = SWEEP_IDLE_S) -> int:
        """Delete snapshots that nothing points at and that have not grown for `idle_s`; returns how many.

        `known` are all pointers of the bucket: a state that is missing there is deleted. By the server's clock.
        """
        in_use = {pointer.subject for pointer in known}
        leftovers = [name for name in await self._snapshots("*") if name.subject not in in_use]
        removed = 0
        for name in leftovers:
            if await self._idle_s(name) >= idle_s:
                await self._purge(self.stream, name.subject)
                removed += 1
        return removed

    async def _snapshots(self, token: str) -> list[SnapshotName]:
        found = await list_subjects(self._api, self.stream, chunk_subject(f"{self.root}.{token}.*", 0))
        names = (parse_chunk_subject(subject, self.root) for subject in sorted(found.subjects))
        return [name for name in names if name]

    async def _idle_s(self, name: SnapshotName) -> float:
        """How long ago its newest chunk was stored; 0 when it is gone already."""
        answer = await self._api.call(f"STREAM.INFO.{self.stream}")
        try:
            newest = await self._api.call(f"STREAM.MSG.GET.{self.stream}", {"last_by_subj": f"{name.subject}.*"})
        except NotFound:
            return 0.0
        return (_moment(answer["ts"]) - _moment(newest["message"]["time"])).total_seconds()

    async def _purge(self, stream: str, subject: str) -> int:
        # Without a filter the server would empty the stream.
        assert subject
        answer = await self._api.call(f"STREAM.PURGE.{stream}", {"filter": f"{subject}.*"})
        return int(answer.get("purged", 0))

    async def _clean_up(self, subject: str) -> None:
        try:
            async with asyncio.timeout(_CLEAN_UP_S):
                await self._purge(self.stream, subject)
        except (PartiError, TimeoutError) as error:
            _log.warning("an unfinished snapshot is left to the sweep", subject=subject, error=str(error))

    async def persist(self, attempt: Callable[[], Awaitable[_T]], *, unless: type[PartiError] | tuple[()] = ()) -> _T:
        """Try until it works, or the outage has lasted too long, or the error is not one of an outage."""
        clock = asyncio.get_running_loop().time
        ends_s, delay_s = clock() + self._stall_s, _RETRY_MIN_S
        while True:
            try:
                return await attempt()
            except PartiError as error:
                if not _passes(error) or isinstance(error, unless) or clock() >= ends_s:
                    raise
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.5))
            delay_s = min(delay_s * 2, _RETRY_MAX_S)


def _passes(error: PartiError) -> bool:
    """Whether an error may be over soon: a server that restarts has no JetStream, then no streams, for a moment."""
    if isinstance(error, ApiError):
        return (error.status == 503 and error.code not in _FULL) or error.code == _STREAM_NOT_FOUND
    return error.retryable or isinstance(error, JetStreamUnavailable)


def _without_pause(since_s: float) -> float:
    now_s = time.time()
    if now_s - since_s > MAX_PAUSE_S:
        raise StateRemoved(
            f"the snapshot stood still for {now_s - since_s:.0f} s and may have been swept; take it again"
        )
    return now_s


async def _cut(pieces: AsyncIterable[bytes], size: int) -> AsyncIterator[bytes]:
    """The same bytes in pieces of `size`; only the last one may be shorter."""
    parts: list[bytes] = []
    have = 0
    async for piece in pieces:
        rest = memoryview(piece)
        while have + len(rest) >= size:
            taken = size - have
            yield b"".join([*parts, rest[:taken]])
            rest, parts, have = rest[taken:], [], 0
        if rest:
            parts.append(bytes(rest))
            have += len(rest)
    if have:
        yield b"".join(parts)


async def _drop(tasks: Iterable[asyncio.Task[_T]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _moment(stamp: str) -> datetime:
    # The server writes up to nine digits of a second, datetime reads six.
    whole, _, fraction = stamp.rstrip("Z").partition(".")
    return datetime.fromisoformat(f"{whole}.{fraction[:6].ljust(6, '0')}+00:00")
