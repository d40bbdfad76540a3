"""A paused partition: nothing of it starts, everything goes on afterwards, and nobody else notices."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
from tests.unit.lanes_bench import TEMPLATE, Bench

from parti.core.lane import Lane, Phase
from parti.core.retry import RetryPolicy
from parti.model.message import Message
from parti.model.partition import Partition
from parti.worker.caution import Caution

PARTITION: Partition = TEMPLATE.partition("a")


class Paused:
    """A bench whose handler ends when it is told to."""

    def __init__(self, policy: RetryPolicy | None = None) -> None:
        self.bench = Bench(policy=policy) if policy else Bench()
        self.gates: dict[int, asyncio.Event] = {}
        self.fails: set[int] = set()
        self.bench.run_async(self._handle)

    async def _handle(self, message: Message) -> None:
        if message.seq in self.gates:
            await self.gates[message.seq].wait()
        if message.seq in self.fails:
            self.fails.discard(message.seq)
            raise ValueError("not this time")

    def gate(self, seq: int) -> asyncio.Event:
        return self.gates.setdefault(seq, asyncio.Event())

    async def started(self, *seqs: int) -> None:
        await self.bench.until(lambda: set(seqs) <= set(self.bench.started()))

    async def pausing(self) -> asyncio.Task[int | None]:
        """Ask for a pause of the partition "a", which lasts for a moment only; the task ends with its position."""

        async def pause() -> int | None:
            async with self.bench.lanes.pauses.paused("a") as position:
                return position

        task = asyncio.create_task(pause())
        await asyncio.sleep(0)
        return task


@pytest.fixture
async def paused() -> AsyncIterator[Paused]:
    paused = Paused()
    try:
        yield paused
    finally:
        assert paused.bench.runners
        await paused.bench.runners.stop()


async def test_an_idle_partition_is_paused_at_once_and_takes_what_arrived_meanwhile(paused: Paused) -> None:
    bench = paused.bench
    bench.own("a", "b")
    bench.send("a", 1)
    await bench.acked(1)
    async with bench.lanes.pauses.paused("a") as position:
        assert position == 2
        bench.send("a", 2, 3)
        bench.send("b", 4)
        await bench.acked(4)
        assert bench.started("a") == [1]
    await bench.acked(2, 3)
    assert bench.started("a") == [1, 2, 3]


async def test_a_running_handler_ends_first_and_its_message_counts(paused: Paused) -> None:
    bench, gate = paused.bench, paused.gate(1)
    bench.own("a")
    bench.send("a", 1, 2)
    await paused.started(1)

    async def pause() -> int | None:
        async with bench.lanes.pauses.paused("a") as position:
            assert bench.started() == [1]
            return position

    pausing = asyncio.create_task(pause())
    await asyncio.sleep(0)
    assert not pausing.done()
    gate.set()
    assert await pausing == 2
    await bench.acked(1, 2)


async def test_a_ready_partition_that_is_paused_does_not_start_twice(paused: Paused) -> None:
    """The lane stands in the queue of the ready ones when it is paused, and is put there again afterwards."""
    bench, gate = paused.bench, paused.gate(1)
    bench.own("a", "b")
    bench.send("b", 1)
    await paused.started(1)
    bench.lanes.deliver(b"dc.a", b"$JS.ACK.DC.c.1.2.2.1700000000000000000.0", None, b"x", 2)
    assert bench.lane("a").phase is Phase.READY
    async with bench.lanes.pauses.paused("a") as position:
        assert position == 0
    gate.set()
    await bench.acked(1, 2)
    assert bench.started("a") == [2]


async def test_a_partition_without_a_lane_cannot_be_paused(paused: Paused) -> None:
    paused.bench.own("a")
    async with paused.bench.lanes.pauses.paused("a") as position:
        assert position is None


async def test_a_partition_that_is_released_while_its_handler_runs_is_not_paused(paused: Paused) -> None:
    bench, gate = paused.bench, paused.gate(1)
    bench.own("a")
    bench.send("a", 1)
    await paused.started(1)
    pausing = await paused.pausing()
    bench.own()
    assert await pausing is None
    gate.set()
    await bench.acked(1)


async def test_a_partition_that_is_released_while_it_is_paused_starts_nothing_more(paused: Paused) -> None:
    bench = paused.bench
    bench.own("a", "b")
    bench.send("a", 1)
    await bench.acked(1)
    async with bench.lanes.pauses.paused("a"):
        bench.send("a", 2)
        bench.own("b")
    bench.send("b", 3)
    await bench.acked(3)
    assert bench.started("a") == [1]
    assert bench.lanes.roster.known_position("a") == 2


async def test_what_fails_in_the_body_does_not_leave_the_partition_paused(paused: Paused) -> None:
    bench = paused.bench
    bench.own("a")
    bench.send("a", 1)
    await bench.acked(1)

    async def fail() -> None:
        async with bench.lanes.pauses.paused("a"):
            bench.send("a", 2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    await bench.acked(2)


async def test_giving_up_the_wait_for_a_handler_does_not_leave_the_partition_paused(paused: Paused) -> None:
    bench, gate = paused.bench, paused.gate(1)
    bench.own("a")
    bench.send("a", 1, 2)
    await paused.started(1)

    async def pause() -> None:
        async with bench.lanes.pauses.paused("a"):
            pytest.fail("the handler has not ended")

    pausing = asyncio.create_task(pause())
    await asyncio.sleep(0)
    pausing.cancel()
    await asyncio.wait([pausing])
    gate.set()
    await bench.acked(1, 2)


async def test_a_partition_between_two_attempts_stands_at_the_failed_message() -> None:
    paused = Paused(RetryPolicy(attempts=3, backoff_s=(0.05,)))
    bench = paused.bench
    paused.fails = {1}
    bench.own("a")
    bench.send("a", 1, 2)
    await bench.until(lambda: bench.ends)
    async with bench.lanes.pauses.paused("a") as position:
        assert position == 0
        assert len(bench.starts) == 1
    await bench.acked(1, 2)
    assert bench.started() == [1, 1, 2]
    assert bench.runners
    await bench.runners.stop()


async def test_threads_take_no_more_than_they_have_begun() -> None:
    bench = Bench()
    gate = threading.Event()

    def handle(message: Message) -> None:
        assert gate.wait(3)

    bench.run_threads(handle)
    bench.own("a")
    bench.send("a", *range(1, 41))
    await bench.until(lambda: bench.starts)

    async def pause() -> int:
        async with bench.lanes.pauses.paused("a") as position:
            begun = len(bench.starts)
            assert position == begun + 1, "the position is past everything that a thread has taken"
            bench.send("a", 41)
            assert len(bench.starts) == begun
            return begun

    pausing = asyncio.create_task(pause())
    await asyncio.sleep(0)
    gate.set()
    assert await pausing < 40
    await bench.acked(*range(1, 42))
    assert bench.started() == list(range(1, 42))
    assert bench.runners
    await bench.runners.stop()


class Feeder:
    """Feeds a parked lane page by page, as `Parking` does, whenever it has run empty."""

    def __init__(self, bench: Bench, *pages: list[int]) -> None:
        self._bench = bench
        self._pages = list(pages)
        bench.lanes.on_starved = self._starved

    def _starved(self, lane: Lane) -> None:
        asyncio.get_running_loop().call_soon(self._feed, lane)

    def _feed(self, lane: Lane) -> None:
        if self._pages and not lane.waiting:
            page = self._pages.pop(0)
            lane.feed([Message("dc.a", b"x", seq, lane.ownership) for seq in page], not self._pages)
            self._bench.lanes.fed(lane)


async def test_a_fed_partition_that_ran_empty_while_it_was_to_be_paused_is_fed_again(paused: Paused) -> None:
    bench, gate = paused.bench, paused.gate(2)
    Feeder(bench, [1, 2], [3, 4])
    bench.own("a")
    bench.lanes.roster.gain(PARTITION, 1, feed_to=4)
    await paused.started(2)
    pausing = await paused.pausing()
    gate.set()
    assert await pausing == 3
    await paused.started(3, 4)


async def test_a_fed_partition_that_needs_care_is_fed_again_too(paused: Paused) -> None:
    bench, gate = paused.bench, paused.gate(2)

    async def store() -> bool:
        return True

    caution = Caution(bench.lanes, store, limit=2)
    bench.lanes.roster.careful = {"a": 4}
    Feeder(bench, [1, 2], [3, 4])
    bench.own("a")
    bench.lanes.roster.gain(PARTITION, 1, feed_to=4)
    await paused.started(2)
    pausing = await paused.pausing()
    gate.set()
    assert await pausing == 3
    await paused.started(3, 4)
    await caution.stop()
