"""What SIGTERM and SIGINT mean to a process of parti: the first asks it to leave in order, a second one means now."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Never, TypeVar

T = TypeVar("T")

LEAVE = (signal.SIGTERM, signal.SIGINT)
"""The signals that ask a process to leave; it does not matter which of them comes first, or twice."""


def on_leave_signals(leave: Callable[[signal.Signals], None], leave_now: Callable[[signal.Signals], None]) -> None:
    """Call `leave` for the first of these signals and `leave_now` for each one after it, from now on.

    Both run on the running event loop, which must be the main thread's, between two of its steps: they may touch what
    coroutines touch.
    """
    loop = asyncio.get_running_loop()
    asked = False

    def hear(number: signal.Signals) -> None:
        nonlocal asked
        if asked:
            leave_now(number)
        else:
            asked = True
            leave(number)

    for number in LEAVE:
        loop.add_signal_handler(number, hear, number)


def run_interruptibly(main: Coroutine[Any, Any, T]) -> T:
    """Run what a command does, as `asyncio.run` does, with Ctrl-C heard between two steps of the event loop.

    The first one cancels `main` and comes out as `KeyboardInterrupt` when that has tidied up, a second one at once.
    asyncio.run cancels from within the signal handler, in the middle of whatever runs: a timer that has just found
    its future waiting then fails to set it, and says so in a traceback. `on_leave_signals` takes precedence.
    """
    asked = False

    async def heeding() -> T:
        task = asyncio.current_task()
        assert task

        def hear() -> None:
            nonlocal asked
            if asked:
                raise KeyboardInterrupt
            asked = True
            task.cancel()

        if threading.current_thread() is threading.main_thread():  # no other one hears signals
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, hear)
        return await main

    try:
        return asyncio.run(heeding())
    except asyncio.CancelledError:
        if asked:
            raise KeyboardInterrupt from None
        raise


class Asked(threading.Event):
    """Set when the process was asked to leave; knows by which signal."""

    number: signal.Signals | None = None
    """The first signal that came."""


@contextmanager
def leave_event(leave_now: Callable[[signal.Signals], None] = lambda number: None) -> Iterator[Asked]:
    """The same for code without an event loop, for the length of a block: the first signal sets the event.

    `leave_now` is called for each one after it, in the main thread, in the middle of whatever runs there: what it
    raises comes out there. The handlers that were in place before are put back. In another thread than the main one,
    which Python lets hear no signals, the event is never set.
    """
    asked = Asked()

    def hear(number: int, frame: FrameType | None) -> None:
        if asked.number is not None:
            leave_now(signal.Signals(number))
            return
        asked.number = signal.Signals(number)
        asked.set()

    heard = LEAVE if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, hear) for number in heard}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_at_once(number: signal.Signals) -> Never:
    """End this process without any tidying up, with the exit code that a shell gives for the signal."""
    os._exit(128 + number)
