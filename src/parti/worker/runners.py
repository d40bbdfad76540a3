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
from parti.telemetry.tasks import supervise
from parti.worker.lanes import Lanes

_log = structlog.get_logger("parti.runners")

AsyncHandler: TypeAlias = Callable[[Message], Awaitable[Any]]
PlainHandler: TypeAlias = Callable[[Message], Any]
Handler: TypeAlias = AsyncHandler | PlainHandler

_Outcome: TypeAlias = tuple[Lane, Message | None, float, float, BaseException | None, bool]
"""Lane, message (None: nothing was started, the permission had ended or something broke), start and end, error,
whether the thread is done with the lane."""

_SLICE, _SLICE_S = 256, 0.05
"""Messages handled, or time spent in handlers, before the event loop gets its turn: it renews the lease too."""
_SLICE_PER_S = _SLICE / _SLICE_S
_BATCH = 16
"""Messages of one lane that a thread takes at once."""
_SPARE_RUNNERS = 64
_TIMEOUT_CHECK_S = 0.05
_THREAD_RETRY_S = 1.0

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

    @property
    def may_start(self) -> bool:
        """Whether another handler could be started now, besides those that run."""
        ...

    def at_work(self) -> set[Lane]:
        """Lanes whose handler runs."""
        ...

    def revive(self) -> None:
        """Forget who should look after the ready lanes, and look for somebody."""


def make_runners(lanes: Lanes, handler: Handler, *, timeout_s: float | None, threads: int) -> Runners:
    """Choose by the kind of handler."""
    call = getattr(handler, "__call__", None)  # noqa: B004 - an object may be callable by an async method
    if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call):
        return AsyncRunners(lanes, handler, timeout_s)
    return ThreadRunners(lanes, handler, timeout_s, threads)


