"""Measures how much work each partition of a worker is, and publishes what it has learned, seldom."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from datetime import UTC, datetime

import structlog

from parti.core.loads import Learning, Sample, noticed
from parti.errors import PartiError
from parti.model.fleet import LoadRecord, encode, key_of
from parti.worker.lanes import Lanes
from parti.worker.progress import ProgressStore

_log = structlog.get_logger("parti.loads")
_LOOKS, _WRITES = 30, 6
"""How often in the length of the window lanes are looked at, and at most how often the record is written."""


class LoadMeter:
    """Keeps `load.<worker>`: written when a figure has changed noticeably, under the worker's lease.

    A write that fails is tried again at the next turn; until then the rebalancer goes by the figures before.
    """

    def __init__(
        self, lanes: Lanes, store: ProgressStore, worker_id: str, *, incarnation: int, window_s: float
    ) -> None:
        self._lanes = lanes
        self._store = store
        self._key = key_of("load", worker_id)
        self._incarnation = incarnation
        self._look_s, self._write_s = window_s / _LOOKS, window_s / _WRITES
        self._learning = Learning(half_life_s=window_s)
        self._published: dict[str, float] = {}
        self._looked_s = time.perf_counter()

    def continues(self, store: ProgressStore, incarnation: int) -> None:
        """Go on under another lease of the same id."""
        self._store, self._incarnation = store, incarnation
        self._published = {}  # somebody else may have written the record, or the bucket may be another one

    async def run(self) -> None:
        """Look and publish until cancelled."""
        due_s = 0.0
        while True:
            await asyncio.sleep(self._look_s)
            now_s = time.perf_counter()
            self.look(now_s)
            if now_s >= due_s:
                await self.publish()
                due_s = now_s + self._write_s

    def look(self, now_s: float) -> None:
        """Take in what handlers took since the last look."""
        running_s: dict[str, float] = defaultdict(float)
        queued = dict(self._lanes.queued())
        for lane in self._lanes.running_lanes():
            partition_id = lane.ownership.partition.id
            running_s[partition_id] += now_s - lane.started_s
            queued[partition_id] = max(0, queued.get(partition_id, 0) - 1)
        samples = dict.fromkeys(self._lanes.roster.owned, Sample())
        for lane in self._lanes.roster.all():
            partition_id = lane.ownership.partition.id
            if lane.effort and partition_id in samples:
                seconds, calls = lane.effort.take(running_s[partition_id])
                samples[partition_id] = Sample(seconds, calls, queued.get(partition_id, 0))
        self._learning.observe(samples, now_s - self._looked_s)
        self._looked_s = now_s

    async def publish(self) -> None:
        """Write the record if it would say something new."""
        loads = noticed(self._published, self._learning.loads())
        if loads == self._published:
            return
        record = LoadRecord(incarnation=self._incarnation, loads=loads, at=datetime.now(UTC))
        try:
            await self._store.put(self._key, encode(record), revision=0)
        except PartiError as error:
            _log.warning("loads not published; trying again", error=str(error))
            return
        self._published = loads
