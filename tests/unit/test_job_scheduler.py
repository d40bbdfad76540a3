"""The weighted scheduler: coroutines and threads, cancellation, loops that are gone, what it reports."""

from __future__ import annotations

import asyncio
import threading

import pytest
from structlog.testing import capture_logs
from tests.integration.conftest import eventually

from parti.jobs import STRICT, WeightedScheduler
from parti.telemetry.metrics import Metrics


async def test_usage_is_counted_while_a_block_runs_and_said_in_one_line() -> None:
    scheduler = WeightedScheduler(14)
    with capture_logs() as logs:
        async with scheduler.acquire(32, label="media.7"):
            assert (scheduler.current_usage, scheduler.max_capacity, scheduler.usage_percent) == (14, 14, 100.0)
    assert (scheduler.current_usage, scheduler.usage_percent, scheduler.waiting) == (0, 0.0, 0)
    (line,) = logs
    assert line["event"] == "acquired 14 slots (cost 32), usage 14/14 100 %"
    assert (line["job"], line["waited_s"], line["waiting"]) == ("media.7", 0.0, 0)


async def test_whoever_waits_is_woken_in_order() -> None:
    scheduler, order = WeightedScheduler(2, look_ahead=STRICT), []

    async def work(name: str, cost: int) -> None:
        async with scheduler.acquire(cost):
            order.append(name)

    async with scheduler.acquire(2):
        tasks = [asyncio.create_task(work(name, cost)) for name, cost in (("a", 1), ("b", 2), ("c", 1))]
        await eventually(lambda: scheduler.waiting == 3)
    await asyncio.gather(*tasks)
    assert order == ["a", "b", "c"]


async def test_one_that_is_cancelled_while_it_waits_or_just_after_its_grant_leaves_nothing_behind() -> None:
    scheduler = WeightedScheduler(1)
    entered = False

    async def work() -> None:
        nonlocal entered
        async with scheduler.acquire(1):
            entered = True

    blocker = scheduler.acquire(1)
    await blocker.__aenter__()
    waiting = asyncio.create_task(work())
    await eventually(lambda: scheduler.waiting == 1)
    await blocker.__aexit__(None, None, None)  # granted now, and not yet told
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not entered
    assert (scheduler.current_usage, scheduler.waiting) == (0, 0)


def test_a_loop_that_is_gone_does_not_keep_its_slots() -> None:
    scheduler = WeightedScheduler(1)
    holder = scheduler.acquire_sync(1)
    holder.__enter__()
    loop = asyncio.new_event_loop()
    waiter = scheduler.acquire(1)
    step = waiter.__aenter__()

    async def begin() -> None:
        task = asyncio.ensure_future(step)
        await eventually(lambda: scheduler.waiting == 1)
        task.cancel = lambda *_: False  # type: ignore[method-assign]  # lost, not cancelled

    loop.run_until_complete(begin())
    loop.close()
    holder.__exit__(None, None, None)
    assert scheduler.current_usage == 0
    step.close()


def test_a_thread_waits_for_its_turn_and_gives_up_in_time() -> None:
    scheduler = WeightedScheduler(2)
    with (
        scheduler.acquire_sync(2),
        pytest.raises(TimeoutError, match=r"no 1 slots within 0\.01 s: 2 of 2 are in use"),
        scheduler.acquire_sync(1, timeout_s=0.01),
    ):
        pass
    assert (scheduler.current_usage, scheduler.waiting) == (0, 0)


def test_a_thread_is_woken_by_a_coroutine_and_the_other_way_round() -> None:
    scheduler, order = WeightedScheduler(1), []

    def in_thread() -> None:
        with scheduler.acquire_sync(1):
            order.append("thread")

    async def on_loop() -> None:
        async with scheduler.acquire(1):
            thread.start()
            await eventually(lambda: scheduler.waiting == 1)
            order.append("loop")
        async with scheduler.acquire(1):
            order.append("loop again")

    thread = threading.Thread(target=in_thread)
    asyncio.run(on_loop())
    thread.join(10)
    assert order == ["loop", "thread", "loop again"]


async def test_wrong_costs_and_second_uses_are_refused_where_they_are_written() -> None:
    scheduler = WeightedScheduler(2)
    with pytest.raises(ValueError, match="at least 1; got 0"):
        scheduler.acquire(0)
    acquisition = scheduler.acquire(1)
    async with acquisition:
        with pytest.raises(RuntimeError, match="was used before"):
            await acquisition.__aenter__()
    assert scheduler.current_usage == 0


async def test_metrics_and_utilisation_are_there() -> None:
    metrics = Metrics("w")
    scheduler = WeightedScheduler(4, metrics=metrics)
    async with scheduler.acquire(3):
        used = next(i for i in metrics.declared if i.name == "parti_jobs_slots_used")
        assert next(iter(used.export("w").samples)).value == 3
        await asyncio.sleep(0.02)
    assert metrics.jobs_slot_wait.count == 1
    assert 0.06 <= scheduler.slot_seconds < 3
