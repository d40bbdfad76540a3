"""The start and the end of a worker, of partitions or of jobs: what it holds is let go in order, once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

from parti.config import Settings
from parti.jetstream.connection import Connection
from parti.jetstream.vitals import Vitals
from parti.telemetry.tasks import supervise


class Lifecycle:
    """What a worker holds between `begin` and `end`; each part is named when it is there.

    The parts are let go in reverse order, after a start that failed too, and all of them, even if one raises: its
    error comes out afterwards. The connection goes last, after the port that tells of it.
    """

    def __init__(self, vitals: Vitals) -> None:
        self._vitals = vitals
        self._holds = AsyncExitStack()
        self._ended = False

    async def begin(
        self, start: Callable[[], Awaitable[None]], abandon: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Run `start`; when it raises, run `abandon`, let go of all that is held, and raise the same."""
        try:
            await start()
        except BaseException:
            try:
                if abandon:
                    await abandon()
            finally:
                await self._holds.aclose()
            raise

    async def end(self, leave: Callable[[], Awaitable[bool]]) -> bool:
        """Run `leave`, let go of all that is held, and return what it said; a second call does nothing: True."""
        if self._ended:
            return True
        self._ended = True
        try:
            return await leave()
        finally:
            await self._holds.aclose()

    async def connect(self, settings: Settings, *, name: str) -> Connection:
        """Open the connection, which metrics and health follow from now on; raises what `Connection.open` does."""
        connection = await Connection.open(settings, name=name)
        self._holds.push_async_callback(connection.close)
        self._holds.callback(self._vitals.stop)
        self._vitals.follow(connection)
        return connection

    def hold(self, let_go: Callable[[], Awaitable[None]]) -> None:
        """Call this at the end, before what was named earlier."""
        self._holds.push_async_callback(let_go)

    def call(self, let_go: Callable[[], None]) -> None:
        """The same for what is no coroutine."""
        self._holds.callback(let_go)

    def run(self, make: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """Run this beside the worker, again whenever it dies, and cancel it at the end."""
        task = supervise(make, name, self._vitals.health)

        async def cancel() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        self.hold(cancel)
