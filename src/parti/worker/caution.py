"""Caution after a crash: what is about to be started is written down first.

A message whose handler takes the whole process down leaves no trace of its own. So whoever takes over from a process
that died notes each message of its partitions in the progress record before it starts it, up to the last message that
the dead process can have seen. Should it die too, its record names the message, and after a number of such deaths the
message is dead-lettered instead of started.

All lanes that wait share one write, so a death accuses all that were noted. A message that one more death would
condemn is therefore tried alone: nothing else that has to be noted runs meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import structlog

from parti.core.lane import Lane, Phase
from parti.model.fleet import Grant
from parti.telemetry.health import Health
from parti.telemetry.tasks import Supervised, report_death, retried, supervise
from parti.worker.failures import log_fields
from parti.worker.lanes import Lanes

_log = structlog.get_logger("parti.caution")
_TASK = "caution"
_RETRY_S = 0.5
_LOOK_S = 0.002
"""How soon to look again whether a message can be tried alone now, or has been."""


class Caution:
    """Holds the lanes of partitions whose last owner died until what they are about to start is noted."""

    def __init__(
        self, lanes: Lanes, store: Callable[[], Awaitable[bool]], health: Health | None = None, *, limit: int
    ) -> None:
        self._lanes = lanes
        self._store = store
        self._health = health
        self._limit = limit
        self._suspects: dict[str, tuple[int, int]] = {}
        self._waiting: set[Lane] = set()
        self._alone = ""
        """The partition whose message is tried alone."""
        self._noting: Supervised | None = None
        lanes.on_held = self._held

    def take(self, grants: Mapping[str, Grant]) -> None:
        """Learn from grants which partitions need care, and which messages are under suspicion."""
        self._lanes.roster.careful = {p: grant.careful_to for p, grant in grants.items() if grant.careful_to}
        self._suspects = {p: (grant.suspect, grant.deaths) for p, grant in grants.items() if grant.deaths}

    async def stop(self) -> None:
        """Let nothing more through."""
        if self._noting:
            self._noting.cancel()
            await asyncio.gather(self._noting, return_exceptions=True)

    def _held(self, lane: Lane) -> None:
        """A lane may have something that could be started."""
        if not lane.waiting:
            if lane.parked:
                self._lanes.on_starved(lane)  # it ran empty while it was paused
            return
        if lane.waiting[0].seq > lane.careful_to:
            lane.careful_to = 0
            self._lanes.let_through(lane)
            return
        self._waiting.add(lane)
        if self._noting is None or self._noting.done():
            self._noting = supervise(self._note, _TASK, self._health)

    async def _note(self) -> None:
        while self._waiting:
            # A moment for the others: they share the write.
            await asyncio.sleep(0)
            noted = self._choose()
            if not noted:
                await asyncio.sleep(_LOOK_S)
                continue
            self._waiting -= noted.keys()
            self._lanes.trying.update({lane.ownership.partition.id: seq for lane, seq in noted.items()})
            # Whatever the store raises: nobody else starts what is held here.
            while not await retried(self._store, _TASK, self._health):  # noqa: ASYNC110 - each turn is another attempt
                await asyncio.sleep(_RETRY_S)
            for lane, seq in noted.items():
                try:
                    self._begin(lane, seq)
                except Exception as error:
                    report_death(_TASK, error, self._health, "could not start a message; others go on")

    def _choose(self) -> dict[Lane, int]:
        """The heads to note now: all that wait, or one that is to be tried alone; none while that has to wait."""
        self._waiting = {lane for lane in self._waiting if _waits(lane)}
        heads = {lane: lane.waiting[0].seq for lane in self._waiting}
        for lane in heads:
            # Noted before, and stopped between two attempts: it is not under way.
            self._lanes.trying.pop(lane.ownership.partition.id, None)
        under_way = self._lanes.trying
        if self._alone in under_way:
            return {}
        self._alone = ""
        last_chances = {lane: seq for lane, seq in heads.items() if self._deaths(lane, seq) == self._limit - 1}
        if not last_chances:
            return heads
        if under_way:
            return {}
        lane, seq = min(last_chances.items(), key=lambda head: head[1])
        self._alone = lane.ownership.partition.id
        return {lane: seq}

    def _deaths(self, lane: Lane, seq: int) -> int:
        """How many processes are known to have died while they had a message in hand."""
        suspect, deaths = self._suspects.get(lane.ownership.partition.id, (0, 0))
        return deaths if seq == suspect else 0

    def _begin(self, lane: Lane, seq: int) -> None:
        """Start what has been noted, unless the lane has something else to do by now."""
        partition_id = lane.ownership.partition.id
        if not _waits(lane) or lane.waiting[0].seq != seq:
            self._not_tried(partition_id, seq)
            if _waits(lane):
                self._held(lane)  # one that came late was put before it
            return
        deaths = self._deaths(lane, seq)
        if deaths >= self._limit:
            self._not_tried(partition_id, seq)
            self._lanes.failures.bury_head(lane, f"{deaths} process{'es' * (deaths != 1)} died while handling it")
            return
        if deaths:
            _log.warning(
                "trying a message in whose handler a process died", deaths=deaths, **log_fields(lane.waiting[0])
            )
        self._lanes.let_through(lane)

    def _not_tried(self, partition_id: str, seq: int) -> None:
        if self._lanes.trying.get(partition_id) == seq:
            del self._lanes.trying[partition_id]


def _waits(lane: Lane) -> bool:
    return lane.phase is Phase.HELD and not (lane.incoming or lane.pausing) and bool(lane.waiting)
