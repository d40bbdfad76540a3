"""Partitions of a stateful handler: restored before they begin, saved when they are let go, checkpointed in between.

A partition begins at the position of the state that was restored, whatever anybody else knows: the messages since
then are not in the state and are handled again. On a planned move the state is saved after the last handler has
ended, so nothing is handled again; after a crash the last checkpoint counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any
from weakref import WeakValueDictionary

import structlog

from parti.errors import PartiError, StateFenced, StateUnavailable
from parti.model.partition import Partition
from parti.telemetry.health import Health
from parti.telemetry.metrics import Metrics
from parti.telemetry.tasks import owned
from parti.worker.lanes import Lanes
from parti.worker.state import StateKeeper

_log = structlog.get_logger("parti.stateful")
_SIGNAL = "state"
_RETRY_MIN_S, _RETRY_MAX_S = 0.2, 10.0
_SAVE_ATTEMPTS = 3
_CHECKPOINTS_AT_ONCE = 2
_CLEAN_UP_S = 2.0


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
        slow_after_s: float = 30.0,
    ) -> None:
        """`slow_after_s`: a partition whose state takes so long to be saved or restored is told of."""
        self.on_saved: Callable[[], None] = lambda: None
        """Called when the state of a partition that was let go has been saved, or could not be."""
        self.durable: Callable[[], Awaitable[bool]] | None = None
        """Asked before a state is saved: whether all that has to be stored before its position is."""
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
        self._checkpointing: dict[str, asyncio.Task[None]] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._troubles: dict[str, str] = {}
        self._slow_after_s = slow_after_s
        self._under_way: dict[str, tuple[str, float]] = {}
        """What is being done with the state of partitions that wait for it, and since when."""
        self._turns = asyncio.Semaphore(_CHECKPOINTS_AT_ONCE)
        self._stopping = False

    @property
    def saving(self) -> tuple[str, ...]:
        """Partitions that were let go and whose state is not saved yet."""
        return tuple(self._saving)

    def has_begun(self, partition_id: str) -> bool:
        """Whether the handler has the state of a partition."""
        return partition_id in self._begun

    def begin(self, partition: Partition, start: Callable[[], int], then: Callable[[int], None]) -> None:
        """Restore a partition; `then` gets the position of its state, unless it is let go before.

        A partition without a state begins at `start()`. The handler's empty state is saved there first: after a crash
        everything since then has to be handled again, however far the partition had got.
        """
        if partition.id in self._loading or self._stopping:
            return
        self._loading[partition.id] = self._spawn(self._load(partition, start, then), self._loading, partition.id)

    def end(self, partition: Partition) -> None:
        """The partition was let go: save its state as soon as its handler has ended."""
        loading = self._loading.pop(partition.id, None)
        if loading:
            loading.cancel()
        if self._begun.pop(partition.id, None):
            self._saving[partition.id] = self._spawn(self._save_at_end(partition), self._saving, partition.id)

    def start_over(self) -> None:
        """The stream was made anew: no state counts any more, and every partition has to begin again."""
        for task in (*self._loading.values(), *self._checkpointing.values()):
            task.cancel()
        self._loading.clear()
        self._begun.clear()
        self._saved_at.clear()

    async def run(self) -> None:
        """Take checkpoints until cancelled."""
        try:
            while True:
                await asyncio.sleep(min(1.0, self._interval_s))
                now_s = time.monotonic()
                self._tell_slow(now_s)
                running = {lane.ownership.partition.id for lane in self._lanes.running_lanes()}
                for partition in self._begun.values():
                    due = self._due_s.get(partition.id, 0.0) <= now_s and self._has_moved(partition)
                    if due and partition.id not in self._checkpointing:
                        work = self._checkpoint(partition, waits=partition.id in running)
                        self._checkpointing[partition.id] = self._spawn(work, self._checkpointing, partition.id)
        finally:
            for task in self._checkpointing.values():
                task.cancel()

    async def stop(self, *, save: bool, timeout_s: float) -> None:
        """Save what is to be saved, within a time; nothing begins any more."""
        self._stopping = True
        abandoned = [*self._loading.values()]
        if save:
            for partition in list(self._begun.values()):
                self.end(partition)
        else:
            abandoned += self._checkpointing.values()
        for task in abandoned:
            task.cancel()
        if self._saving:
            _, late = await asyncio.wait(self._saving.values(), timeout=timeout_s if save else 0)
            for task in late:
                task.cancel()
            abandoned += late
        await asyncio.gather(*abandoned, return_exceptions=True)
        try:
            async with asyncio.timeout(_CLEAN_UP_S):
                await self._keeper.settle()
        except TimeoutError:
            _log.warning("old states are left to the sweep")

    # ── one partition ─────────────────────────────────────────────────────────────────────────────────────────

    async def _load(self, partition: Partition, start: Callable[[], int], then: Callable[[int], None]) -> None:
        delay_s = _RETRY_MIN_S
        while True:
            saving = self._saving.get(partition.id)
            if saving:
                await asyncio.wait([saving])  # it came back before its last state was saved
            started_s = time.monotonic()
            try:
                async with self._lock(partition):
                    position = await self._restore(partition, start)
                break
            except Exception as error:  # whatever it is, a partition that is not restored does not begin
                self._failed(partition, "cannot be restored; it does not begin", error)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _RETRY_MAX_S)
        self._metrics.state_duration.observe(time.monotonic() - started_s)
        self._went_well(partition)
        self._begun[partition.id] = partition
        self._saved_at[partition.id] = position
        self._due_s[partition.id] = time.monotonic() + self._interval_s
        self._loading.pop(partition.id, None)
        _log.info("state restored", partition=partition.id, position=position)
        then(position)

    async def _restore(self, partition: Partition, start: Callable[[], int]) -> int:
        created = self._stream_created()
        with self._noted(partition, "restored"):
            position = await self._keeper.load(partition, fence=self._fence(partition), stream_created=created)
        if position is None:
            position = max(1, start())
            await self._keep(partition, position)
        return position

    async def _save_at_end(self, partition: Partition) -> None:
        while partition.id in self._lanes.leaving:
            await self._lanes.pauses.someone_left()
        try:
            for attempt in range(1, _SAVE_ATTEMPTS + 1):
                async with self._lock(partition):
                    if await self._save(partition, self._lanes.roster.known_position(partition.id)):
                        break
                await asyncio.sleep(_RETRY_MIN_S * attempt)
        finally:
            self._saving.pop(partition.id, None)
            # The last state that was saved counts from now on; what is wrong with it is the next owner's business.
            self._went_well(partition)
            self.on_saved()

    async def _checkpoint(self, partition: Partition, *, waits: bool) -> None:
        """Save a partition between two of its messages.

        `waits`: a handler of it runs. Others that can be saved at once must not wait for that, but only so many are
        to stand still at the same time.
        """
        first, then = (contextlib.nullcontext(), self._turns) if waits else (self._turns, contextlib.nullcontext())
        async with first, self._lanes.pauses.paused(partition.id) as position, then, self._lock(partition):
            if position is not None and self.has_begun(partition.id):
                await self._save(partition, position)
                self._due_s[partition.id] = time.monotonic() + self._interval_s

    async def _save(self, partition: Partition, position: int) -> bool:
        """Save the state; True when that worked or is somebody else's business by now."""
        if not position or position == self._saved_at.get(partition.id):
            return True
        started_s = time.monotonic()
        try:
            if self.durable and not await self.durable():
                raise StateUnavailable("the ledger, which comes before it, does not take rows at present")
            size = await self._keep(partition, position)
        except StateFenced as error:
            _log.warning("state not saved", partition=partition.id, error=str(error))
            return True
        except Exception as error:
            self._failed(partition, "cannot be saved; the last one counts", error)
            return False
        self._saved_at[partition.id] = position
        self._metrics.state_duration.observe(time.monotonic() - started_s)
        self._metrics.state_bytes.inc(size)
        self._went_well(partition)
        return True

    async def _keep(self, partition: Partition, position: int) -> int:
        with self._noted(partition, "saved"):
            pointer = await self._keeper.save(
                partition,
                position=position,
                fence=self._fence(partition),
                worker=self._worker_id,
                stream_created=self._stream_created(),
            )
        return pointer.size

    def _has_moved(self, partition: Partition) -> bool:
        return self._lanes.roster.known_position(partition.id) > self._saved_at.get(partition.id, 0)

    def _fence(self, partition: Partition) -> int:
        return self._lanes.roster.fences.get(partition.id, 0)

    def _lock(self, partition: Partition) -> asyncio.Lock:
        """Held by whoever saves or loads a partition: a checkpoint may be under way when it is let go."""
        return self._locks.setdefault(partition.id, asyncio.Lock())

    @contextlib.contextmanager
    def _noted(self, partition: Partition, what: str) -> Iterator[None]:
        """The partition stands still meanwhile: keep in mind since when."""
        self._under_way[partition.id] = what, time.monotonic()
        try:
            yield
        finally:
            self._under_way.pop(partition.id, None)

    def _tell_slow(self, now_s: float) -> None:
        """Say of partitions that stand still for long why: the handler's own code may never return."""
        for partition_id, (what, since_s) in self._under_way.items():
            if now_s - since_s >= self._slow_after_s and partition_id not in self._troubles:
                said = f"partition {partition_id} stands still: its state is not {what} after {now_s - since_s:.0f} s"
                self._troubles[partition_id] = said
                self._health.raise_signal(_SIGNAL, said)
                _log.error("a partition waits for its state", partition=partition_id, trouble=said)

    def _failed(self, partition: Partition, what: str, error: Exception) -> None:
        foreseen = isinstance(error, PartiError)
        said = str(error) if foreseen else repr(error)
        self._metrics.state_failures.inc()
        self._troubles[partition.id] = f"state of partition {partition.id} {what}: {said}"
        self._health.raise_signal(_SIGNAL, self._troubles[partition.id])
        trace = None if foreseen else error
        _log.error("state of a partition", partition=partition.id, trouble=what, error=said, exc_info=trace)

    def _went_well(self, partition: Partition) -> None:
        """One partition is in order; the signal stays for the sake of others that are not."""
        self._troubles.pop(partition.id, None)
        if self._troubles:
            self._health.raise_signal(_SIGNAL, next(iter(self._troubles.values())))
        else:
            self._health.clear(_SIGNAL)

    def _spawn(
        self, work: Coroutine[Any, Any, None], book: dict[str, asyncio.Task[None]], partition_id: str
    ) -> asyncio.Task[None]:
        task = owned(work, "state", self._health)

        def forget(done: asyncio.Task[None]) -> None:
            if book.get(partition_id) is done:
                del book[partition_id]

        task.add_done_callback(forget)
        return task
