"""State of stateful handlers: taken by `snapshot`, given back by `restore`, kept in the state store in between.

The record `state.<partition>` says which snapshot counts and at which position it was taken. It is written by
compare-and-set after the last chunk, and a new owner puts its fence token in before it restores, so an owner that has
been replaced cannot change what the next one began with.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterator
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec
import structlog

from parti.errors import (
    ConfigError,
    DecodeError,
    LeaseLost,
    NotFound,
    PartiError,
    StateCorrupt,
    StateError,
    StateFenced,
    StateRemoved,
    StateUnavailable,
    WrongRevision,
)
from parti.jetstream.kv import Entry
from parti.jetstream.state_store import MAX_PAUSE_S, StateStore
from parti.model.fleet import decode, encode
from parti.model.partition import Partition
from parti.model.state import StatePointer, state_key
from parti.telemetry.tasks import owned
from parti.worker.state_exchange import (
    AsyncSavedState,
    Incoming,
    SavedState,
    blamed,
    call_restore,
    is_async,
    pieces_of,
)

_log = structlog.get_logger("parti.state")

AT_ONCE = 4
"""Snapshots and restores that run at the same time; each needs a few chunks of memory."""
_ATTEMPTS = 5
_PAUSE_S = 0.02


class StatefulHandler(Protocol):
    """A handler that keeps state. Both methods may be plain, then they run in a thread, or coroutines."""

    def snapshot(self, partition: Partition) -> Any:
        """The state of a partition: bytes, an iterable or an async iterable of bytes, or a coroutine of those."""

    def restore(self, partition: Partition, state: Any) -> Any:
        """Begin with a state: a `SavedState` (coroutine: `AsyncSavedState`), or None to begin without."""


class PointerStore(Protocol):
    """Where pointers are kept: the bucket itself, or the bucket under a lease."""

    async def get(self, key: str) -> Entry | None:
        """Read a key from the leader; None when it never existed."""

    async def put(self, key: str, value: bytes, *, revision: int) -> int:
        """Write a key if its revision is still `revision`; returns the new one."""
        ...


def is_stateful(handler: object) -> bool:
    """Whether a handler offers `snapshot` and `restore`; ConfigError when it offers only one of them."""
    offered = [name for name in ("snapshot", "restore") if callable(getattr(handler, name, None))]
    if len(offered) == 1:
        raise ConfigError(
            f"handler {handler!r} offers {offered[0]} alone; expected both snapshot and restore, or none of them"
        )
    return bool(offered)


class StateKeeper:
    """Saves and loads the state of a handler's partitions.

    Whoever calls sees to it that no handler of the partition runs meanwhile, and that a partition is saved or loaded
    once at a time. Errors are `StateError`s that name the partition, or `LeaseLost`. A call that is cancelled
    abandons a plain `snapshot` or `restore`: its thread fails at the next piece. `settle` before the connection is
    closed.
    """

    def __init__(
        self, handler: StatefulHandler, store: StateStore, pointers: PointerStore, *, at_once: int = AT_ONCE
    ) -> None:
        self._handler = handler
        self._store = store
        self._pointers = pointers
        self._turns = asyncio.Semaphore(at_once)
        self._chores: set[asyncio.Task[None]] = set()

    async def save(
        self, partition: Partition, *, position: int, fence: int, worker: str = "", stream_created: str = ""
    ) -> StatePointer:
        """Take a snapshot and make it the state of the partition at `position`.

        When this fails, the state before still counts; after `StateUnavailable` it may be the new one. Either is
        whole. `StateFenced`: a newer owner has written the record. `StateFailed`: the handler's `snapshot` did not
        give a state.
        """
        async with self._turns:
            with _named(partition, "saved"):
                before, revision = await self._read(partition)
                _check_fence(before, partition, fence)
                async with contextlib.aclosing(pieces_of(self._handler.snapshot, partition)) as pieces:
                    pointer = await self._store.put(
                        partition.id,
                        pieces,
                        fence=fence,
                        position=position,
                        stream_created=stream_created,
                        worker=worker,
                    )
                before = await self._point(partition, pointer, before, revision)
            if before is not None:
                self._clear(partition, self._store.remove(before))
            return pointer

    async def load(self, partition: Partition, *, fence: int, stream_created: str = "") -> int | None:
        """Give the handler the state of the partition; returns the position to begin at, None when there is no state.

        Without a state, or with one of a stream that has been made anew since, the handler begins with None. Returns
        only when every byte has been verified. On any error the partition must not begin: the handler may hold half
        a state. `restore` may be called again, with a newer state, when the one that it reads has been replaced.
        """
        async with self._turns:
            with _named(partition, "loaded"):
                pointer = await self._load(partition, fence, stream_created)
            if pointer is None:
                return None
            self._clear(partition, self._store.remove_older(partition.id, pointer))
            return pointer.position

    async def _load(self, partition: Partition, fence: int, stream_created: str) -> StatePointer | None:
        for _ in range(_ATTEMPTS):
            pointer = await self._take_over(partition, fence)
            if not pointer.holds_state or not _belongs(pointer, stream_created):
                with blamed("restore", partition):
                    await call_restore(self._handler.restore, partition, None)
                return None
            try:
                await self._restore(partition, pointer)
            except StateRemoved as error:
                newest, _ = await self._read(partition)
                if newest is None or newest.subject == pointer.subject:
                    raise StateCorrupt(f"{error}; the pointer names it all the same, so it is lost") from error
                continue
            return pointer
        raise StateUnavailable(f"the state of partition {partition.id!r} is replaced faster than it can be read")

    async def settle(self) -> None:
        """Wait until everything that no pointer names any more is removed, as far as that is possible now."""
        while self._chores:
            await asyncio.wait(self._chores)

    def _clear(self, partition: Partition, removal: Awaitable[int]) -> None:
        """Remove in the background: a large state takes its time, and the partition should not wait for it."""

        async def clear() -> None:
            try:
                await removal
            except PartiError as error:
                _log.warning("an old state is left to the sweep", partition=partition.id, error=str(error))

        # Should it die, the sweep removes what is left: reported in the log, no reason to call the worker unhealthy.
        owned(clear(), "state-removal", keep=self._chores, signals=False)

    async def _read(self, partition: Partition) -> tuple[StatePointer | None, int]:
        entry = await self._store.persist(lambda: self._pointers.get(state_key(partition.id)))
        if entry is None or not entry.value:
            return None, entry.revision if entry else 0
        try:
            return decode(entry.value, StatePointer), entry.revision
        except DecodeError as error:
            raise StateCorrupt(
                f"the pointer to the state of partition {partition.id!r} is unreadable ({error}); delete the key "
                f"{state_key(partition.id)!r} to begin without state"
            ) from None

    async def _take_over(self, partition: Partition, fence: int) -> StatePointer:
        """The pointer, with our fence token in it.

        That there is no pointer is believed only when one could be created: a bucket whose server restarts looks
        empty for a moment.
        """
        for attempt in range(_ATTEMPTS):
            pointer, revision = await self._read(partition)
            _check_fence(pointer, partition, fence)
            if pointer is not None and pointer.fence >= fence:
                return pointer
            ours = msgspec.structs.replace(
                pointer or StatePointer(partition=partition.id, at=datetime.now(UTC)), fence=fence
            )
            try:
                await self._pointers.put(state_key(partition.id), encode(ours), revision=revision)
                return ours
            except PartiError as error:
                if not _undecided(error):
                    raise
            await asyncio.sleep(_PAUSE_S * 2**attempt)
        raise StateUnavailable(
            f"the state of partition {partition.id!r} could not be taken over in {_ATTEMPTS} attempts; try again"
        )

    async def _point(
        self, partition: Partition, pointer: StatePointer, before: StatePointer | None, revision: int
    ) -> StatePointer | None:
        """Make the pointer count if nobody else has written the record since; returns the one that it replaced."""
        for attempt in range(_ATTEMPTS):
            if (datetime.now(UTC) - pointer.at).total_seconds() > MAX_PAUSE_S:
                raise StateRemoved(f"the snapshot of partition {partition.id!r} is too old to be used; take it again")
            try:
                await self._pointers.put(state_key(partition.id), encode(pointer), revision=revision)
                return before
            except PartiError as error:
                if not _undecided(error):
                    raise
            found, now = await self._read(partition)
            if found is not None and found.subject == pointer.subject:
                return before  # Written, only the answer got lost.
            if now and now != revision:
                if not (found and found.fence == pointer.fence and pointer.fence):
                    self._clear(partition, self._store.remove(pointer))
                    raise StateFenced(_fenced(partition, pointer.fence, found.fence if found else 0))
                # An earlier write of this owner, given up as unanswered, has arrived after all.
                before, revision = found, now
            await asyncio.sleep(_PAUSE_S * 2**attempt)
        raise StateUnavailable(
            f"the snapshot of partition {partition.id!r} is stored, but its pointer could not be in {_ATTEMPTS} "
            f"attempts; try again"
        )

    async def _restore(self, partition: Partition, pointer: StatePointer) -> None:
        restore = self._handler.restore
        async with contextlib.aclosing(Incoming(self._store.get(pointer))) as incoming:
            kind = AsyncSavedState if is_async(restore) else SavedState
            try:
                with blamed("restore", partition):
                    await call_restore(restore, partition, kind(incoming, pointer))
            except PartiError:
                # Whatever a handler makes of a state that cannot be read, that is what is to be reported.
                incoming.check()
                raise
            while await incoming.next() is not None:
                pass  # What it did not care to read is verified all the same.


def _undecided(error: PartiError) -> bool:
    """Whether only reading back can tell what became of a write; a bucket away for a moment is "not found"."""
    return error.retryable or isinstance(error, (WrongRevision, NotFound))


@contextlib.contextmanager
def _named(partition: Partition, what: str) -> Iterator[None]:
    """Errors of connection and server get the partition's name."""
    try:
        yield
    except (StateError, LeaseLost):
        raise
    except PartiError as error:
        raise StateUnavailable(f"the state of partition {partition.id!r} could not be {what}: {error}") from error


def _belongs(pointer: StatePointer, stream_created: str) -> bool:
    if pointer.stream_created == stream_created:
        return True
    _log.warning(
        "saved state belongs to a stream that is gone; the handler begins without",
        partition=pointer.partition,
        position=pointer.position,
    )
    return False


def _check_fence(pointer: StatePointer | None, partition: Partition, fence: int) -> None:
    if fence and pointer is not None and pointer.fence > fence:
        raise StateFenced(_fenced(partition, fence, pointer.fence))


def _fenced(partition: Partition, fence: int, newer: int) -> str:
    return (
        f"the state of partition {partition.id!r} has another owner by now (fence token {newer}, ours is {fence}); "
        f"nothing was changed: this worker has been replaced"
    )
