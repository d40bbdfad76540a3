"""How a state passes between a handler and the event loop: out of `snapshot`, into `restore`.

Coroutines run on the loop, plain functions in a thread of their own from beginning to end, because what they open may
be bound to the thread, as a sqlite connection is. Neither side gets further ahead than a few pieces, so that a state
may be larger than memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import io
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Generator, Iterable, Iterator
from typing import Any, TypeAlias, TypeVar

from parti.errors import StateError, StateFailed
from parti.model.partition import Partition
from parti.model.state import StatePointer

_T = TypeVar("_T")
_Outcome: TypeAlias = tuple[_T | None, BaseException | None]

_GATHER_BYTES = 256 * 1024
"""Small pieces cross from a thread to the loop together."""
_AHEAD = 2
"""Pieces that a thread may be ahead of the event loop."""


class Incoming:
    """A state on its way to a handler; remembers an error that the handler may hide."""

    def __init__(self, chunks: AsyncGenerator[bytes, None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._chunks = chunks
        self._error: Exception | None = None
        self._closed = False

    async def next(self) -> bytes | None:
        """The next chunk; None after the last one."""
        if self._closed:
            raise StateFailed("the state is not available any more: restore has ended, or was abandoned")
        self.check()
        try:
            return await anext(self._chunks)
        except StopAsyncIteration:
            return None
        except Exception as error:
            self._error = error
            raise
        except BaseException:
            # An interrupted iterator looks finished when it is asked again, but nothing has been verified.
            self._error = StateFailed("reading the state was interrupted; it cannot be continued")
            raise

    def next_in_thread(self) -> bytes | None:
        """The same for the thread that `restore` runs in."""
        if threading.get_ident() == self._loop_thread:
            raise StateFailed(
                "this state can only be read in a thread, as by a plain restore; define `async def restore`"
            )
        return asyncio.run_coroutine_threadsafe(self.next(), self._loop).result()

    def check(self) -> None:
        """Raise the error that the state ended with."""
        if self._error is not None:
            raise self._error

    async def aclose(self) -> None:
        """Give no more."""
        self._closed = True
        with contextlib.suppress(RuntimeError):  # A thread that was abandoned still waits for a chunk.
            await self._chunks.aclose()


class _Described:
    """What a handler is told of a state besides its bytes."""

    def __init__(self, incoming: Incoming, pointer: StatePointer) -> None:
        self._incoming = incoming
        self.position = pointer.position
        """Every message below it is in the state, none above."""
        self.size = pointer.size
        """Bytes."""
        self.saved_at = pointer.at


class SavedState(_Described):
    """A saved state as a plain `restore` gets it: an iterator of bytes, to be read once.

    The last piece comes only when the whole state is verified. An exception out of it means that the state is damaged
    or cannot be read: let it pass, and use nothing of what was read.
    """

    def __iter__(self) -> Iterator[bytes]:
        """Itself."""
        return self

    def __next__(self) -> bytes:
        """The next piece; call it from the thread that `restore` runs in."""
        chunk = self._incoming.next_in_thread()
        if chunk is None:
            raise StopIteration
        return chunk

    def read(self) -> bytes:
        """All that is left, at once."""
        return b"".join(self)


class AsyncSavedState(_Described):
    """A saved state as a coroutine `restore` gets it: an async iterator of bytes; otherwise like `SavedState`."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Itself."""
        return self

    async def __anext__(self) -> bytes:
        """The next piece."""
        chunk = await self._incoming.next()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def read(self) -> bytes:
        """All that is left, at once."""
        return b"".join([chunk async for chunk in self])


async def pieces_of(snapshot: Callable[[Partition], Any], partition: Partition) -> AsyncGenerator[bytes, None]:
    """The bytes of a snapshot, whatever form it has; what it raises comes as `StateFailed`."""
    with blamed("snapshot", partition):
        if is_async(snapshot) or inspect.isasyncgenfunction(snapshot):
            found = _unfold(snapshot(partition))
        else:
            found = _from_thread(lambda: snapshot(partition))
        async with contextlib.aclosing(found) as pieces:
            async for piece in pieces:
                yield piece


async def _unfold(found: Any) -> AsyncGenerator[bytes, None]:
    """Read on the event loop what can be read there, the rest in a thread."""
    while inspect.isawaitable(found):
        found = await found
    if isinstance(found, bytes):
        yield found
        return
    if not isinstance(found, AsyncIterable):
        async with contextlib.aclosing(_from_thread(lambda: found)) as pieces:
            async for piece in pieces:
                yield piece
        return
    try:
        async for piece in found:
            yield _checked(piece)
    finally:
        if isinstance(found, AsyncGenerator):
            await found.aclose()


