"""Partitions of a stateful handler: restored before they begin, saved when they are let go, checkpointed in between.

A partition begins at the position of the state that was restored, whatever anybody else knows: the messages since
then are not in the state and are handled again. On a planned move the state is saved after the last handler has
ended, so nothing is handled again; after a crash the last checkpoint counts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from parti.errors import PartiError
from parti.model.partition import Partition
from parti.telemetry.health import Health
from parti.telemetry.metrics import Metrics
from parti.worker.lanes import Lanes
from parti.worker.state import StateFenced, StateKeeper

_log = structlog.get_logger("parti.stateful")
_SIGNAL = "state"
_RETRY_MIN_S, _RETRY_MAX_S = 0.2, 10.0
_SAVE_ATTEMPTS = 3
_CHECKPOINTS_AT_ONCE = 2


class StatefulPartitions:
    """Loads, saves and checkpoints, one partition at a time for each, several partitions at once."""

    def __init__(
        self,
        keeper: StateKeeper,
        lanes: Lanes,
        metrics: Metrics,
        health: Health,
        *,
        worker_id: str,
        stream_created: Callable[[], str],
        checkpoint_interval_s: float,
    ) -> None:
        self.on_saved: Callable[[], None] = lambda: None
        """Called when the state of a partition that was let go has been saved, or could not be."""
        self._keeper = keeper
        self._lanes = lanes
        self._metrics = metrics
        self._health = health
        self._worker_id = worker_id
        self._stream_created = stream_created
        self._interval_s = checkpoint_interval_s
        self._begun: dict[str, Partition] = {}
        self._saved_at: dict[str, int] = {}
        self._due_s: dict[str, float] = {}
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._saving: dict[str, asyncio.Task[None]] = {}
        self._stopping = False

    @property
    def saving(self) -> tuple[str, ...]:
        """Partitions that were let go and whose state is not saved yet."""
        return tuple(self._saving)

    def has_begun(self, partition_id: str) -> bool:
        """Whether the handler has the state of a partition."""
        return partition_id in self._begun

    def begin(self, partition: Partition, then: Callable[[int | None], None]) -> None:
        """Restore a partition; `then` gets the position of its state (None: there was none) unless it is let go."""
        if partition.id in self._loading or self._stopping:
            return
        self._loading[partition.id] = self._spawn(self._load(partition, then), self._loading, partition.id)

    def end(self, partition: Partition) -> None:
        """The partition was let go: save its state as soon as its handler has ended."""
        loading = self._loading.pop(partition.id, None)
        if loading:
            loading.cancel()
        if self._begun.pop(partition.id, None):
            self._saving[partition.id] = self._spawn(self._save_at_end(partition), self._saving, partition.id)

    async def run(self) -> None:
        """Take checkpoints until cancelled."""
        turns = asyncio.Semaphore(_CHECKPOINTS_AT_ONCE)

        async def checkpoint(partition: Partition) -> None:
            async with turns:
                await self._checkpoint(partition)

        while True:
            await asyncio.sleep(min(1.0, self._interval_s))
            now_s = time.monotonic()
            due = [p for p in self._begun.values() if self._due_s.get(p.id, 0.0) <= now_s and self._has_moved(p)]
            await asyncio.gather(*(checkpoint(partition) for partition in due))

    async def stop(self, *, save: bool, timeout_s: float) -> None:
        """Save what is to be saved, within a time; nothing begins any more."""
        self._stopping = True
        for task in self._loading.values():
            task.cancel()
        for partition in list(self._begun.values()) if save else ():
            self.end(partition)
        if self._saving:
            _, late = await asyncio.wait(self._saving.values(), timeout=timeout_s if save else 0)
            for task in late:
                task.cancel()

    # ── one partition ─────────────────────────────────────────────────────────────────────────────────────────

    async def _load(self, partition: Partition, then: Callable[[int | None], None]) -> None:
        delay_s = _RETRY_MIN_S
        while True:
            saving = self._saving.get(partition.id)
            if saving:
                await asyncio.wait([saving])  # it came back before its last state was saved
            started_s = time.monotonic()
            try:
                position = await self._keeper.load(
                    partition, fence=self._fence(partition), stream_created=self._stream_created()
                )
                break
            except PartiError as error:
                self._failed(partition, "cannot be restored; it does not begin", error)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _RETRY_MAX_S)
        self._metrics.state_duration.observe(time.monotonic() - started_s)
        self._health.clear(_SIGNAL)
        self._begun[partition.id] = partition
        self._saved_at[partition.id] = position or 0
        self._due_s[partition.id] = time.monotonic() + self._interval_s
        self._loading.pop(partition.id, None)
        _log.info("state restored", partition=partition.id, position=position)
        then(position)

    async def _save_at_end(self, partition: Partition) -> None:
        while partition.id in self._lanes.leaving:
            await self._lanes.someone_left()
        try:
            for attempt in range(1, _SAVE_ATTEMPTS + 1):
                if await self._save(partition, self._lanes.known_position(partition.id)):
                    break
                await asyncio.sleep(_RETRY_MIN_S * attempt)
        finally:
            self._saving.pop(partition.id, None)
            self.on_saved()

    async def _checkpoint(self, partition: Partition) -> None:
        """Save a partition between two of its messages."""
        async with self._lanes.paused(partition.id) as position:
            if position is not None and self.has_begun(partition.id):
                await self._save(partition, position)
        self._due_s[partition.id] = time.monotonic() + self._interval_s

    async def _save(self, partition: Partition, position: int) -> bool:
        """Save the state; True when that worked or is somebody else's business by now."""
        if not position or position == self._saved_at.get(partition.id):
            return True
        started_s = time.monotonic()
        try:
            pointer = await self._keeper.save(
                partition,
                position=position,
                fence=self._fence(partition),
                worker=self._worker_id,
                stream_created=self._stream_created(),
            )
        except StateFenced as error:
            _log.warning("state not saved", partition=partition.id, error=str(error))
            return True
        except PartiError as error:
            self._failed(partition, "cannot be saved; the last one counts", error)
            return False
        self._saved_at[partition.id] = position
        self._metrics.state_duration.observe(time.monotonic() - started_s)
        self._metrics.state_bytes.inc(pointer.size)
        self._health.clear(_SIGNAL)
        return True

    def _has_moved(self, partition: Partition) -> bool:
        return self._lanes.known_position(partition.id) > self._saved_at.get(partition.id, 0)

    def _fence(self, partition: Partition) -> int:
        return self._lanes.fences.get(partition.id, 0)

    def _failed(self, partition: Partition, what: str, error: PartiError) -> None:
        self._metrics.state_failures.inc()
        self._health.raise_signal(_SIGNAL, f"state of partition {partition.id} {what}: {error}")
        _log.error("state of a partition", partition=partition.id, trouble=what, error=str(error))

    def _spawn(
        self, work: Coroutine[Any, Any, None], book: dict[str, asyncio.Task[None]], partition_id: str
    ) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)

        def forget(done: asyncio.Task[None]) -> None:
            if book.get(partition_id) is done:
                del book[partition_id]

        task.add_done_callback(forget)
        return task
