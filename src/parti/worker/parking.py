"""Parking and feeding: lanes that read their messages from the stream itself.

A partition that does not move, or gets more than its handler can do, must not take the room of the others: its
unacknowledged messages would fill MaxAckPending until nothing else is delivered. So its lane is parked: the position
is stored first, then what waits behind the head is acknowledged and let go, and when the head is done at last the
lane is fed from the stream, in order, until it has caught up. A partition that was gained with a backlog begins like
that. However long the backlog, a lane holds one page of it. Only on streams with limits retention: elsewhere an
acknowledgement deletes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

import structlog

from parti.core.lane import Lane, Phase, hogs_among, lanes_to_park
from parti.errors import PartiError
from parti.jetstream.backlog import BacklogReader
from parti.model.message import Message, StoredMessage
from parti.model.safe_text import may_be_bytes
from parti.telemetry.health import Health
from parti.telemetry.metrics import Metrics
from parti.telemetry.tasks import Supervised, retried, supervise
from parti.worker.lanes import Lanes

_log = structlog.get_logger("parti.parking")

_LOOK_INTERVAL_S = 0.1
_PATIENCE_S = 1.0
_PATIENCE_TIMES = 4
_FIRST_PAGE, _PAGE = 32, 256
"""Large pages are quicker in all, but with many lanes at once everybody would wait long for a first message."""
_PAGE_BYTES = 1 << 20
_MOST_MESSAGES = 16_384
_MOST_BYTES = 64 << 20
"""What all lanes together may hold of what was read from the stream; each gets a page, however small."""
_READS_AT_ONCE = 8
_RETRY_S = 0.5


class Parking:
    """Watches the lanes, parks those that hold up the others and feeds them when they move again.

    `store` makes the positions durable; until it has, a parked lane's messages stay unacknowledged.
    """

    def __init__(
        self,
        lanes: Lanes,
        backlog: BacklogReader,
        store: Callable[[], Awaitable[bool]],
        metrics: Metrics,
        health: Health | None = None,
        *,
        limit: int,
    ) -> None:
        self._lanes = lanes
        self._backlog = backlog
        self._store = store
        self._metrics = metrics
        self._health = health
        self._limit = limit
        self._turns = asyncio.Semaphore(_READS_AT_ONCE)
        self._feeding: dict[Lane, Supervised] = {}
        self._hogs: set[Lane] = set()
        lanes.on_starved = self._feed_soon

    async def run(self) -> None:
        """Look after the lanes until cancelled; nothing but that ends it."""
        try:
            await retried(self._look_after, "parking", self._health)
        finally:
            for task in self._feeding.values():
                task.cancel()

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            if self._lanes.held * 2 >= self._limit:
                chosen = lanes_to_park(self._stuck(), held=self._lanes.held, limit=self._limit)
                if chosen:
                    await self._park(chosen, "does not move")
            await self._park_hogs()

    async def _park_hogs(self) -> None:
        """Park what has taken the room of others at two looks in a row: a burst is nothing to worry about."""
        hogs = hogs_among(self._lanes.roster.all(), held=self._lanes.held, limit=self._limit)
        lasting, self._hogs = [lane for lane in hogs if lane in self._hogs], set(hogs)
        if lasting:
            await self._park(lasting, "gets more than its handler can do")

    def _stuck(self) -> list[Lane]:
        """Lanes whose head has been with its handler, or waiting for its next attempt, for far too long.

        What is too long depends on the handlers: where all of them are slow, nobody is stuck.
        """
        latency, now = self._metrics.handler_latency, time.perf_counter()
        patience_s = max(_PATIENCE_S, _PATIENCE_TIMES * latency.sum / max(1, sum(latency.counts)))
        return [
            lane
            for lane in self._lanes.roster.all()
            if not lane.parked
            and lane.phase in {Phase.RUNNING, Phase.BACKOFF}
            and lane.waiting
            and now - lane.started_s > patience_s
        ]

    async def _park(self, stuck: list[Lane], why: str) -> None:
        """Let go of what waits in these lanes, once their positions are stored."""
        let_go: list[tuple[Lane, list[Message]]] = []
        # Nobody can ask the server for a subject that is no text: such a lane keeps what it has.
        for lane in (lane for lane in stuck if not may_be_bytes(lane.ownership.partition.subject)):
            let_go.append((lane, self._lanes.park(lane)))
            self._metrics.parked.inc()
            _log.warning(
                f"partition {why} and is parked; it will be read from the stream again",
                partition=lane.ownership.partition.id,
                position=lane.position,
            )
        # Whatever the store raises: what was parked here is let go by nobody else.
        while not await retried(self._store, "parking", self._health):  # noqa: ASYNC110 - each turn is another attempt
            await asyncio.sleep(_RETRY_S)
        for lane, messages in let_go:
            self._lanes.let_go(lane, messages)

    def neglected(self) -> list[Lane]:
        """Lanes that cannot go on until they are fed, and that nobody feeds."""
        fed = {lane for lane, task in self._feeding.items() if not task.done()}
        return [
            lane
            for lane in self._lanes.roster.all()
            if lane.starved and not (lane.incoming or lane.pausing) and lane not in fed
        ]

    def _feed_soon(self, lane: Lane) -> None:
        # Asked for again as soon as the lane has run empty: the last task may have ended without being cleared away.
        task = self._feeding.get(lane)
        if task is None or task.done():
            # Nobody asks for a lane a second time while it is empty, so its feeding must not end before it is fed.
            task = self._feeding[lane] = supervise(partial(self._feed, lane), "feeding", self._health)
            task.add_done_callback(self._fed)

    def _fed(self, task: asyncio.Future[None]) -> None:
        self._feeding = {lane: other for lane, other in self._feeding.items() if other is not task}

    async def _feed(self, lane: Lane) -> None:
        """Read the next messages of a parked lane whose queue has run empty."""
        while lane.parked and not lane.waiting and lane.phase is not Phase.CLOSED:
            lane.feed(*await self._read(lane))
        self._lanes.fed(lane)

    async def _read(self, lane: Lane) -> tuple[list[Message], bool]:
        """The next page from where the lane left off, and whether nothing that it let go lies beyond it."""
        ownership, bound = lane.ownership, lane.parked_to
        first, lane.fed = not lane.fed, True
        sharing = max(1, sum(other.parked for other in self._lanes.roster.all()))
        async with self._turns:
            try:
                page = await self._backlog.read(
                    ownership.partition.subject,
                    lane.feed_from,
                    up_to=bound,
                    batch=max(1, min(_FIRST_PAGE if first else _PAGE, _MOST_MESSAGES // sharing)),
                    max_bytes=max(1, min(_PAGE_BYTES, _MOST_BYTES // sharing)),
                )
            except PartiError as error:
                _log.warning(
                    "partition cannot be read from the stream, will try again",
                    partition=ownership.partition.id,
                    error=str(error),
                )
                await asyncio.sleep(_RETRY_S)
                return [], False
        received_s = time.time()
        messages: list[Message] = [
            StoredMessage(
                stored.subject,
                stored.data,
                stored.seq,
                ownership,
                header=stored.header,
                received_s=received_s,
                stored_at=stored.stored_at,
            )
            for stored in page.messages
        ]
        # More may have been let go while we asked.
        return messages, page.exhausted and lane.parked_to == bound