async def _from_thread(make: Callable[[], Any]) -> AsyncGenerator[bytes, None]:
    """What `make` returns, made and read in one thread."""
    belt = _Belt()

    def work() -> None:
        found = make()
        if inspect.isawaitable(found) or isinstance(found, AsyncIterable):
            belt.put(found)
            return
        try:
            _carry(found, belt)
        finally:
            if isinstance(found, Generator | io.IOBase):
                found.close()

    ended = _start(work)
    ended.add_done_callback(lambda _: belt.end())
    try:
        while (item := await belt.get()) is not None:
            if isinstance(item, bytes):
                yield item
                continue
            async with contextlib.aclosing(_unfold(item)) as pieces:
                async for piece in pieces:
                    yield piece
        await _outcome(ended)
    finally:
        belt.abandon()


def _carry(found: Any, belt: _Belt) -> None:
    if isinstance(found, bytes | bytearray | memoryview):
        belt.put(bytes(found))
        return
    if isinstance(found, io.IOBase):
        # A file would give lines, and one without line ends all of itself at once.
        file: Any = found
        found = iter(lambda: file.read(_GATHER_BYTES), b"")
    if not isinstance(found, Iterable):
        raise TypeError(f"expected bytes, or an iterable of bytes, got {found!r:.80}; b'' is an empty state")
    parts: list[bytes] = []
    have = 0
    for piece in found:
        parts.append(_checked(piece))
        have += len(parts[-1])
        if have >= _GATHER_BYTES:
            belt.put(b"".join(parts))
            parts, have = [], 0
    if parts:
        belt.put(b"".join(parts))


def _checked(piece: Any) -> bytes:
    if not isinstance(piece, bytes | bytearray | memoryview):
        raise TypeError(f"expected pieces of bytes, got {piece!r:.80}")
    # Copied at once unless it cannot change: whoever fills a buffer again and again hands out the same one.
    return bytes(piece)


class _Belt:
    """Carries items from a thread to the event loop; the thread waits when it is too far ahead."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[Any] = deque()
        self._arrived = asyncio.Event()
        self._room = threading.Semaphore(_AHEAD)
        self._abandoned = False

    def put(self, item: Any) -> None:
        """Hand over an item, in the thread."""
        self._room.acquire()
        if self._abandoned:
            raise RuntimeError("nobody waits for this snapshot any more")
        self._loop.call_soon_threadsafe(self._take, item)

    def _take(self, item: Any) -> None:
        self._items.append(item)
        self._arrived.set()

    def end(self) -> None:
        """Nothing more comes."""
        self._take(None)

    async def get(self) -> Any:
        """The next item; None at the end."""
        while not self._items:
            self._arrived.clear()
            await self._arrived.wait()
        self._room.release()
        return self._items.popleft()

    def abandon(self) -> None:
        """Let the thread fail at its next item, should it still run."""
        self._abandoned = True
        self._room.release()


def _start(work: Callable[[], _T]) -> asyncio.Future[_Outcome[_T]]:
    """Run a function in a thread of its own that the end of the process does not wait for."""
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    ended: asyncio.Future[_Outcome[_T]] = loop.create_future()

    def settle(outcome: _Outcome[_T]) -> None:
        if not ended.done():
            ended.set_result(outcome)

    def run() -> None:
        try:
            outcome: _Outcome[_T] = context.run(work), None
        except BaseException as error:
            outcome = None, error
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody wants to know.
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, name="parti-state", daemon=True).start()
    return ended


async def _outcome(ended: asyncio.Future[_Outcome[_T]]) -> _T | None:
    result, error = await ended
    if error is None:
        return result
    if isinstance(error, Exception):
        raise error
    raise RuntimeError(f"{type(error).__name__} in a thread") from error


async def call_restore(restore: Callable[[Partition, Any], Any], partition: Partition, state: Any) -> None:
    """Call `restore` where it belongs."""
    if is_async(restore):
        await restore(partition, state)
        return
    left = await _outcome(_start(lambda: restore(partition, state)))
    if inspect.isawaitable(left):
        if inspect.iscoroutine(left):
            left.close()
        raise TypeError("restore returned an awaitable; define it with `async def`")


def is_async(function: object) -> bool:
    """Whether a call gives a coroutine."""
    call = getattr(function, "__call__", None)  # noqa: B004 - an object may be callable by an async method
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


@contextlib.contextmanager
def blamed(method: str, partition: Partition) -> Iterator[None]:
    """Report what the handler's method raises as `StateFailed`, with the partition's name."""
    try:
        yield
    except StateError:
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise StateFailed(f"{method} of partition {partition.id!r} failed: something in it was cancelled") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise StateFailed(f"{method} of partition {partition.id!r} failed: {reason}") from error
