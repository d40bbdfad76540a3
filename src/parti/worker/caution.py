"""Caution after a crash: what is about to be started is written down first.

A message whose handler takes the whole process down leaves no trace of its own. So whoever takes over from a process
that died notes each message of its partitions in the progress record before it starts it, up to the last message that
the dead process can have seen. Should it die too, its record names the message, and after a number of such deaths the
message is dead-lettered instead of started. All lanes that wait share one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import structlog

from parti.core.lane import Lane, Phase
from parti.model.fleet import Grant
from parti.worker.lanes import Lanes, log_fields

_log = structlog.get_logger("parti.caution")
_RETRY_S = 0.5


class Caution:
    """Holds the lanes of partitions whose last owner died until what they are about to start is noted."""

    def __init__(self, lanes: Lanes, store: Callable[[], Awaitable[bool]], *, limit: int) -> None:
        self._lanes = lanes
        self._store = store
        self._limit = limit
        self._suspects: dict[str, tuple[int, int]] = {}
        self._waiting: set[Lane] = set()
        self._noting: asyncio.Task[None] | None = None
        lanes.on_held = self._held

    def take(self, grants: Mapping[str, Grant]) -> None:
        """Learn from grants which partitions need care, and which messages are under suspicion."""
        self._lanes.careful = {p: grant.careful_to for p, grant in grants.items() if grant.careful_to}
        self._suspects = {p: (grant.suspect, grant.deaths) for p, grant in grants.items() if grant.deaths}

    async def stop(self) -> None:
        """Let nothing more through."""
        if self._noting:
            self._noting.cancel()
            await asyncio.gather(self._noting, return_exceptions=True)

    def _held(self, lane: Lane) -> None:
        """A lane has something that could be started."""
        if not lane.waiting:
            return
        if lane.waiting[0].seq > lane.careful_to:
            lane.careful_to = 0
            self._lanes.let_through(lane)
            return
        self._waiting.add(lane)
        if self._noting is None or self._noting.done():
            self._noting = asyncio.get_running_loop().create_task(self._note())

    async def _note(self) -> None:
        while self._waiting:
            # A moment for the others: they share the write.
            await asyncio.sleep(0)
            noted = {lane: lane.waiting[0].seq for lane in self._waiting if _waits(lane)}
            self._waiting.clear()
            self._lanes.trying.update({lane.ownership.partition.id: seq for lane, seq in noted.items()})
            while not await self._store():  # noqa: ASYNC110 - each turn is another attempt, nothing to wait for
                await asyncio.sleep(_RETRY_S)
            for lane, seq in noted.items():
                self._begin(lane, seq)

    def _begin(self, lane: Lane, seq: int) -> None:
        if not _waits(lane):
            return
        head = lane.waiting[0]
        if head.seq != seq:
            self._held(lane)  # one that came late was put before it
            return
        suspect, deaths = self._suspects.get(lane.ownership.partition.id, (0, 0))
        if seq == suspect and deaths >= self._limit:
            self._lanes.bury_head(lane, f"{deaths} processes died while they handled it")
            return
        if seq == suspect:
            _log.warning("trying a message in whose handler a process died", deaths=deaths, **log_fields(head))
        self._lanes.let_through(lane)


def _waits(lane: Lane) -> bool:
    return lane.phase is Phase.HELD and not lane.incoming and bool(lane.waiting)
