"""Tasks with an owner that notices their end: nothing else starts a task that nobody awaits (a test checks that).

    retried     an action that must succeed: what it raises unforeseen is reported, and it is tried again
    supervise   a loop that must not end: the same, as something that its owner keeps and, only that, cancels
    owned       a task that runs once: what it raises is reported, and a reference is kept until it has ended
    beside      tasks for the length of a block, which looks at them itself
    bound_to    a block that is cancelled when a task ends without which it cannot go on

To report means: one line at level error with the traceback, one more in `parti_task_deaths_total`, and the health
signal `task-<name>`. The names are labels of that metric: a few, all of them in the code, nothing from a message.

A task may also end as if it had been cancelled although nobody has cancelled it, because something that it awaited
was. That counts as a death like any other. So does, for what is supervised, a cancellation by anybody but its owner:
handlers run in the same event loop, and some cancel all tasks that they find there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import structlog

from parti.errors import PartiError
from parti.telemetry.health import Health

_log = structlog.get_logger("parti.tasks")
_T = TypeVar("_T")

_RETRY_MIN_S, _RETRY_MAX_S = 0.1, 10.0
_SETTLED_S = 10.0
"""What has run for so long since it died is well again: the signal ends, and the next delay is a short one."""


async def retried(attempt: Callable[[], Awaitable[_T]], name: str, health: Health | None = None) -> _T:
    """Run an action until it returns, and return what it does; each exception is reported and followed by a new try.

    The delay grows from 0.1 to 10 s. Only what can be repeated may be run like this. The signal ends when the action
    returns, has run for 10 s, or is cancelled.
    """
    loop = asyncio.get_running_loop()
    delay_s, deaths, well = _RETRY_MIN_S, 0, None
    try:
        while True:
            started_s = loop.time()
            try:
                return await attempt()
            except asyncio.CancelledError as raised:
                if _was_asked_to_end():
                    raise
                error: BaseException = raised
            except Exception as raised:
                error = raised
            if loop.time() - started_s >= _SETTLED_S:
                delay_s, deaths = _RETRY_MIN_S, 0
            deaths += 1
            times = "" if deaths == 1 else f" for the {deaths}th time"
            report_death(name, error, health, f"has failed{times} and is started again")
            if well:
                well.cancel()
            await asyncio.sleep(delay_s)
            if health:
                well = loop.call_later(_SETTLED_S, health.clear, _signal(name))
            delay_s = min(2 * delay_s, _RETRY_MAX_S)
    finally:
        if well:
            well.cancel()
        if deaths and health:
            health.clear(_signal(name))


class Supervised(asyncio.Future[None]):
    """A loop that runs until its owner cancels this, or it returns; when its task ends otherwise, it begins again.

    What other code can find and cancel is only the task. It begins again a moment later, unless the event loop has
    been closed meanwhile: at its end `asyncio.run` cancels all tasks that are left.
    """

    def __init__(self, make: Callable[[], Coroutine[Any, Any, None]], name: str, health: Health | None) -> None:
        super().__init__()
        self._make, self._name, self._health = make, name, health
        self._is_asked_to_end = False
        self._deaths = 0
        self._timer: asyncio.TimerHandle | None = None
        self._task = self._begin()

    @property
    def name(self) -> str:
        """The name of what runs."""
        return self._name

    def cancel(self, msg: Any | None = None) -> bool:
        """End it."""
        if self.done():
            return False
        self._is_asked_to_end = True
        if self._task.done():
            self._end()
            return super().cancel(msg)
        return self._task.cancel(msg)

    def _begin(self) -> asyncio.Task[None]:
        task = self.get_loop().create_task(self._run(), name=f"parti-{self._name}")
        task.add_done_callback(self._ended)
        return task

    async def _run(self) -> None:
        await retried(self._make, self._name, self._health)
        # Here, and not once the task has ended: whoever finds the loop done a moment later begins another one.
        self._end()
        self.set_result(None)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self.done():
            return
        if not task.cancelled():
            self._end()
            if error := task.exception():  # nothing that can be caught and tried again
                report_death(self._name, error, self._health, "died; restart the worker")
            self.set_result(None)
        elif self._is_asked_to_end:
            self._end()
            super().cancel()
        else:
            self._wait(_RETRY_MIN_S, self._begin_again)

    def _begin_again(self) -> None:
        self._deaths += 1
        error = asyncio.CancelledError("cancelled by other code than its owner's")
        report_death(self._name, error, self._health, "was cancelled by other code, and is started again")
        self._task = self._begin()
        self._wait(_SETTLED_S, self._settle)

    def _settle(self) -> None:
        self._timer = None
        if self._health and self._deaths:
            self._health.clear(_signal(self._name))
        self._deaths = 0

    def _wait(self, delay_s: float, then: Callable[[], None]) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = self.get_loop().call_later(delay_s, then)

    def _end(self) -> None:
        if self._timer:
            self._timer.cancel()
        self._settle()


def supervise(
    make: Callable[[], Coroutine[Any, Any, None]],
    name: str,
    health: Health | None = None,
    *,
    keep: set[Any] | None = None,
) -> Supervised:
    """Start a loop that is to run until its owner cancels it or it returns; should it die, `make` begins it again.

    `keep` holds it until it has ended.
    """
    supervised = Supervised(make, name, health)
    if keep is not None:
        keep.add(supervised)
        supervised.add_done_callback(keep.discard)
    return supervised


def owned(
    coroutine: Coroutine[Any, Any, _T],
    name: str,
    health: Health | None = None,
    *,
    keep: set[Any] | None = None,
    signals: bool = True,
) -> asyncio.Task[_T]:
    """Start a task; what it raises is reported. `keep` holds it until it has ended: the event loop alone does not.

    `signals=False`: whoever owns it begins another one, so its death is no reason to restart the worker.
    """

    def ended(task: asyncio.Task[_T]) -> None:
        if keep is not None:
            keep.discard(task)
        if error := death_of(task):
            report_death(name, error, health, "died; restart the worker" if signals else "died", signals=signals)

    task = asyncio.get_running_loop().create_task(coroutine, name=f"parti-{name}")
    if keep is not None:
        keep.add(task)
    task.add_done_callback(ended)
    return task


@asynccontextmanager
async def beside(
    *coroutines: Coroutine[Any, Any, _T], name: str, foreseen: type[Exception] = PartiError
) -> AsyncIterator[tuple[asyncio.Task[_T], ...]]:
    """Run these for the length of a block, which awaits them or looks at them; what is left then is cancelled.

    What one of them has raised and the block has not is reported when the block ends, unless it was `foreseen`.
    """
    loop = asyncio.get_running_loop()
    tasks = tuple(loop.create_task(coroutine, name=f"parti-{name}") for coroutine in coroutines)
    seen: BaseException | None = None
    try:
        yield tasks
    except BaseException as error:
        seen = error
        raise
    finally:
        for task in tasks:
            task.cancel()
        if not isinstance(seen, GeneratorExit):  # what is being closed, with its event loop, cannot wait any more
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in tasks:
            unseen = death_of(task)
            if unseen is not None and unseen is not seen and not is_only(unseen, foreseen):
                report_death(name, unseen, None, "died", signals=False)


@asynccontextmanager
async def bound_to(task: asyncio.Future[None], error: Exception) -> AsyncIterator[None]:
    """A block that cannot go on without a task: when that ends first, it is cancelled, and the error raised."""
    block = asyncio.current_task()
    assert block
    over = cut_off = False

    def ended(_: asyncio.Future[None]) -> None:
        nonlocal cut_off
        if not over:
            cut_off = True
            block.cancel()

    task.add_done_callback(ended)
    try:
        yield
    except asyncio.CancelledError:
        if cut_off and block.uncancel() <= 0:
            raise error from death_of(task)
        raise
    finally:
        over = True
        task.remove_done_callback(ended)


def death_of(task: asyncio.Future[Any]) -> BaseException | None:
    """What a task died of; None when it returned, was told to end, or still runs."""
    if not task.done():
        return None
    if not task.cancelled():
        return task.exception()
    asked = isinstance(task, Supervised) or (isinstance(task, asyncio.Task) and task.cancelling())
    return None if asked else asyncio.CancelledError("something that it awaited was cancelled")


def report_death(name: str, error: BaseException, health: Health | None, what: str, *, signals: bool = True) -> None:
    """Report that something has ended by an exception that nobody has foreseen; `signals`: and that it stays so."""
    if health:
        health.on_task_death(name)
        if signals:
            health.raise_signal(_signal(name), f"background task {name!r} {what}: {error!r}")
    with suppress(Exception):  # a log that cannot be written must not end what is to be kept going
        _log.error(f"a background task {what}", task=name, exc_info=error)


def is_only(error: BaseException, kind: type[Exception] | tuple[type[Exception], ...]) -> bool:
    """Whether an error, or all of a group of them, are of a kind, or of one of several."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(kind)[1] is None
    return isinstance(error, kind)


def _signal(name: str) -> str:
    return f"task-{name}"


def _was_asked_to_end() -> bool:
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
