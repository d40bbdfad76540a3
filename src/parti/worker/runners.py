"""Runners call handlers: coroutine functions on the event loop, plain functions in threads.

A message that is handled without waiting costs no task, no future and no thread switch of its own: one runner
works through all ready lanes, and only when its handler really waits does another one take over.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Any, Protocol, TypeAlias

import structlog

from parti.core.lane import Lane, Phase
from parti.core.retry import HandlerTimeout
from parti.model.message import Message
from parti.worker.lanes import Lanes

_log = structlog.get_logger("parti.runners")

AsyncHandler: TypeAlias = Callable[[Message], Awaitable[Any]]
PlainHandler: TypeAlias = Callable[[Message], Any]
Handler: TypeAlias = AsyncHandler | PlainHandler

_Outcome: TypeAlias = tuple[Lane, Message | None, float, float, BaseException | None, bool]
"""Lane, message (None: nothing was started, the permission had ended), start and end, error, whether the thread is
done."""

_SLICE = 256
"""Messages handled before the event loop gets its turn."""
_BATCH = 16
"""Messages of one lane that a thread takes at once."""
_SPARE_RUNNERS = 64
_TIMEOUT_CHECK_S = 0.05

# Looked up for every message: a global is cheaper than an attribute of an enum.
_READY, _RUNNING = Phase.READY, Phase.RUNNING


class Runners(Protocol):
    """What calls handlers."""

    def kick(self) -> None:
        """Look at the ready lanes; called whenever some may have become ready."""

    async def drain(self, timeout_s: float) -> bool:
        """Start nothing more and wait for what runs; False when something still ran at the end."""

    async def stop(self) -> None:
        """End at once: handlers that still run are cancelled (or abandoned, in threads)."""


def make_runners(lanes: Lanes, handler: Handler, *, timeout_s: float | None, threads: int) -> Runners:
    """Choose by the kind of handler."""
    call = getattr(handler, "__call__", None)  # noqa: B004 - an object may be callable by an async method
    if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call):
        return AsyncRunners(lanes, handler, timeout_s)
    return ThreadRunners(lanes, handler, timeout_s, threads)


class _Runner:
    __slots__ = ("lane", "task", "timed_out", "wake")

    def __init__(self) -> None:
        self.lane: Lane | None = None
        """The lane whose handler runs."""
        self.timed_out = False
        self.wake: asyncio.Future[None] | None = None
        self.task: asyncio.Task[None] | None = None


class AsyncRunners:
    """Runs coroutine handlers; as many at once as wait at the same time."""

    def __init__(self, lanes: Lanes, handler: AsyncHandler, timeout_s: float | None) -> None:
        self._lanes = lanes
        self._handler = handler
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._pump: _Runner | None = None
        self._idle: list[_Runner] = []
        self._all: set[_Runner] = set()
        self._handoff_due = False
        self._stopping = False
        self._drained: asyncio.Future[None] | None = None
        self._watchdog = self._loop.create_task(self._watch()) if timeout_s else None
        lanes.on_ready = self.kick
        lanes.count_running = self._count_running

    def kick(self) -> None:
        """See that somebody works through the ready lanes."""
        lanes = self._lanes
        if lanes.ready and not lanes.draining and lanes.permitted and (self._pump is None or self._pump.lane):
            self._start_pump()

    def _start_pump(self) -> None:
        if self._idle:
            runner = self._idle.pop()
            self._pump = runner
            if runner.wake and not runner.wake.done():
                runner.wake.set_result(None)
            return
        runner = self._pump = _Runner()
        self._all.add(runner)
        runner.task = self._loop.create_task(self._run(runner))
        runner.task.add_done_callback(lambda _: self._all.discard(runner))

    def _handoff(self) -> None:
        self._handoff_due = False
        self.kick()

    async def _run(self, runner: _Runner) -> None:  # noqa: PLR0912, PLR0915 - the hot loop: each call would cost
        lanes = self._lanes
        ready, handler, clock = lanes.ready, self._handler, time.perf_counter
        observe, settle = lanes.observe_latency, lanes.settle
        while True:
            left = _SLICE
            while ready and not lanes.draining:
                if self._pump is not runner:
                    if self._pump is not None and self._pump.lane is None:
                        break
                    # Whoever should look after the ready lanes waits in a handler itself.
                    self._pump = runner
                started = clock()
                if started >= lanes.permitted_until_s:
                    break
                lane = ready.popleft()
                if lane.phase is not _READY:
                    continue
                lane.phase = _RUNNING
                if ready and not self._handoff_due:
                    # Should this handler wait, somebody else must look after the other lanes.
                    self._handoff_due = True
                    self._loop.call_soon(self._handoff)
                runner.lane = lane
                lane.started_s = started
                error: BaseException | None = None
                try:
                    await handler(lane.waiting[0])
                except asyncio.CancelledError as cancelled:
                    if self._stopping:
                        raise  # the worker is being stopped, not the message: leave it unfinished
                    # A timeout, or something that the handler waited for was cancelled.
                    error = cancelled
                except Exception as raised:
                    error = raised
                elapsed = clock() - started
                runner.lane = None
                if runner.timed_out:
                    error = self._after_timeout(runner, error)
                if error is None:
                    observe(elapsed)
                    effort = lane.effort
                    if effort is not None:
                        effort.seconds += elapsed
                        effort.calls += 1
                    settle(lane)
                else:
                    lanes.failed(lane, error, elapsed)
                left -= 1
                if not left:
                    left = _SLICE
                    await asyncio.sleep(0)
            if self._stopping:
                return  # the handler took no notice of its cancellation
            if self._drained and not self._count_running() and not self._drained.done():
                self._drained.set_result(None)
            if self._pump is runner:
                self._pump = None
            if len(self._idle) >= _SPARE_RUNNERS:
                return
            self._idle.append(runner)
            runner.wake = self._loop.create_future()
            await runner.wake

    def _after_timeout(self, runner: _Runner, error: BaseException | None) -> BaseException | None:
        """Take back the cancellation; a handler that returned in spite of it has done its work."""
        runner.timed_out = False
        assert runner.task
        runner.task.uncancel()
        if isinstance(error, asyncio.CancelledError):
            return HandlerTimeout(f"handler ran longer than {self._timeout_s} s")
        return error

    async def _watch(self) -> None:
        assert self._timeout_s
        while True:
            await asyncio.sleep(min(_TIMEOUT_CHECK_S, self._timeout_s / 4))
            now = time.perf_counter()
            for runner in self._all:
                late = runner.lane and now - runner.lane.started_s > self._timeout_s
                if late and not runner.timed_out and runner.task:
                    runner.timed_out = True
                    runner.task.cancel()

    async def drain(self, timeout_s: float) -> bool:
        """Start nothing more and wait for running handlers."""
        self._lanes.draining = True
        if self._count_running():
            self._drained = self._loop.create_future()
            await asyncio.wait([self._drained], timeout=timeout_s)
        return not self._count_running()

    def _count_running(self) -> int:
        return sum(runner.lane is not None for runner in self._all)

    async def stop(self) -> None:
        """Cancel every runner, running handlers included."""
        self._stopping = self._lanes.draining = True
        tasks = [r.task for r in self._all if r.task] + ([self._watchdog] if self._watchdog else [])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class ThreadRunners:
    """Runs plain functions in threads, one lane to a thread at a time.

    A function cannot be interrupted: one that exceeds the timeout is reported and its lane waits for it.
    """

    def __init__(self, lanes: Lanes, handler: PlainHandler, timeout_s: float | None, threads: int) -> None:
        self._lanes = lanes
        self._handler = handler
        self._timeout_s = timeout_s
        self._limit = threads
        self._loop = asyncio.get_running_loop()
        self._wake = threading.Semaphore(0)
        self._idle = 0
        self._threads: list[threading.Thread] = []
        self._done: deque[_Outcome | None] = deque()
        self._signalled = False
        self._stopping = False
        self._running = 0
        self._drained: asyncio.Future[None] | None = None
        self._overdue: set[Message] = set()
        self._watchdog = self._loop.create_task(self._watch()) if timeout_s else None
        lanes.on_ready = self.kick
        lanes.count_running = lambda: self._running

    def kick(self) -> None:
        """Wake threads for the ready lanes, or start them up to the limit."""
        waiting = len(self._lanes.ready)
        if not waiting or self._lanes.draining or not self._lanes.permitted:
            return
        while waiting and self._idle:
            self._idle -= 1
            waiting -= 1
            self._wake.release()
        while waiting and len(self._threads) < self._limit:
            waiting -= 1
            thread = threading.Thread(target=self._run, name=f"parti-handler-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    # ── in threads ────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        ready = self._lanes.ready
        while not self._stopping:
            while not self._lanes.draining and self._lanes.permitted:
                try:
                    lane = ready.popleft()
                except IndexError:
                    break
                self._work(lane)
            self._post(None)
            self._wake.acquire()

    def _work(self, lane: Lane) -> None:
        """Handle what waits in one lane, in order, up to a slice."""
        with self._lanes.lock:
            if lane.phase is not Phase.READY:
                return
            lane.phase = Phase.RUNNING
            batch = _first(lane.waiting, 1 if lane.careful_to else _BATCH)
            lane.taken_to = batch[-1].seq
            lane.started_s = time.perf_counter()
            self._running += 1
        for message in batch:
            started = lane.started_s = time.perf_counter()
            if started >= self._lanes.permitted_until_s:
                self._post((lane, None, 0.0, 0.0, None, True))
                return
            error: BaseException | None = None
            try:
                result = self._handler(message)
                if inspect.iscoroutine(result):
                    result.close()
                if inspect.isawaitable(result):
                    error = TypeError("the handler returned an awaitable; declare it with 'async def'")
            except BaseException as raised:  # a thread has nobody else to tell, not even of SystemExit
                error = raised
            stop = error is not None or message is batch[-1] or self._lanes.draining or lane.phase is Phase.CLOSED
            self._post((lane, message, started, time.perf_counter(), error, stop))
            if stop:
                return

    def _post(self, outcome: _Outcome | None) -> None:
        """Tell the loop of an outcome, or (None) that this thread has nothing to do."""
        self._done.append(outcome)
        if not self._signalled:
            self._signalled = True
            try:
                self._loop.call_soon_threadsafe(self._settle)
            except RuntimeError:
                self._stopping = True  # the loop is gone, and with it everyone who could be told

    # ── on the loop ───────────────────────────────────────────────────────────────────────────────────────────

    def _settle(self) -> None:
        self._signalled = False
        lanes = self._lanes
        while self._done:
            outcome = self._done.popleft()
            if outcome is None:
                self._idle += 1
                continue
            lane, message, started_s, finished_s, error, last = outcome
            if last:
                with lanes.lock:
                    self._running -= 1
            if message is None:
                lanes.put_back(lane)
            elif error is not None:
                lanes.failed(lane, error, finished_s - started_s, message)
            else:
                lanes.observe_latency(finished_s - started_s)
                if lane.effort:
                    lane.effort.seconds += finished_s - started_s
                    lane.effort.calls += 1
                lanes.settle(lane, not last, message, started_s, finished_s)
        if self._drained and not self._busy() and not self._drained.done():
            self._drained.set_result(None)
        self.kick()

    def _busy(self) -> bool:
        return self._idle < len(self._threads)

    async def _watch(self) -> None:
        assert self._timeout_s
        while True:
            await asyncio.sleep(max(_TIMEOUT_CHECK_S, self._timeout_s / 4))
            now = time.perf_counter()
            late = {
                lane.waiting[0]: lane
                for lane in self._lanes.running_lanes()
                if now - lane.started_s > self._timeout_s
            }
            for message, lane in late.items():
                if message not in self._overdue:
                    self._lanes.failures.overdue(lane, now - lane.started_s)
            self._overdue = set(late)

    async def drain(self, timeout_s: float) -> bool:
        """Start nothing more and wait for running functions."""
        self._lanes.draining = True
        if self._busy():
            self._drained = self._loop.create_future()
            await asyncio.wait([self._drained], timeout=timeout_s)
        return not self._busy()

    async def stop(self) -> None:
        """Let idle threads end; a function that still runs is abandoned (its thread is a daemon)."""
        self._stopping = True
        self._lanes.draining = True
        if self._watchdog:
            self._watchdog.cancel()
        for _ in self._threads:
            self._wake.release()


def _first(waiting: deque[Message], most: int) -> list[Message]:
    """The first messages of a lane, copied in a thread while the event loop may append more."""
    while True:
        try:
            return list(islice(waiting, most))
        except RuntimeError:
            # Copying is one step for the interpreter, unless it collects garbage in between and lets the loop run.
            continue
