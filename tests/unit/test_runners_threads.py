"""Plain functions as handlers: threads that keep the order of each partition."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tests.unit.lanes_bench import BOUND_S, Bench

from parti.model.message import Message


async def test_threads_keep_the_order_of_each_partition(bench: Bench) -> None:
    ids = [f"p{i}" for i in range(10)]
    bench.own(*ids)
    bench.run_threads(lambda message: None)
    for seq in range(1, 1001):
        bench.send(ids[seq % 10], seq)
    await bench.acked(*range(1, 1001))
    for partition_id in ids:
        handled = bench.started(partition_id)
        assert handled == sorted(handled)
        assert len(handled) == 100
        assert bench.most_at_once[partition_id] == 1
    assert (bench.lanes.held, bench.lanes.floors.floor) == (0, 1001)


async def test_threads_work_on_partitions_in_parallel_up_to_the_limit(bench: Bench) -> None:
    meeting = threading.Barrier(3)
    others = set(threading.enumerate())  # those of earlier tests may still be on their way out
    bench.own(*"abcdef")

    def handler(message: Message) -> None:
        meeting.wait(BOUND_S)

    bench.run_threads(handler, threads=3)
    for seq, partition_id in enumerate("abcdef", start=1):
        bench.send(partition_id, seq)
    await bench.acked(*range(1, 7))
    assert bench.most_at_once["total"] == 3
    assert len({t for t in threading.enumerate() if t.name.startswith("parti-handler")} - others) <= 3


async def test_a_stuck_thread_does_not_stop_the_other_partitions(bench: Bench) -> None:
    door = threading.Event()
    bench.own("stuck", "a")
    bench.run_threads(lambda message: message.partition.id == "stuck" and door.wait(BOUND_S), threads=2)
    bench.send("stuck", 1, 2)
    for seq in range(3, 50):
        bench.send("a", seq)
    await bench.acked(*range(3, 50))
    assert bench.lanes.floors.floor == 1
    assert bench.lanes.running >= 1, "parti_handler_running counts plain handlers too"
    door.set()
    await bench.acked(1, 2)


async def test_a_failing_function_is_retried_in_its_lane_and_then_dead_lettered(bench: Bench) -> None:
    def handler(message: Message) -> None:
        if message.seq == 2:
            raise ValueError("always")

    bench.own("a")
    bench.run_threads(handler)
    bench.send("a", 1, 2, 3)
    await bench.acked(1, 2, 3)
    assert [(seq, attempt) for _, seq, attempt in bench.starts] == [(1, 1), (2, 1), (2, 2), (2, 3), (3, 1)]
    assert [seq for seq, _, _ in bench.letters.sent] == [2]
    assert bench.acks.acked == [1, 2, 3]


@pytest.mark.parametrize("error", [asyncio.CancelledError, SystemExit, KeyboardInterrupt])
async def test_a_function_that_raises_no_exception_proper_has_failed_like_any_other(
    bench: Bench, error: type[BaseException]
) -> None:
    def handler(message: Message) -> None:
        if message.seq == 1:
            raise error

    bench.own("a")
    bench.run_threads(handler, threads=1)
    bench.send("a", 1, 2)
    await bench.acked(1, 2)
    assert [seq for seq, _, _ in bench.letters.sent] == [1]


async def test_a_function_that_returns_an_awaitable_has_failed_and_the_reason_says_what_to_do(bench: Bench) -> None:
    async def forgotten() -> None:
        """Never runs."""

    bench.own("a")
    bench.run_threads(lambda message: forgotten() if message.seq == 1 else None)
    bench.send("a", 1, 2)
    await bench.acked(1, 2)
    assert "async def" in bench.letters.sent[0][1]


async def test_a_late_message_put_before_what_a_thread_holds_is_handled_and_nothing_twice(bench: Bench) -> None:
    door = threading.Event()
    bench.own("a")
    bench.run_threads(lambda message: message.seq == 3 and door.wait(BOUND_S), threads=1)
    bench.send("a", 1, 3, 4)
    await bench.until(lambda: bench.started() == [1, 3])
    bench.send("a", 2)
    door.set()
    await bench.acked(1, 2, 3, 4)
    assert sorted(bench.started()) == [1, 2, 3, 4]
    assert bench.lanes.held == 0


async def test_a_release_while_a_thread_works_through_its_lane(bench: Bench) -> None:
    door = threading.Event()
    bench.own("a", "b")
    bench.run_threads(lambda message: message.seq == 2 and door.wait(BOUND_S), threads=2)
    bench.send("a", 1, 2, 3, 4)
    await bench.until(lambda: bench.started() == [1, 2])
    bench.own("b")
    door.set()
    await bench.acked(2)
    bench.send("b", 5)
    await bench.acked(5)
    assert bench.started("a") == [1, 2]
    assert bench.lanes.roster.behind()["a"] == 3
    assert (bench.lanes.held, bench.lanes.floors.floor) == (0, 6)


async def test_draining_threads_finish_the_message_at_hand_only(bench: Bench) -> None:
    door = threading.Event()
    bench.own("a")
    runners = bench.run_threads(lambda message: door.wait(BOUND_S))
    bench.send("a", 1, 2, 3)
    await bench.until(lambda: bench.started() == [1])
    assert await runners.drain(0.01) is False
    draining = asyncio.ensure_future(runners.drain(BOUND_S))
    await asyncio.sleep(0)
    door.set()
    assert await draining
    assert bench.started() == [1]
    assert bench.acks.acked == [1]
    assert bench.positions() == {"a": 2}


async def test_a_function_that_exceeds_its_timeout_is_reported_once_and_its_lane_waits(bench: Bench) -> None:
    door = threading.Event()
    bench.own("a")
    bench.run_threads(lambda message: door.wait(BOUND_S), timeout_s=0.01)
    bench.send("a", 1, 2)
    await bench.overdue_checks(4)
    assert bench.started() == [1]
    assert bench.metrics.handler_failures.child("timeout").value == 1
    door.set()
    await bench.acked(1, 2)


async def test_stopped_threads_end(bench: Bench) -> None:
    bench.own("a")
    runners = bench.run_threads(lambda message: None)
    bench.send("a", 1)
    await bench.acked(1)
    await runners.stop()
    for thread in runners._threads:
        await asyncio.to_thread(thread.join, BOUND_S)
        assert not thread.is_alive()
