"""A worker as a process: signals, draining and exit codes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Protocol

import structlog

from parti.app.supervisor import own_slot
from parti.telemetry.logs import name_process

_log = structlog.get_logger("parti.process")
_START_GRACE_S = 1.0


class Servable(Protocol):
    """A worker of partitions or of jobs."""

    on_worker_id: Callable[[str], None]

    @property
    def finished(self) -> int:
        """What it has finished since the start."""

    async def start(self) -> None:
        """Begin, or raise what is wrong."""

    def announce(self) -> None:
        """Say in one log line what it does."""

    async def stop(self) -> bool:
        """Drain and leave; True when nothing was left to be delivered again."""
        ...


async def serve(worker: Servable, on_started: Callable[[], None] = lambda: None) -> int:
    """Run a worker until SIGTERM or SIGINT, then drain; a second signal leaves at once.

    Raises what `Worker.start` raises; calls `on_started` when it has not.

    Returns the exit code: 0 when everything was finished and stored, 1 when something was left to be delivered
    again.
    """
    loop = asyncio.get_running_loop()
    worker.on_worker_id = lambda worker_id: name_process(worker=worker_id)
    leave = asyncio.Event()

    supervised = own_slot() is not None

    def on_signal(number: signal.Signals) -> None:
        if leave.is_set():
            if supervised:
                return  # service managers signal supervisor and child alike; killing is the supervisor's to decide
            _log.warning("second signal: leaving at once", signal=number.name)
            os._exit(128 + number)
        _log.info("draining: no new messages, running handlers finish", signal=number.name)
        leave.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    starting = asyncio.create_task(worker.start())
    waiting = asyncio.create_task(leave.wait())
    await asyncio.wait({starting, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        # It may be handling already, with little left to do: cancelled now, handlers would be too.
        await asyncio.wait({starting}, timeout=_START_GRACE_S)
        starting.cancel()
    await asyncio.gather(starting, return_exceptions=leave.is_set())
    if not leave.is_set():
        on_started()
        worker.announce()
    await leave.wait()
    clean = await worker.stop()
    _log.info("worker left", finished=worker.finished, clean=clean)
    return 0 if clean else 1
