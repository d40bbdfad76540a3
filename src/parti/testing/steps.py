"""A handler, taken step by step: from its start, over each of its awaits, to its end.

An async handler is a coroutine: it runs until it has to wait, and whoever drives it decides when it goes on, or
whether it ever does. So a test can let something happen at exactly that moment.
"""

from __future__ import annotations

import asyncio
import inspect
import sysconfig
import threading
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, Protocol, TypeAlias

from parti.model.message import Message
from parti.worker.runners import Handler
from parti.worker.state import is_stateful

_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
START = 0
"""The point before the first line of a handler."""
END = -1
"""The point after its last line: it has returned or raised, and the worker does not know of it yet."""


@dataclass(frozen=True, slots=True)
class Point:
    """A moment in the handling of one message, at which something can happen."""

    seq: int
    """Stream sequence of the message."""
    number: int
    """`START`, `END`, or 1 for the first await that waits, 2 for the second, and so on."""
    where: str = ""
    """Place in the source, for people."""

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where else ""
        moment = {START: "the start", END: "the end"}.get(self.number, f"await {self.number}")
        return f"{moment} of message {self.seq}{place}"


class Host(Protocol):
    """The worker that a handler runs on, as far as its steps are concerned."""

    @property
    def dead(self) -> bool:
        """Nothing of it may run any more."""
        ...

    def hold(self) -> Coroutine[Any, Any, None] | None:
        """What keeps it from going on now: a pause, or, for ever, its death."""
        ...

    def reach(self, message: Message, point: Point) -> Coroutine[Any, Any, None] | None:
        """Take note of a point; what is returned, if anything, happens before the handler goes on."""
        ...

    def began(self, message: Message) -> None:
        """A call has been made."""

    def ended(self, message: Message, error: BaseException | None) -> None:
        """A call is over."""

    def bury(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Keep what will never be continued: letting go of it would run its `finally` blocks."""


_Suspended: TypeAlias = Generator[Any, Any, None]


def stepped(handler: Handler, host: Host) -> Handler:
    """The same handler, stopping at each of its points; one with state keeps `snapshot` and `restore`."""
    call = getattr(handler, "__call__", None)  # noqa: B004 - an object may be callable by an async method
    is_async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call)
    wrapped: _SteppedCoroutine | _SteppedFunction = (
        _SteppedCoroutine(handler, host) if is_async else _SteppedFunction(handler, host)
    )
    if is_stateful(handler):
        wrapped.snapshot, wrapped.restore = handler.snapshot, handler.restore  # type: ignore[union-attr]
    return wrapped


class _SteppedCoroutine:
    def __init__(self, handler: Callable[[Message], Any], host: Host) -> None:
        self._handler = handler
        self._host = host

    async def __call__(self, message: Message) -> Any:
        return await _Walk(self._handler, message, self._host)


class _Walk:
    """One call of an async handler. Awaiting it drives the handler's coroutine inside the awaiting task."""

    def __init__(self, handler: Callable[[Message], Any], message: Message, host: Host) -> None:
        self._handler = handler
        self._message = message
        self._host = host

    def __await__(self) -> Generator[Any, Any, Any]:
        host, message = self._host, self._message
        yield from self._stop(START, "")
        coroutine = self._handler(message)
        code = coroutine.cr_code
        host.began(message)
        number, result, failure = 0, None, None
        resume: Callable[[], Any] = lambda: coroutine.send(None)  # noqa: E731 - replaced in the loop
        while True:
            try:
                waits_for = resume()
            except StopIteration as returned:
                result = returned.value
                break
            except BaseException as raised:
                failure = raised
                break
            number += 1
            try:
                yield from self._stop(number, _place(coroutine))
                yield waits_for
                yield from self._halt()
            except BaseException as thrown:  # its task was cancelled: that is the handler's business, if it lives
                if host.dead:
                    host.bury(coroutine)
                    raise
                resume = _thrower(coroutine, thrown)
            else:
                resume = lambda: coroutine.send(None)  # noqa: E731
        host.ended(message, failure)
        if not isinstance(failure, (asyncio.CancelledError, GeneratorExit)):
            yield from self._stop(END, _of(code, code.co_firstlineno))
        if failure is not None:
            raise failure
        return result

    def _stop(self, number: int, where: str) -> _Suspended:
        happening = self._host.reach(self._message, Point(self._message.seq, number, where))
        if happening is not None:
            yield from happening.__await__()
        yield from self._halt()

    def _halt(self) -> _Suspended:
        """Stay here while the worker does not run."""
        while (holding := self._host.hold()) is not None:
            yield from holding.__await__()


def _thrower(coroutine: Coroutine[Any, Any, Any], error: BaseException) -> Callable[[], Any]:
    return lambda: coroutine.throw(error)


class _SteppedFunction:
    """A plain handler, which runs in a thread: it cannot be stopped inside, only before and after."""

    def __init__(self, handler: Callable[[Message], Any], host: Host) -> None:
        self._handler = handler
        self._host = host
        self._loop = asyncio.get_running_loop()

    def __call__(self, message: Message) -> Any:
        self._stop(message, START)
        error: BaseException | None = None
        self._loop.call_soon_threadsafe(self._host.began, message)
        try:
            return self._handler(message)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._loop.call_soon_threadsafe(self._host.ended, message, error)
            self._stop(message, END)

    def _stop(self, message: Message, number: int) -> None:
        async def reach() -> None:
            if happening := self._host.reach(message, Point(message.seq, number)):
                await happening
            # Of a dead one the thread is kept, below: nobody could wait for a coroutine that never ends.
            while not self._host.dead and (holding := self._host.hold()) is not None:
                await holding

        if not self._host.dead:
            asyncio.run_coroutine_threadsafe(reach(), self._loop).result()
        if self._host.dead:
            threading.Event().wait()  # a daemon's thread: it ends with the process


def _place(coroutine: Coroutine[Any, Any, Any]) -> str:
    """Where a handler waits: its own line, and the innermost function of the user's that it has called."""
    outer = inner = next_one = coroutine
    while inspect.iscoroutine(next_one := next_one.cr_await):  # type: ignore[attr-defined]
        if not next_one.cr_code.co_filename.startswith(_LIBRARIES):
            inner = next_one
    places = [_of(each.cr_code, _line(each)) for each in ([outer] if inner is outer else [outer, inner])]  # type: ignore[attr-defined]
    return " > ".join(places)


def _line(coroutine: Coroutine[Any, Any, Any]) -> int:
    frame = coroutine.cr_frame  # type: ignore[attr-defined]
    return frame.f_lineno if frame else 0


def _of(code: CodeType, line: int) -> str:
    return f"{Path(code.co_filename).name}:{line} in {code.co_name}"
