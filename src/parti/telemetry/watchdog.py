"""The watchdog of a worker: a thread that notices when nothing moves, tells, restarts what reads, and leaves.

It needs no task and no callback of the worker to be alive: the thread asks the event loop for a look, and an event
loop that does not answer is itself a stall. What counts as one, and what follows from it, is decided in
`parti.core.stall`.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog

from parti.core.stall import Escalation, Look, Stall, StallDetector, StallKind, Step
from parti.telemetry.health import Health
from parti.telemetry.metrics import Metrics

_log = structlog.get_logger("parti.watchdog")

SIGNAL = "stall"
"""Name of the health signal."""
_MOST_TICK_S = 0.5
_TICKS = 10
_FRAMES = 12
_STANDSTILL_TICKS = 4
"""A thread that slept so many ticks instead of one was stopped, and so was all else: nobody is to blame."""


@dataclass(frozen=True, slots=True)
class Watched:
    """What is watched, and what is done about it. The first three are called on the event loop."""

    look: Callable[[], Look]
    """What is due."""
    story: Callable[[], dict[str, Any]]
    """Fields of the log line that tells of a stall."""
    restart: Callable[[Stall], None]
    """Restart what reads."""
    leave: Callable[[Stall, str], None]
    """Called in the thread, like those below, and back at once: the restart has not helped."""
    tell: Callable[[Stall, str], None] = lambda stall, reason: None
    """Called in the thread: the worker stands still."""
    recovered: Callable[[Stall, str], None] = lambda stall, reason: None
    """Called in the thread: it moves again."""
    source: str = "partition"
    """What it is by whose name messages wait for handlers."""


class Watchdog:
    """Watches one worker from `start` to `stop`."""

    def __init__(
        self, watched: Watched, metrics: Metrics, health: Health, *, stall_after_s: float, grace_s: float
    ) -> None:
        """`grace_s`: how long the restart may take to help."""
        self._watched = watched
        self._metrics = metrics
        self._health = health
        self._after_s = stall_after_s
        self._tick_s = min(_MOST_TICK_S, stall_after_s / _TICKS)
        self._detector = StallDetector(stall_after_s)
        self._escalation = Escalation(grace_s=grace_s, hold_s=stall_after_s)
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._clock_s = 0.0
        """Time that this thread has seen pass, without standstills of the whole process."""
        self._turned_s = 0.0
        """When the event loop turned last, by that clock."""
        self._asked = self._blind = False
        self._seen: Stall | None = None
        self._story: dict[str, Any] = {}
        self._told: tuple[Stall, str] | None = None
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._thread = threading.Thread(target=self._run, name="parti-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Watch no more; does not wait for the thread."""
        self._ending.set()

    # ── in the thread ─────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while True:
            # What a turn takes says nothing of the others: a process that was stopped sleeps too long.
            asleep_s = time.monotonic()
            if self._ending.wait(self._tick_s):
                return
            passed_s = time.monotonic() - asleep_s
            if passed_s > _STANDSTILL_TICKS * self._tick_s + 1.0:
                _log.warning("the whole process stood still", seconds=round(passed_s, 1))
                passed_s = self._tick_s
            self._clock_s += passed_s
            try:
                self._turn()
            except Exception:
                _log.exception("the watchdog failed, and goes on")

    def _turn(self) -> None:
        if not self._asked:
            self._asked = True
            try:
                self._loop.call_soon_threadsafe(self._look)
            except RuntimeError:
                self._ending.set()  # the loop is closed
                return
        stall = self._seen
        if self._clock_s - self._turned_s >= self._after_s:
            stall = Stall(StallKind.LOOP, "", self._turned_s)
        step = self._escalation.step(self._clock_s, stall)
        if step is Step.TELL and stall:
            self._tell(stall)
        elif step is Step.LEAVE and stall:
            reason = self._reason(stall)
            _log.critical("the stall lasts: this worker gives up its lease and leaves", reason=reason)
            self._watched.leave(stall, reason)
        elif step is Step.RECOVERED and self._told:
            told, reason = self._told
            self._told = None
            self._metrics.stalled.value = 0
            self._health.clear(SIGNAL)
            _log.warning("the stall is over", kind=told.kind.value)
            self._watched.recovered(told, reason)

    def _tell(self, stall: Stall) -> None:
        reason = self._reason(stall)
        self._told = stall, reason
        self._metrics.stalled.value = 1
        self._metrics.stalls.inc(stall.kind.value)
        self._health.raise_signal(SIGNAL, reason)
        story = self._story
        if stall.kind is StallKind.LOOP:
            story = {**self._try_story(), "frames": self._stack()}
        _log.error("this worker stands still", kind=stall.kind.value, reason=reason, **story)
        if stall.kind is not StallKind.LOOP:
            self._loop.call_soon_threadsafe(self._restart, stall)
        self._watched.tell(stall, reason)

    def _reason(self, stall: Stall) -> str:
        seconds = round(self._clock_s - stall.since_s)
        if stall.kind is StallKind.LOOP:
            return (
                f"stalled: the event loop has not turned for {seconds} s, blocked in {self._blocked_in()}; a handler "
                f"that blocks must be a plain function, or use asyncio.to_thread"
            )
        source = f"{self._watched.source} {stall.name}"
        what = {
            StallKind.HANDLERS: f"messages of {source} wait and may be started, and none was",
            StallKind.LANES: f"partition {stall.name} waits for a handler, or to be read, and nobody does that",
            StallKind.PULLS: f"the server has neither answered nor refused a pull of consumer {stall.name}",
        }[stall.kind]
        return f"stalled: {what} for {seconds} s"

    def _stack(self) -> list[str]:
        frame = sys._current_frames().get(self._loop_thread)
        if frame is None:
            return []
        return [f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_stack(frame)[-_FRAMES:]]

    def _blocked_in(self) -> str:
        stack = self._stack()
        return stack[-1] if stack else "code that is not known"

    def _try_story(self) -> dict[str, Any]:
        """What can be seen from here, of things that the event loop may be changing."""
        try:
            return self._watched.story()
        except Exception as error:
            return {"story": repr(error)}

    # ── on the event loop ─────────────────────────────────────────────────────────────────────────────────────

    def _look(self) -> None:
        self._asked = False
        self._turned_s = self._clock_s
        try:
            self._seen = self._detector.see(self._clock_s, self._watched.look())
            self._story = self._watched.story() if self._seen else {}
            self._blind = False
        except Exception:
            if not self._blind:
                _log.exception("the watchdog cannot look at the worker, and goes on trying")
            self._blind = True

    def _restart(self, stall: Stall) -> None:
        try:
            self._watched.restart(stall)
        except Exception:
            _log.exception("the reading side could not be restarted")
