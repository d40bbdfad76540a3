"""Standing still: one partition starts nothing for a moment, while the others go on.

Its handler's state can be saved then, and belongs exactly to its position.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Protocol

from parti.core.lane import Lane, Phase

_LOOK_AGAIN_S = 0.2


class Wakes(Protocol):
    """The lanes, which are told when one may go on."""

    lock: threading.Lock

    def wake(self, lane: Lane) -> None:
        """Let a lane that was held go on, unless something else holds it."""

    def let_through(self, lane: Lane) -> None:
        """Nothing holds the lane any more."""


class Pauses:
    """Lets somebody wait for handlers to end, and keeps the next ones from being started meanwhile.

    `by_id` are the lanes by partition id.
    """

    def __init__(self, lanes: Wakes, by_id: Mapping[str, Lane]) -> None:
        self._lanes = lanes
        self._by_id = by_id
        self._waiters: list[asyncio.Future[None]] = []
        self._loop = asyncio.get_running_loop()

    @asynccontextmanager
    async def paused(self, partition_id: str) -> AsyncIterator[int | None]:
        """Start nothing of a partition meanwhile; gives its position, once no handler of it runs.

        None when it has no lane, or is released before its handler has ended.
        """
        lane = self._by_id.get(partition_id)
        if lane is None:
            yield None
            return
        with self._lanes.lock:
            lane.pausing = True
            if lane.phase is not Phase.RUNNING:
                lane.phase = Phase.HELD
        try:
            while lane.phase is Phase.RUNNING:
                await self.someone_left()
            yield lane.position if lane.phase is Phase.HELD else None
        finally:
            lane.pausing = False
            held = lane.careful_to or lane.incoming or lane.retry
            if not lane.waiting and lane.phase is Phase.HELD and not held:
                self._lanes.let_through(lane)
            else:
                self._lanes.wake(lane)

    async def someone_left(self) -> None:
        """Return when a handler has ended that somebody waits for, or after a moment."""
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        await asyncio.wait([waiter], timeout=_LOOK_AGAIN_S)

    def tell(self) -> None:
        """A handler has ended that somebody may wait for."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()