class _Runner:
    __slots__ = ("lane", "overdue", "task", "timed_out", "wake")

    def __init__(self) -> None:
        self.lane: Lane | None = None
        """The lane whose handler runs."""
        self.timed_out = False
        self.overdue = False
        """The handler goes on although it was cancelled, and that was said."""
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
        self._timeouts = supervise(self._watch, "handler-timeouts", lanes.failures.health) if timeout_s else None
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
        runner.task = self._loop.create_task(self._run(runner), name="parti-runner")
        runner.task.add_done_callback(lambda task: self._ended(runner, task))

    def _ended(self, runner: _Runner, task: asyncio.Task[None]) -> None:
        """Notice the end of a runner; one that died gives its lane back, and another one takes its place."""
        self._all.discard(runner)
        if self._stopping or self._loop.is_closed():
            return
        if self._pump is runner:
            self._pump = None
        if runner in self._idle:
            self._idle.remove(runner)
        error = asyncio.CancelledError("the runner was cancelled") if task.cancelled() else task.exception()
        if error is None:
            return
        self._lanes.runner_died(runner.lane, error)
        if self._drained and not self._count_running() and not self._drained.done():
            self._drained.set_result(None)
        self.kick()

    def _handoff(self) -> None:
        self._handoff_due = False
        self.kick()

    async def _run(self, runner: _Runner) -> None:  # noqa: PLR0912, PLR0915 - the hot loop: each call would cost
        lanes = self._lanes
        ready, handler, clock = lanes.ready, self._handler, time.perf_counter
        observe, settle = lanes.observe_latency, lanes.settle
        while True:
            left: float = _SLICE
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
                except (Exception, SystemExit, KeyboardInterrupt) as raised:
                    # Raised by hand: signals are not told to handlers, and it would end the process without draining.
                    error = raised
                elapsed = clock() - started
                runner.lane = None
                try:
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
                except Exception as broken:
                    lanes.recover(lane, broken)
                left -= 1 + elapsed * _SLICE_PER_S
                if left <= 0:
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
        runner.timed_out = runner.overdue = False
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
                running_s = now - runner.lane.started_s if runner.lane else 0.0
                if running_s > self._timeout_s and not runner.timed_out and runner.task:
                    runner.timed_out = True
                    runner.task.cancel()
                elif runner.lane and running_s > 2 * self._timeout_s and not runner.overdue:
                    runner.overdue = True
                    self._lanes.failures.overdue(runner.lane, running_s)

    async def drain(self, timeout_s: float) -> bool:
        """Start nothing more and wait for running handlers."""
        self._lanes.draining = True
        if self._count_running():
            self._drained = self._loop.create_future()
            await asyncio.wait([self._drained], timeout=timeout_s)
        return not self._count_running()

    def _count_running(self) -> int:
        return sum(runner.lane is not None for runner in self._all)

    @property
    def may_start(self) -> bool:
        """Coroutine handlers have no limit of their own."""
        return True

    def at_work(self) -> set[Lane]:
        """Lanes whose handler runs."""
        return {runner.lane for runner in self._all if runner.lane is not None}

    def revive(self) -> None:
        """Forget who should look after the ready lanes, and start another runner for them."""
        self._pump = None
        self._handoff_due = False
        self.kick()

    async def stop(self) -> None:
        """Cancel every runner, running handlers included."""
        self._stopping = self._lanes.draining = True
        tasks = [r.task for r in self._all if r.task] + ([self._timeouts] if self._timeouts else [])
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
        self._short_of_threads = False
        """The system refused the last thread that was to be started."""
        self._retry: asyncio.TimerHandle | None = None
        self._done: deque[_Outcome | None] = deque()
        self._signalled = False
        self._stopping = False
        self._running: set[Lane] = set()
        self._drained: asyncio.Future[None] | None = None
        self._overdue: set[Message] = set()
        self._timeouts = supervise(self._watch, "handler-timeouts", lanes.failures.health) if timeout_s else None
        lanes.on_ready = self.kick
        lanes.count_running = lambda: len(self._running)

    def kick(self) -> None:
        """Wake threads for the ready lanes, or start them up to the limit."""
        waiting = len(self._lanes.ready)
        if not waiting or self._lanes.draining or not self._lanes.permitted:
            return
        while waiting and self._idle:
            self._idle -= 1
            waiting -= 1
            self._wake.release()
        while waiting and len(self._threads) < self._limit and self._retry is None:
            waiting -= 1
            thread = threading.Thread(target=self._run, name=f"parti-handler-{len(self._threads)}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the system's limit, of a container for example
                _log.error("a thread cannot be started, will try again", threads=len(self._threads), error=str(error))
                self._short_of_threads = True
                self._retry = self._loop.call_later(_THREAD_RETRY_S, self._try_threads)
                return
            self._short_of_threads = False
            self._threads.append(thread)

    def _try_threads(self) -> None:
        self._retry = None
        self.kick()

    # ── in threads ────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        ready = self._lanes.ready
        while not self._stopping:
            while not self._lanes.draining and self._lanes.permitted:
                try:
                    lane = ready.popleft()
                except IndexError:
                    break
                try:
                    self._work(lane)
                except BaseException as error:  # a fault of ours: what handlers raise is caught where they are called
                    self._post((lane, None, 0.0, 0.0, error, True))
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
            self._running.add(lane)
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
        while self._done:
            outcome = self._done.popleft()
            if outcome is None:
                self._idle += 1
                continue
            self._settle_one(*outcome)
        if self._drained and not self._busy() and not self._drained.done():
            self._drained.set_result(None)
        self.kick()

    def _settle_one(
        self,
        lane: Lane,
        message: Message | None,
        started_s: float,
        finished_s: float,
        error: BaseException | None,
        last: bool,
    ) -> None:
        lanes = self._lanes
        if last:
            with lanes.lock:
                self._running.discard(lane)
        try:
            if message is None and error is not None:
                lanes.recover(lane, error)
            elif message is None:
                lanes.put_back(lane)
            elif error is not None:
                lanes.failed(lane, error, finished_s - started_s, message)
            else:
                lanes.observe_latency(finished_s - started_s)
                if lane.effort:
                    lane.effort.seconds += finished_s - started_s
                    lane.effort.calls += 1
                lanes.settle(lane, not last, message, started_s, finished_s)
        except Exception as broken:
            lanes.recover(lane, broken, more=not last)

    @property
    def may_start(self) -> bool:
        """Whether a thread is free, or may be started."""
        limit = max(1, len(self._threads)) if self._short_of_threads else self._limit
        return len(self._running) < limit

    def at_work(self) -> set[Lane]:
        """Lanes whose handler runs."""
        with self._lanes.lock:
            return set(self._running)

    def revive(self) -> None:
        """Settle what threads have reported, and wake or start threads for the ready lanes."""
        self._settle()

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
        if self._timeouts:
            self._timeouts.cancel()
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
