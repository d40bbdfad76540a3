"""A worker as a process: signals, draining and exit codes."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import structlog

from parti.app.gil_guard import exit_when_gil_is_held
from parti.app.signals import exit_at_once, on_leave_signals
from parti.app.supervisor import own_slot
from parti.config import Settings
from parti.telemetry.logs import configure_logging, name_process
from parti.telemetry.tasks import beside

_log = structlog.get_logger("parti.process")
_START_GRACE_S = 1.0
STALLED = 70
"""Exit code of a worker that stood still; a supervisor restarts it."""
T = TypeVar("T")


class Servable(Protocol):
    """A worker of partitions or of jobs."""

    settings: Settings
    on_worker_id: Callable[[str], None]
    on_stalled: Callable[[str], None] | None

    @property
    def finished(self) -> int:
        """What it has finished since the start."""

    async def start(self) -> None:
        """Begin, or raise what is wrong."""

    def announce(self) -> None:
        """Say in one log line what it does."""

    async def stop(self, *, drain: bool = True) -> bool:
        """Drain and leave; True when nothing was left to be delivered again."""
        ...


def run_on_loop(main: Coroutine[Any, Any, T], event_loop: str = "auto") -> T:
    """Run a coroutine on a new event loop: uvloop's, where it is installed and not declined (`asyncio`)."""
    factory = None if event_loop == "asyncio" else _uvloop_factory()
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


def _uvloop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415 - an extra, and not there on every platform
    except ImportError:
        return None
    return uvloop.new_event_loop


def run_worker(worker: Servable, *, gil_timeout_s: float | None = None) -> int:
    """Run a worker as this process, on the event loop and with the logs that its settings name; see `serve`."""
    settings = worker.settings

    def speak() -> None:
        configure_logging(settings.log_level, settings.log_format)

    # A worker that cannot start says so in one line; what led there is only of interest to who asked for it.
    configure_logging("warning" if settings.log_level == "info" else settings.log_level, settings.log_format)
    return run_on_loop(serve(worker, on_started=speak, gil_timeout_s=gil_timeout_s), settings.event_loop)


async def serve(
    worker: Servable, on_started: Callable[[], None] = lambda: None, *, gil_timeout_s: float | None = None
) -> int:
    """Run a worker until SIGTERM or SIGINT, then drain; a second signal leaves at once.

    Raises what `Worker.start` raises; calls `on_started` when it has not, or is told to leave before that.

    Returns the exit code: 0 when everything was finished and stored, 1 when something was left to be delivered
    again, `STALLED` when the worker stood still and a restart of its reading side did not help.

    With `gil_timeout_s`, once the worker has started, the process ends with 1 when no thread has run for so long.
    """
    worker.on_worker_id = lambda worker_id: name_process(worker=worker_id)
    leave = asyncio.Event()
    stalled = threading.Event()
    loop = asyncio.get_running_loop()

    def stand_still(reason: str) -> None:
        stalled.set()
        loop.call_soon_threadsafe(leave.set)
        # What stands still may not be able to leave in order. Its lease ends by itself then.
        timer = threading.Timer(worker.settings.lease_ttl_s, os._exit, (STALLED,))
        timer.daemon = True
        timer.start()

    worker.on_stalled = stand_still

    supervised = own_slot() is not None

    def drain(number: signal.Signals) -> None:
        on_started()  # whoever interrupts a start wants to know what goes on
        _log.info("draining: no new messages, running handlers finish", signal=number.name)
        leave.set()

    def leave_now(number: signal.Signals) -> None:
        if supervised:
            return  # service managers signal supervisor and child alike; killing is the supervisor's to decide
        _log.warning("second signal: leaving at once", signal=number.name)
        exit_at_once(number)

    on_leave_signals(drain, leave_now)
    async with beside(worker.start(), _told(leave), name="start") as (starting, told):
        await asyncio.wait({starting, told}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            # It may be handling already, with little left to do: cancelled now, handlers would be too.
            await asyncio.wait({starting}, timeout=_START_GRACE_S)
            starting.cancel()
        await asyncio.gather(starting, return_exceptions=leave.is_set())
    if not leave.is_set():
        on_started()
        worker.announce()
    with _gil_guard(gil_timeout_s):
        cancelled = await _is_cancelled_before(leave)
        clean = await (worker.stop(drain=False) if cancelled or stalled.is_set() else worker.stop()) and not cancelled
    _log.info("worker left", finished=worker.finished, clean=clean)
    if stalled.is_set():
        return STALLED
    return 0 if clean else 1


def _gil_guard(timeout_s: float | None) -> AbstractContextManager[None]:
    return nullcontext() if timeout_s is None else exit_when_gil_is_held(timeout_s)


async def _is_cancelled_before(leave: asyncio.Event) -> bool:
    """Wait until it is time to leave; True when other code has cancelled this process's main task.

    A handler does so that cancels all tasks. Those of the client library have gone with it, so nothing is heard any
    more: what is left is to leave, for others to take over.
    """
    main = asyncio.current_task()
    try:
        await leave.wait()
    except asyncio.CancelledError:
        if main:
            main.uncancel()
        _log.error(
            "other code has cancelled the main task of this process, as a handler that cancels all does; it leaves"
        )
        return True
    return False


async def _told(leave: asyncio.Event) -> None:
    await leave.wait()
