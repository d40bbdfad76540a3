"""The event loop in virtual time, and processes that stop, continue and die in it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from parti.coordination import lease
from parti.sim.loop import StandstillError, VirtualLoop
from parti.sim.network import OUTSIDE
from parti.sim.patches import EPOCH_S, clocks_of, simulated
from parti.sim.process import Condition, Process


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.dispose()


async def note(loop: VirtualLoop, seen: list[tuple[str, float]], name: str, *waits_s: float) -> None:
    for wait_s in waits_s:
        await asyncio.sleep(wait_s)
        seen.append((name, round(loop.now_s, 6)))


def run(loop: VirtualLoop, seconds: float) -> None:
    loop.run_until_complete(loop.create_task(asyncio.sleep(seconds), context=OUTSIDE))


def test_an_hour_passes_at_once_and_timers_fire_in_order(loop: VirtualLoop) -> None:
    seen: list[tuple[str, float]] = []
    began_s = time.monotonic()
    loop.create_task(note(loop, seen, "slow", 3600.0), context=OUTSIDE)
    loop.create_task(note(loop, seen, "quick", 0.5, 0.5), context=OUTSIDE)
    run(loop, 4000.0)
    assert seen == [("quick", 0.5), ("quick", 1.0), ("slow", 3600.0)]
    assert time.monotonic() - began_s < 5


def test_timeouts_are_virtual(loop: VirtualLoop) -> None:
    async def wait() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(100):
                await asyncio.Event().wait()

    loop.run_until_complete(loop.create_task(wait(), context=OUTSIDE))
    assert loop.now_s == pytest.approx(100)


def test_waiting_for_what_can_never_come_is_an_error(loop: VirtualLoop) -> None:
    with pytest.raises(StandstillError):
        loop.run_until_complete(loop.create_task(asyncio.Event().wait(), context=OUTSIDE))


def test_what_is_run_in_a_thread_is_run_at_once(loop: VirtualLoop) -> None:
    async def ask() -> int:
        return await asyncio.to_thread(lambda: 7)

    assert loop.run_until_complete(loop.create_task(ask(), context=OUTSIDE)) == 7


def test_a_stopped_process_does_nothing_until_it_continues(loop: VirtualLoop) -> None:
    seen: list[tuple[str, float]] = []
    one, other = Process(loop, "one"), Process(loop, "other")
    one.spawn(note(loop, seen, "one", 1, 1, 1))
    other.spawn(note(loop, seen, "other", 1, 1, 1))
    run(loop, 1.5)
    one.stop()
    assert one.condition is Condition.STOPPED
    run(loop, 3.0)
    one.cont()
    run(loop, 5.0)
    # The second wait of the stopped one ended long ago: it goes on at once, and then waits again.
    assert seen == [("one", 1), ("other", 1), ("other", 2), ("other", 3), ("one", 4.5), ("one", 5.5)]


def test_a_dead_process_never_runs_again(loop: VirtualLoop) -> None:
    seen: list[tuple[str, float]] = []
    ended: list[str] = []

    async def live() -> None:
        try:
            await note(loop, seen, "one", 1, 1, 1)
        finally:
            ended.append("cleaned up")

    process = Process(loop, "one")
    process.on_death.append(lambda: ended.append("died"))
    process.spawn(live())
    run(loop, 1.5)
    process.crash()
    run(loop, 10.0)
    assert (seen, ended) == ([("one", 1)], ["died"])
    process.cont()
    run(loop, 10.0)
    assert process.condition is Condition.DEAD
    assert seen == [("one", 1)]


def test_each_process_has_its_own_clocks(loop: VirtualLoop) -> None:
    readings: dict[str, tuple[float, float, float]] = {}

    async def read(name: str) -> None:
        before = lease.clock()
        await asyncio.sleep(10.0)
        readings[name] = (lease.clock() - before, time.time() - EPOCH_S, loop.now_s)

    plain, fast = Process(loop, "plain"), Process(loop, "fast", rate=1.25, offset_s=500.0)
    fast.wall_offset_s = 3600.0
    real = time.time()
    with simulated(), clocks_of(loop):
        plain.spawn(read("plain"))
        fast.spawn(read("fast"))
        run(loop, 20.0)
    assert readings["plain"] == pytest.approx((10.0, 10.0, 10.0))
    # Ten seconds by its own clock are eight for the world.
    assert readings["fast"] == pytest.approx((10.0, 3610.0, 8.0))
    assert abs(time.time() - real) < 5
    assert lease.clock is time.perf_counter


def test_an_error_that_nobody_catches_is_kept(loop: VirtualLoop) -> None:
    loop.call_soon(lambda: 1 // 0, context=OUTSIDE)
    run(loop, 1.0)
    (error,) = loop.errors
    assert isinstance(error["exception"], ZeroDivisionError)
