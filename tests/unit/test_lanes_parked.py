"""A parked partition is read back from the stream page by page, and goes on whatever happens to a page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.unit.lanes_bench import TEMPLATE, Bench, nothing

from parti.core.lane import Lane
from parti.core.retry import RetryPolicy
from parti.jetstream.backlog import Page
from parti.jetstream.direct import Stored
from parti.model.fleet import Grant
from parti.model.message import Message
from parti.worker.caution import Caution
from parti.worker.parking import Parking

LAST, PAGE = 100, 32
PARTITION = TEMPLATE.partition("a")


class Backlog:
    """A stream that holds the messages of one partition; it answers while it is open."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()

    async def read(self, subject: str, seq: int, *, up_to: int, batch: int, max_bytes: int) -> Page:
        await self.open.wait()
        found = [Stored(n, subject, b"x", None, datetime.now(UTC)) for n in range(seq, up_to + 1)]
        return Page(tuple(found[:batch]), exhausted=len(found) <= batch)


class Parked:
    """A bench whose partition is fed from the stream."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.backlog = Backlog()
        backlog: Any = self.backlog
        self.parking = Parking(bench.lanes, backlog, self._store, bench.metrics, limit=1000)
        self._task = asyncio.ensure_future(self.parking.run())

    async def _store(self) -> bool:
        return True

    def gain(self) -> None:
        """Begin the partition with all that the stream holds."""
        self.bench.own("a")
        self.bench.lanes.roster.gain(PARTITION, 1, feed_to=LAST)

    async def gain_a_page(self) -> None:
        """The same, until its first page waits; no handler has been started."""
        self.bench.lanes.on_ready = self.bench.signal.fire
        self.gain()
        await self.bench.until(lambda: self.bench.lanes.queued() == {"a": PAGE})

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@pytest.fixture
async def parked(bench: Bench) -> AsyncIterator[Parked]:
    parked = Parked(bench)
    yield parked
    await parked.close()


@pytest.mark.parametrize("position", [PAGE + 1, 60, LAST, LAST + 1])
async def test_a_parked_partition_whose_page_others_have_finished_is_fed_from_there(
    parked: Parked, position: int
) -> None:
    """As after a lost lease: another worker has handled it meanwhile."""
    bench = parked.bench
    await parked.gain_a_page()
    bench.lanes.skip_to({"a": position})
    bench.run_async(nothing)
    bench.send("a", LAST + 1)
    await bench.until(lambda: bench.started("a") == list(range(position, LAST + 2)))


async def test_a_parked_partition_in_backoff_whose_page_others_have_finished_is_fed_from_there() -> None:
    bench = Bench(policy=RetryPolicy(attempts=3, backoff_s=(60.0,)))
    parked = Parked(bench)

    async def handler(message: Message) -> None:
        if message.seq == 1:
            raise ValueError("bad")

    bench.run_async(handler)
    parked.gain()
    await bench.until(lambda: bench.ends == [1])
    await asyncio.sleep(0)
    bench.lanes.skip_to({"a": 60})
    await bench.until(lambda: bench.started("a") == [1, *range(60, LAST + 1)])
    await parked.close()
    await bench.close()


async def test_a_parked_partition_that_is_held_and_whose_page_others_have_finished_is_fed_from_there(
    parked: Parked,
) -> None:
    bench = parked.bench
    storable, asked = asyncio.Event(), asyncio.Event()

    async def store() -> bool:
        asked.set()
        await storable.wait()
        return True

    caution = Caution(bench.lanes, store, limit=2)
    caution.take({"a": Grant(1, 1, 10)})
    bench.run_async(nothing)
    parked.gain()
    await asked.wait()
    bench.lanes.skip_to({"a": 60})
    storable.set()
    await bench.until(lambda: bench.started("a") == list(range(60, LAST + 1)))
    await caution.stop()


async def test_a_parked_partition_that_nobody_feeds_is_named_until_it_is_fed(parked: Parked) -> None:
    bench, parking = parked.bench, parked.parking
    forgotten: list[Lane] = []
    bench.lanes.on_starved, feed = forgotten.append, bench.lanes.on_starved
    bench.run_async(nothing)
    parked.gain()
    (lane,) = forgotten
    assert parking.neglected() == [lane]
    parked.backlog.open.clear()
    feed(lane)
    assert parking.neglected() == [], "its page is under way, however long the stream takes"
    parked.backlog.open.set()
    bench.lanes.on_starved = feed
    await bench.until(lambda: bench.started("a") == list(range(1, LAST + 1)))
    assert parking.neglected() == []
