"""Objects in processes of their own: their methods are called by name over a pipe."""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from typing import Any

from parti.app.process import run_on_loop
from parti.telemetry.logs import configure_logging


class RemoteError(Exception):
    """A call failed in the other process, or was not answered in time."""


class Remote:
    """A process with one object in it; ended with the block. One call at a time."""

    def __init__(self, factory: Callable[[], object]) -> None:
        context = multiprocessing.get_context("spawn")
        self._name = getattr(factory, "__name__", "remote")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_live, args=(theirs, factory), daemon=True)
        self._process.start()
        theirs.close()
        self._calls = 0

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    async def call(self, method: str, *arguments: Any, limit_s: float = 60.0) -> Any:
        """Call a method, plain or async, and wait for what it returns."""
        self._calls += 1
        number, loop = self._calls, asyncio.get_running_loop()
        answer: asyncio.Future[tuple[str, Any]] = loop.create_future()

        def readable() -> None:
            try:
                answered, failure, result = self._pipe.recv()
            except (OSError, EOFError):
                loop.remove_reader(self._pipe.fileno())
                answered, failure, result = number, "its process has ended", None
            # Any other number answers a call that was given up.
            if answered == number and not answer.done():
                answer.set_result((failure, result))

        loop.add_reader(self._pipe.fileno(), readable)
        try:
            self._pipe.send((number, method, arguments))
            async with asyncio.timeout(limit_s):
                failure, result = await answer
        except OSError as error:
            reason = (
                f"was not done within {limit_s:g} s" if isinstance(error, TimeoutError) else "has no process any more"
            )
            raise RemoteError(f"{self._name}.{method}() {reason}") from error
        finally:
            loop.remove_reader(self._pipe.fileno())
        if failure:
            raise RemoteError(f"{self._name}.{method}() failed: {failure}")
        return result

    def close(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _live(pipe: Pipe, factory: Callable[[], object]) -> None:
    configure_logging(os.environ.get("BENCH_LOG", "error"), "console")
    try:
        run_on_loop(_serve(pipe, factory()), os.environ.get("PARTI_EVENT_LOOP", "auto"))
    except (EOFError, OSError, KeyboardInterrupt):
        return  # the other side is gone


async def _serve(pipe: Pipe, served: object) -> None:
    waiting: asyncio.Queue[tuple[int, str, tuple[Any, ...]] | None] = asyncio.Queue()

    def readable() -> None:
        try:
            waiting.put_nowait(pipe.recv())
        except (EOFError, OSError):
            waiting.put_nowait(None)

    # Not a thread: it would compete with the object's own work for the interpreter.
    asyncio.get_running_loop().add_reader(pipe.fileno(), readable)
    os.set_blocking(pipe.fileno(), True)  # uvloop turns that off, and a pipe cannot do without
    while (asked := await waiting.get()) is not None:
        number, method, arguments = asked
        try:
            result = getattr(served, method)(*arguments)
            pipe.send((number, "", await result if inspect.isawaitable(result) else result))
        except Exception as error:
            pipe.send((number, f"{type(error).__name__}: {error}", None))
