"""What a handler may give as a snapshot, and how `restore` is called: threads, forms, errors."""

from __future__ import annotations

import asyncio
import io
import sqlite3
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from parti.errors import ConfigError, StateFailed
from parti.model.partition import Partition
from parti.model.state import StatePointer
from parti.worker.state import is_stateful
from parti.worker.state_exchange import (
    AsyncSavedState,
    Incoming,
    SavedState,
    call_restore,
    pieces_of,
)

P = Partition("p1", "t.p1", {"p": "p1"})
POINTER = StatePointer(partition="p1", position=5, size=4, subject="s", at=datetime(2026, 11, 16, tzinfo=UTC))


async def read(snapshot: Callable[[Partition], Any]) -> bytes:
    return b"".join([piece async for piece in pieces_of(snapshot, P)])


def plain_bytes(_: Partition) -> bytes:
    return b"abcd"


def plain_view(_: Partition) -> memoryview:
    return memoryview(bytearray(b"abcd"))


def plain_list(_: Partition) -> list[bytes]:
    return [b"ab", b"", b"cd"]


def plain_generator(_: Partition) -> Iterator[bytes]:
    yield b"ab"
    yield b"cd"


def plain_file(_: Partition) -> io.BytesIO:
    return io.BytesIO(b"abcd")


def one_buffer_filled_again(_: Partition) -> Iterator[bytearray]:
    buffer = bytearray(2)
    for part in (b"ab", b"cd"):
        buffer[:] = part
        yield buffer


async def async_bytes(_: Partition) -> bytes:
    await asyncio.sleep(0)
    return b"abcd"


async def async_list(_: Partition) -> list[bytes]:
    return [b"ab", b"cd"]


async def async_generator(_: Partition) -> AsyncIterator[bytes]:
    yield b"ab"
    await asyncio.sleep(0)
    yield b"cd"


async def async_that_returns_a_generator(partition: Partition) -> AsyncIterator[bytes]:
    return async_generator(partition)


def plain_that_returns_a_generator(partition: Partition) -> AsyncIterator[bytes]:
    return async_generator(partition)


def plain_that_returns_a_coroutine(partition: Partition) -> Any:
    return async_list(partition)


class AsyncObject:
    async def __call__(self, _: Partition) -> bytes:
        return b"abcd"


FORMS = [
    plain_bytes,
    plain_view,
    plain_list,
    plain_generator,
    plain_file,
    one_buffer_filled_again,
    async_bytes,
    async_list,
    async_generator,
    async_that_returns_a_generator,
    plain_that_returns_a_generator,
    plain_that_returns_a_coroutine,
    AsyncObject(),
]


@pytest.mark.parametrize("snapshot", FORMS, ids=lambda form: getattr(form, "__name__", "object"))
async def test_a_snapshot_may_have_any_of_these_forms(snapshot: Callable[[Partition], Any]) -> None:
    assert await read(snapshot) == b"abcd"


async def test_an_empty_snapshot_is_a_snapshot() -> None:
    assert await read(lambda _: b"") == b""
    assert await read(lambda _: []) == b""


@pytest.mark.parametrize("wrong", [None, 7, "text", ["text"], [1, 2], object()], ids=lambda wrong: repr(type(wrong)))
async def test_what_is_not_bytes_is_refused_with_the_name_of_the_partition(wrong: Any) -> None:
    with pytest.raises(StateFailed, match=r"snapshot of partition 'p1' failed: TypeError: expected .*bytes"):
        await read(lambda _: wrong)


async def test_a_snapshot_that_raises_is_reported_with_its_error() -> None:
    def broken(_: Partition) -> Iterator[bytes]:
        yield b"ab"
        raise OSError("disk gone")

    async def broken_too(_: Partition) -> bytes:
        raise OSError("disk gone")

    for snapshot in (broken, broken_too):
        with pytest.raises(StateFailed, match="'p1' failed: OSError: disk gone") as caught:
            await read(snapshot)
        assert isinstance(caught.value.__cause__, OSError)


async def test_a_thread_that_exits_does_not_take_the_worker_with_it() -> None:
    def leaves(_: Partition) -> bytes:
        raise SystemExit(3)

    with pytest.raises(StateFailed, match="SystemExit"):
        await read(leaves)


async def test_something_cancelled_inside_a_snapshot_is_a_failure_and_no_cancellation() -> None:
    async def cancelled(_: Partition) -> bytes:
        raise asyncio.CancelledError

    with pytest.raises(StateFailed, match="cancelled"):
        await read(cancelled)


