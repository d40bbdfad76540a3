"""Calling handlers: coroutines on the event loop, plain functions in a few threads."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from parti.core.retry import HandlerTimeout
from parti.jobs.job import Job

JobHandler: TypeAlias = Callable[[Job], Awaitable[object]] | Callable[[Job], object]


def is_coroutine_handler(handler: Callable[..., Any]) -> bool:
    """Whether calling it gives something to await."""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004


class Calls:
    """Calls one handler, in the way that suits it.

    A plain function cannot be interrupted: what outlives `stop` is abandoned with its thread, which is a daemon.
    """

    def __init__(self, handler: JobHandler, *, threads: int, timeout_s: float | None) -> None:
        self._handler: Callable[[Job], Any] = handler
        self.on_loop = is_coroutine_handler(handler)
        """Whether it runs on the event loop, and can be interrupted."""
        self._timeout_s = timeout_s
        self._threads = DaemonThreads(threads)

    async def call(self, job: Job) -> None:
        """Run the handler to its end; raises what it raises, and `HandlerTimeout`."""
        try:
            await self._call(job)
        except (SystemExit, KeyboardInterrupt) as error:  # which would end the event loop, and all jobs with it
            raise RuntimeError(f"the handler raised {error!r}") from error

    async def _call(self, job: Job) -> None:
        if not self.on_loop:
            await self._threads.run(lambda: self._plain(job))
            return
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                await self._handler(job)
        except TimeoutError:
            if limit.expired():
                raise HandlerTimeout(f"handler ran longer than {self._timeout_s} s") from None
            raise

    def _plain(self, job: Job) -> None:
        result = self._handler(job)
        if inspect.iscoroutine(result):
            result.close()
        if inspect.isawaitable(result):
            raise TypeError("the handler returned an awaitable; declare it with 'async def'")

    def stop(self) -> None:
        """Let idle threads end."""
        self._threads.stop()


class DaemonThreads:
    """Up to so many threads, started when they are needed; unlike an executor's they do not hold up the exit."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._busy = 0

    async def run(self, function: Callable[[], None]) -> None:
        """Run a function in a thread; cancelling leaves it running, or takes it back if it has not begun."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def settle(error: BaseException | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        def work() -> None:
            if done.cancelled():
                return
            error: BaseException | None = None
            try:
                function()
            except (StopIteration, SystemExit, KeyboardInterrupt) as raised:  # which no future takes well
                error = RuntimeError(f"the handler raised {raised!r}")
            except BaseException as raised:  # a thread has nobody else to tell
                error = raised
            try:
                loop.call_soon_threadsafe(settle, error)
            except RuntimeError:
                pass  # the loop is gone, and with it everyone who could be told

        self._busy += 1
        if self._busy > len(self._threads) and len(self._threads) < self._most:
            thread = threading.Thread(target=self._serve, name=f"parti-job-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._work.put(work)
        try:
            await done
        finally:
            self._busy -= 1

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def stop(self) -> None:
        """Let each thread end after what it does now."""
        for _ in self._threads:
            self._work.put(None)
