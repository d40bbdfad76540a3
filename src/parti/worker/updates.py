"""Changes of what a worker's consumers carry: coalesced, tried again, and answered.

However many changes are asked for, one is under way at a time, and the newest set wins over those that were not tried
yet. A change is brought into force one consumer after the other, each of them wholly or not at all.
"""

from __future__ import annotations

import asyncio
import random
import time

import structlog

from parti.config import Settings
from parti.core.filters import FilterDiff, FilterSet, diff_filters
from parti.errors import ConfigError, PartiError
from parti.telemetry.tasks import owned as owned_task
from parti.worker.cargo import Cargo
from parti.worker.handling import Handling
from parti.worker.sessions import Sessions
from parti.worker.shards import Shards
from parti.worker.starts import Starts
from parti.worker.vehicle import ConsumerPorts

_log = structlog.get_logger("parti.consumer")

_RETRY_MIN_S, _RETRY_MAX_S = 0.1, 2.0
_SIGNAL = "consumer-update"


class Updates:
    """Makes what is wanted (see `Cargo`) what is carried and owned.

    A failure leaves the last good set active; after several in a row a health signal says so.
    """

    def __init__(
        self,
        ports: ConsumerPorts,
        settings: Settings,
        starts: Starts,
        shards: Shards,
        cargo: Cargo,
        handling: Handling,
        sessions: Sessions,
    ) -> None:
        self._ports = ports
        self._settings = settings
        self._starts = starts
        self._shards = shards
        self._cargo = cargo
        self._handling = handling
        self._sessions = sessions
        self._wanted_version = 0
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._updater: asyncio.Task[None] | None = None
        self._last_update_s = float("-inf")
        self._failures = 0
        self._told = ""
        """Why an update failed, as last logged."""
        self._lock = asyncio.Lock()
        """Held for the whole of an update; each consumer has a lock of its own."""

    @property
    def applying(self) -> bool:
        """Whether a change is being brought into force."""
        return self._lock.locked()

    async def bring_about(self) -> None:
        """Return when what is wanted now, or a newer set, is in force; raise the last error when it cannot be."""
        if self._updater is None and not self._differs():
            self._ports.metrics.update_skipped.inc()
            return
        self._wanted_version += 1
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((self._wanted_version, done))
        if self._updater is None:
            self._updater = owned_task(self._update(), "consumer-update", self._ports.health, signals=False)
        await done

    async def stop(self) -> None:
        """Give up a change that is under way."""
        if self._updater:
            self._updater.cancel()
            await asyncio.gather(self._updater, return_exceptions=True)

    def _differs(self) -> bool:
        same = diff_filters(self._shards.carried.subjects, self._cargo.to_carry().subjects).empty
        return not same or not diff_filters(self._handling.owned.subjects, self._cargo.wanted.subjects).empty

    async def _update(self) -> None:
        """Apply the newest wanted set until there is no newer one."""
        applied_version = 0
        ended: Exception = ConfigError("the worker is stopping")
        try:
            while applied_version < self._wanted_version:
                pause_s = self._last_update_s + self._settings.update_min_interval_s - time.monotonic()
                if pause_s > 0 and not self._urgent:
                    await asyncio.sleep(pause_s)
                applied_version, error = await self._apply_newest()
                self._answer(applied_version, error)
        except Exception as error:
            ended = error
            raise
        finally:
            self._updater = None
            self._answer(self._wanted_version, ended)

    @property
    def _urgent(self) -> bool:
        """Whether partitions wait for this update: nobody handles them."""
        added = diff_filters(self._shards.carried.subjects, self._cargo.wanted.subjects).added
        return bool(self._starts.granted) and (bool(added) or not self._handling.feeds)

    async def _apply_newest(self) -> tuple[int, Exception | None]:
        delay = _RETRY_MIN_S
        failure: Exception | None = None
        version = 0
        for attempt in range(1, self._settings.update_attempts + 1):
            diff = FilterDiff((), ())
            version = self._wanted_version
            try:
                # Re-read at each attempt: a newer set wins over one that is still being tried.
                await self._cargo.keep_unsafe()
                version, owned, carried = self._wanted_version, self._cargo.wanted, self._cargo.to_carry()
                diff = diff_filters(self._shards.carried.subjects, carried.subjects)
                if not self._differs():
                    self._ports.metrics.update_skipped.inc()
                    return version, None
                await self._apply(owned, carried, diff)
                return version, None
            except Exception as error:  # whatever it is, partitions wait for this update
                failure = error
                # Once for each reason: it is tried again for as long as it takes.
                tell, self._told = _log.debug if str(error) == self._told else _log.warning, str(error)
                tell(
                    "consumer update failed",
                    attempt=attempt,
                    added=diff.added[:20],
                    removed=diff.removed[:20],
                    error=str(error) or repr(error),
                    exc_info=None if isinstance(error, PartiError) else error,
                )
            await asyncio.sleep(delay * random.uniform(0.5, 1.5))
            delay = min(delay * 2, _RETRY_MAX_S)
        self._failed(failure)
        return version, failure

    async def _apply(self, owned: FilterSet, carried: FilterSet, diff: FilterDiff) -> None:
        """Bring one set into force, or leave the previous one in force and raise."""
        started = time.monotonic()
        self._last_update_s = started
        async with self._lock:
            try:
                for vehicle, part in await self._shards.share_out(carried):
                    await self._sessions.apply(vehicle, owned, part)
            finally:
                self._shards.shared_out()
        self._last_update_s = time.monotonic()
        self._ports.metrics.update_duration.observe(self._last_update_s - started)
        self.applied(diff)

    def applied(self, diff: FilterDiff) -> None:
        """A set is in force: say so, here and in the metrics."""
        metrics, subjects = self._ports.metrics, len(self._shards.carried.partitions)
        self._failures, self._told = 0, ""
        self._ports.health.clear(_SIGNAL)
        metrics.subject_count.value = subjects
        metrics.update_changes.inc("added", len(diff.added))
        metrics.update_changes.inc("removed", len(diff.removed))
        _log.info("consumer carries", subjects=subjects, added=len(diff.added), removed=len(diff.removed))

    def _failed(self, error: Exception | None) -> None:
        self._failures += 1
        self._ports.metrics.update_failures.inc()
        if self._failures >= self._settings.update_failure_threshold:
            self._ports.health.raise_signal(_SIGNAL, f"{self._failures} consumer updates failed in a row: {error}")

    def _answer(self, version: int, error: Exception | None) -> None:
        for waiting_for, future in self._waiters:
            if waiting_for <= version and not future.done():
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)
        self._waiters = [(v, f) for v, f in self._waiters if not f.done()]