async def test_a_plain_snapshot_runs_in_one_thread_from_its_call_to_its_end(tmp_path: Path) -> None:
    def rows(_: Partition) -> Iterator[bytes]:
        # sqlite refuses a connection that is used in another thread than the one that opened it.
        database = sqlite3.connect(tmp_path / "state.db")
        try:
            database.execute("create table t (v blob)")
            database.executemany("insert into t values (?)", [(bytes(100_000),)] * 20)
            for (value,) in database.execute("select v from t"):
                yield value
        finally:
            database.close()
            ended.append(threading.get_ident())

    ended: list[int] = []
    assert len(await read(rows)) == 2_000_000
    assert ended
    assert threading.get_ident() not in ended


async def test_a_snapshot_that_nobody_reads_on_is_closed_in_its_thread() -> None:
    closed = threading.Event()
    made = 0

    def endless(_: Partition) -> Iterator[bytes]:
        nonlocal made
        try:
            while True:
                made += 1
                yield bytes(300_000)
        finally:
            closed.set()

    pieces = pieces_of(endless, P)
    await anext(pieces)
    await pieces.aclose()
    assert await asyncio.to_thread(closed.wait, 5)
    assert made <= 5


async def test_an_async_snapshot_that_nobody_reads_on_is_closed_at_once() -> None:
    closed = False

    async def endless(_: Partition) -> AsyncIterator[bytes]:
        nonlocal closed
        try:
            while True:
                yield b"x"
        finally:
            closed = True

    pieces = pieces_of(endless, P)
    await anext(pieces)
    await pieces.aclose()
    assert closed


async def chunks(*parts: bytes, error: Exception | None = None) -> AsyncGenerator[bytes, None]:
    for part in parts:
        yield part
    if error:
        raise error


async def test_a_plain_restore_reads_in_a_thread() -> None:
    def restore(_: Partition, state: SavedState) -> None:
        seen.append((list(state), threading.get_ident(), state.position, state.size))

    seen: list[Any] = []
    await call_restore(restore, P, SavedState(Incoming(chunks(b"ab", b"cd")), POINTER))
    [(pieces, thread, position, size)] = seen
    assert (pieces, position, size) == ([b"ab", b"cd"], 5, 4)
    assert thread != threading.get_ident()


async def test_a_coroutine_restore_reads_on_the_loop() -> None:
    async def restore(_: Partition, state: AsyncSavedState) -> None:
        seen.append(await anext(state))
        seen.append(await state.read())

    seen: list[bytes] = []
    await call_restore(restore, P, AsyncSavedState(Incoming(chunks(b"ab", b"cd", b"ef")), POINTER))
    assert seen == [b"ab", b"cdef"]


async def test_read_gives_all_at_once_in_a_thread_too() -> None:
    seen: list[bytes] = []
    state = SavedState(Incoming(chunks(b"ab", b"cd")), POINTER)
    await call_restore(lambda _, s: seen.append(s.read()), P, state)
    assert seen == [b"abcd"]


async def test_a_plain_function_that_returns_a_coroutine_is_not_taken_for_a_restore() -> None:
    async def late(_: Partition, state: Any) -> None:
        raise AssertionError("never awaited")

    def restore(partition: Partition, state: Any) -> Any:
        return late(partition, state)

    with pytest.raises(TypeError, match="async def"):
        await call_restore(restore, P, None)


async def test_a_state_for_a_thread_refuses_the_thread_of_the_loop_instead_of_waiting_for_ever() -> None:
    with pytest.raises(StateFailed, match="async def restore"):
        next(SavedState(Incoming(chunks(b"ab")), POINTER))


async def test_a_state_that_failed_once_never_looks_finished() -> None:
    incoming = Incoming(chunks(b"ab", error=OSError("cut")))
    assert await incoming.next() == b"ab"
    for _ in range(2):
        with pytest.raises(OSError, match="cut"):
            await incoming.next()


async def test_a_state_whose_reading_was_interrupted_never_looks_finished() -> None:
    async def stuck() -> AsyncGenerator[bytes, None]:
        yield b"ab"
        await asyncio.Event().wait()

    incoming = Incoming(stuck())
    await incoming.next()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(incoming.next(), 0.01)
    with pytest.raises(StateFailed, match="interrupted"):
        await incoming.next()


async def test_nothing_comes_after_the_end_of_restore() -> None:
    incoming = Incoming(chunks(b"ab"))
    await incoming.aclose()
    with pytest.raises(StateFailed, match="not available any more"):
        await incoming.next()


class Stateful:
    def __call__(self, message: Any) -> None: ...

    def snapshot(self, partition: Partition) -> bytes:
        return b""

    def restore(self, partition: Partition, state: SavedState | None) -> None: ...


def test_a_handler_with_both_methods_is_stateful_and_a_function_is_not() -> None:
    assert is_stateful(Stateful())
    assert not is_stateful(plain_bytes)


def test_half_a_stateful_handler_is_a_mistake() -> None:
    class Half:
        def snapshot(self, partition: Partition) -> bytes:
            return b""

    with pytest.raises(ConfigError, match="snapshot alone"):
        is_stateful(Half())
