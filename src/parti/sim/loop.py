"""An asyncio event loop in virtual time: nothing is waited for, the clock jumps to the next timer.

All simulated processes of a run share one loop. Which of them a callback belongs to stands in its context; what
belongs to a process that is stopped is kept back until it continues, and what belongs to one that is gone is dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from heapq import heappop, heappush
from itertools import count
from typing import Any, Protocol, TypeVar, TypeVarTuple

_MOST_CALLBACKS = 300_000
"""A run needs some thousand; one that needs so many goes round in circles."""

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


class Suspendable(Protocol):
    """What the loop needs to know of a simulated process."""

    runs: bool
    """Whether its callbacks are called now."""
    gone: bool
    """Whether it will never run again."""
    kept: list[Any]
    """Callbacks that wait for it to continue, in order."""

    def now(self, virtual_s: float) -> float:
        """What its monotonic clock shows at this moment of virtual time."""

    def virtual(self, own_s: float) -> float:
        """The moment of virtual time at which its monotonic clock shows this."""


CURRENT: ContextVar[Suspendable | None] = ContextVar("parti_sim_process", default=None)
"""The simulated process that the running code belongs to."""


class StandstillError(Exception):
    """Time does not go on: nothing is left that could ever happen, or something happens without end."""


class _Task(asyncio.Task[_T]):
    """A task whose place in a set does not depend on its address: product code iterates over sets of tasks."""

    number: int

    def __new__(cls, *_: Any, loop: VirtualLoop, **__: Any) -> _Task[_T]:
        """Number the task before its base puts it into a set."""
        task: _Task[_T] = super().__new__(cls)
        task.number = len(loop.tasks)
        return task

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class _Handle(asyncio.Handle):
    """A handle that is made with less ado: most of a run is spent on making and calling them."""

    __slots__ = ()

    def __init__(self, callback: object, args: object, context: Context, loop: VirtualLoop) -> None:
        self._callback, self._args, self._context, self._loop = callback, args, context, loop  # type: ignore[assignment]
        self._cancelled = False


class _Timer(asyncio.TimerHandle):
    """The same for timers."""

    __slots__ = ()
    __init__ = _Handle.__init__

    def cancel(self) -> None:
        """Never call back; the entry in the queue is dropped when its moment comes."""
        self._cancelled = True
        self._callback = self._args = None  # type: ignore[assignment]


class _Post:
    """A callback that cannot be cancelled."""

    __slots__ = ("_callback", "_context")
    _cancelled = False
    _args = ()

    def __init__(self, callback: Callable[[], object], context: Context) -> None:
        self._callback, self._context = callback, context


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs callbacks as asyncio does, with a clock of its own and without any I/O.

    `tasks` keeps every task of the run: one that is collected early would run its `finally` blocks at a moment that
    no seed decides.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        """Virtual time."""
        self.tasks: list[asyncio.Task[Any]] = []
        self.errors: list[dict[str, Any]] = []
        """What nobody caught."""
        self.callbacks = 0
        """How many have been called."""
        self._ready: deque[Any] = deque()
        self._timers: list[tuple[float, int, Any]] = []
        self._order = count()
        self.set_exception_handler(lambda _, context: self.errors.append(context))

    def time(self) -> float:
        """What the running process' monotonic clock shows."""
        process = CURRENT.get()
        return self.now_s if process is None else process.now(self.now_s)

    def call_soon(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Call back in the next turn."""
        handle = _Handle(callback, args, copy_context() if context is None else context, self)
        self._ready.append(handle)
        return handle

    def call_at(
        self, when: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call back when the running process' clock shows `when`."""
        process = CURRENT.get()
        if process is not None:
            when = process.virtual(when)
        timer = _Timer(callback, args, copy_context() if context is None else context, self)
        timer._when = when
        heappush(self._timers, (when, next(self._order), timer))
        return timer  # type: ignore[no-any-return]

    def call_later(
        self, delay: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call back when the running process' clock has gone on by `delay`."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def post(self, when: float, callback: Callable[[], object], context: Context) -> None:
        """Call back at this moment of virtual time, for sure; callbacks of the same moment in the order given."""
        heappush(self._timers, (when, next(self._order), _Post(callback, context)))

    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, _T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[_T]:
        """Make a task that is kept until the run ends."""
        task: asyncio.Task[_T] = _Task(coro, loop=self, name=name or "task", context=context)
        self.tasks.append(task)
        return task

    def run_in_executor(self, executor: object, func: Callable[[*_Ts], _T], *args: *_Ts) -> asyncio.Future[_T]:
        """Call the function at once: a thread would end at a moment that no seed decides."""
        done: asyncio.Future[_T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def resume(self, handles: list[Any]) -> None:
        """Call back what was kept, before anything else that is ready."""
        self._ready.extendleft(reversed(handles))

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers
        if not ready:
            while timers and timers[0][2]._cancelled:
                heappop(timers)
            if not timers:
                raise StandstillError("nothing is left to happen")
            self.now_s = max(self.now_s, timers[0][0])
        while timers and timers[0][0] <= self.now_s:
            timer = heappop(timers)[2]
            if not timer._cancelled:
                ready.append(timer)
        self.callbacks += len(ready)
        if self.callbacks > _MOST_CALLBACKS:
            last = getattr(ready[0]._callback, "__self__", ready[0]._callback)
            raise StandstillError(f"{_MOST_CALLBACKS:,} callbacks, the last one of {last!r}")
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(CURRENT)
            if process is None or process.runs:
                try:
                    handle._context.run(handle._callback, *handle._args)
                except Exception as error:
                    self.errors.append({"message": f"in {handle._callback!r}", "exception": error})
            elif not process.gone:
                process.kept.append(handle)

    def dispose(self) -> None:
        """End every coroutine that still waits, and the loop; what they do or raise at their end has no effect."""
        # What they begin in a `finally`, such as a shielded release, becomes a task here and is ended in its turn.
        # Otherwise it would be left to the default loop, which nobody runs, until the end of the real process.
        asyncio._set_running_loop(self)
        try:
            for task in self.tasks:
                if not task.done():
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    try:
                        task.get_coro().close()
                    except (Exception, asyncio.CancelledError):
                        pass  # It wanted to wait for something in a `finally`.
        finally:
            asyncio._set_running_loop(None)
        self.tasks.clear()
        self._timers.clear()
        self.close()

    def _process_events(self, event_list: list[Any]) -> None:
        """There is no I/O."""

    def _write_to_self(self) -> None:
        """There is no other thread."""
