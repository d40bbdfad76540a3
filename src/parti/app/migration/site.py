"""What the steps of a migration work with: the fleet's records, the old consumers, and a watch of the claims."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from parti.coordination.control_plane import ControlPlane
from parti.coordination.migration_desk import MigrationDesk
from parti.coordination.orders import Situation, watch_situation
from parti.core.migration import FOREVER, ConsumerState
from parti.errors import ConfigError, ControlPlaneReset, NotFound
from parti.jetstream.api import ConsumerInfo, JetStreamApi
from parti.jetstream.kv import Entry
from parti.model.fleet import Claim, Orders
from parti.model.migration import OldConsumer

_REQUESTS_AT_ONCE = 64
_T = TypeVar("_T")
_R = TypeVar("_R")

Told = Callable[[str, int, int], None]
"""Hears what is being done, how many are done, and of how many."""


def silent(doing: str, done: int, total: int) -> None:
    """Tell nobody."""


@dataclass(frozen=True, slots=True)
class Site:
    """One migration under way."""

    plane: ControlPlane
    desk: MigrationDesk
    eye: FleetEye
    told: Told = silent

    @property
    def api(self) -> JetStreamApi:
        """JetStream."""
        return self.plane.api

    @property
    def stream(self) -> str:
        """The stream whose consumers are migrated."""
        return self.desk.migration.stream

    def old_ones(self, partitions: Iterable[str]) -> list[OldConsumer]:
        """The records of these partitions."""
        return [self.desk.old[p] for p in partitions]

    async def state(self, old: OldConsumer) -> ConsumerState | None:
        """An old consumer as it is now; None when it is gone, or when there never was one."""
        if not old.consumer:
            return None
        try:
            return state_of(await self.api.consumer_info(self.stream, old.consumer))
        except NotFound:
            return None

    async def pause(self, old: OldConsumer, for_s: float | None) -> bool:
        """Let it deliver nothing for so long (None: for good); False when it is gone."""
        until = FOREVER if for_s is None else datetime.now(UTC) + timedelta(seconds=for_s)
        try:
            await self.api.pause_consumer(self.stream, old.consumer, until)
        except NotFound:
            return False
        return True

    async def resume(self, old: OldConsumer) -> bool:
        """Let it deliver again; False when it is gone."""
        try:
            await self.api.pause_consumer(self.stream, old.consumer, None)
        except NotFound:
            return False
        return True

    async def delete(self, old: OldConsumer) -> None:
        """Delete it; one that is gone already is fine."""
        with suppress(NotFound):
            await self.api.delete_consumer(self.stream, old.consumer)

    async def check_stream(self) -> None:
        """Raise `ConfigError` when the stream is not the one that the records speak of."""
        record = self.desk.migration
        try:
            info = await self.api.stream_info(record.stream)
        except NotFound:
            raise ConfigError(
                f"the stream {record.stream!r} does not exist any more; 'parti migrate run --abandon' ends the "
                f"migration"
            ) from None
        if info.created != record.stream_created:
            raise ConfigError(
                f"the stream {record.stream!r} was made anew at {info.created}, so nothing that this migration knows "
                f"holds; begin again with 'parti migrate run --phase shadow', or end it with --abandon"
            )


def state_of(info: ConsumerInfo) -> ConsumerState:
    """What the core wants to know of a consumer."""
    return ConsumerState(
        name=info.name,
        config=dict(info.config),
        subjects=info.subjects,
        ack_floor=info.ack_floor,
        delivered=info.delivered,
        ack_pending=info.ack_pending,
        pending=info.pending,
        deliveries=info.deliveries,
        redelivered=info.redelivered,
        paused=info.paused,
    )


async def for_each(items: Collection[_T], do: Callable[[_T], Awaitable[_R]]) -> list[_R]:
    """Do something for each, several at a time; the first error ends it, when those under way have ended."""
    room = asyncio.Semaphore(_REQUESTS_AT_ONCE)

    async def one(item: _T) -> _R:
        async with room:
            return await do(item)

    results = await asyncio.gather(*(one(item) for item in items), return_exceptions=True)
    done: list[_R] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        done.append(result)
    return done


async def in_portions(
    items: Sequence[_T],
    at_once: int,
    first: Callable[[Sequence[_T]], Awaitable[_R]],
    then: Callable[[_R], Awaitable[None]],
) -> list[float]:
    """Do two steps with portions of these, the first of one portion beside the second of the one before.

    Never more than `at_once` are between the beginning of the first and the end of the second; returns how long each
    portion was. An error ends it, and what was under way is cancelled: steps can be repeated.
    """
    size, took_s = max(1, at_once // 2), []
    behind: asyncio.Task[None] | None = None

    async def finish(ready: _R, began_s: float) -> None:
        await then(ready)
        took_s.append(time.monotonic() - began_s)

    try:
        for begin in range(0, len(items), size):
            if behind and 2 * size > at_once:
                await behind
            began_s = time.monotonic()
            ready = await first(items[begin : begin + size])
            if behind:
                await behind
            behind = asyncio.create_task(finish(ready, began_s))
        if behind:
            await behind
    finally:
        if behind:
            behind.cancel()
            await asyncio.gather(behind, return_exceptions=True)
    return took_s


# ── watching the fleet ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class FleetEye:
    """The fleet's records as they are, and a way to wait for them."""

    situation: Situation = field(default_factory=Situation)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _reset: bool = False

    def take(self, key: str, entry: Entry) -> None:
        """A key has this value now."""
        self.situation.take(key, entry)
        self._changed.set()

    def lose(self, created: str) -> None:
        """The bucket was made anew."""
        self._reset = True
        self._changed.set()

    async def until(self, pending: Callable[[], Collection[str]], within_s: float, *, since: int = 0) -> list[str]:
        """Wait until nothing is pending; returns what is when time is up.

        `since`: a revision of the orders that has to be seen first, because a replica that lags may show claims from
        before it.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self.situation.revision < since or pending():
                    if self._reset:
                        raise ControlPlaneReset("the bucket was made anew, and the records of the migration are gone")
                    self._changed.clear()
                    await self._changed.wait()
        return list(pending())

    @property
    def claims(self) -> Mapping[str, Claim]:
        """Who owns what."""
        return self.situation.records.claims

    @property
    def orders(self) -> Orders:
        """The orders that stand."""
        return self.situation.orders

    def unowned(self, partitions: Iterable[str]) -> list[str]:
        """Those of these that no live worker owns."""
        members = self.situation.records.members
        return [p for p in partitions if not (c := self.claims.get(p)) or c.state == "free" or c.owner not in members]

    def kept(self, partitions: Iterable[str]) -> list[str]:
        """Those of these that the fleet has not let go of."""
        return [p for p in partitions if (c := self.claims.get(p)) and c.state != "free"]


@asynccontextmanager
async def watching(plane: ControlPlane) -> AsyncIterator[FleetEye]:
    """Watch the fleet's records."""
    eye = FleetEye()
    watch = watch_situation(plane, eye.take, eye.lose)
    try:
        await watch.start()
        yield eye
    finally:
        await watch.stop()
