"""Guard against code that holds the GIL: ends a process in which no thread of Python can run any more.

The watchdog is a thread of Python and needs the GIL as well. This guard is a thread in C of `faulthandler`, which a
thread of Python postpones again and again. That thread does nothing else: the watchdog's writes logs and notes, which
may take longer than the timeout.
"""

from __future__ import annotations

import faulthandler
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_MOST_TICK_S = 0.5
_TICKS = 10
_STDERR = 2
"""The file itself: `sys.stderr` may be none, or no file."""


@contextmanager
def exit_when_gil_is_held(timeout_s: float) -> Iterator[None]:
    """While the block runs, end this process if no thread of Python has run for `timeout_s`.

    The stacks of all threads go to stderr, and the exit code is 1, which faulthandler does not let choose. The clock
    goes on while the process is stopped (SIGSTOP): one that was stopped for longer ends when it is continued.

    A process has one such timeout, `faulthandler.dump_traceback_later`: while the block runs it is taken.
    """
    leaving = threading.Event()
    timeout_s = min(timeout_s, threading.TIMEOUT_MAX)
    thread = threading.Thread(target=_postpone, args=(timeout_s, leaving), name="parti-gil-guard", daemon=True)
    thread.start()
    try:
        yield
    finally:
        leaving.set()
        thread.join()  # else it could begin a timeout after this one was cancelled
        faulthandler.cancel_dump_traceback_later()


def _postpone(timeout_s: float, leaving: threading.Event) -> None:
    tick_s = min(_MOST_TICK_S, timeout_s / _TICKS)
    while True:
        with suppress(RuntimeError):  # no more threads: at the next tick there may be one
            faulthandler.dump_traceback_later(timeout_s, exit=True, file=_STDERR)
        if leaving.wait(tick_s):
            return
