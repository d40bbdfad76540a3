"""Coroutine handlers: tasks, timeouts, drain and stop; and how a handler gets its kind of runner."""

from __future__ import annotations

import asyncio

from tests.unit.lanes_bench import BOUND_S, Bench, behind_gates, gates, nothing

from parti.model.message import Message
from parti.worker.runners import AsyncRunners, ThreadRunners, make_runners

# ── coroutine handlers ──────────────────────────────────────────────────────────────────────────────────────────────


async def test_handlers_that_do_not_wait_share_one_task(bench: Bench) -> None:
    tasks = set()

    async def handler(message: Message) -> None:
        tasks.add(asyncio.current_task())

    bench.own(*(f"p{i}" for i in range(50)))
    bench.run_async(handler)
    for seq in range(1, 501):
        bench.send(f"p{seq % 50}", seq)
    await bench.acked(*range(1, 501))
    assert len(tasks) == 1


async def test_handlers_that_wait_run_in_parallel_but_one_for_each_partition(bench: Bench) -> None:
    doors = gates(1, 2, 3)
    bench.own("a", "b", "c")
    bench.run_async(behind_gates(doors))
    for seq, partition_id in enumerate("abc", start=1):
        bench.send(partition_id, seq, seq + 10)
    await bench.until(lambda: set(bench.started()) == {1, 2, 3})
    assert bench.lanes.running == 3
    for door in doors.values():
        door.set()
    await bench.acked(1, 2, 3, 11, 12, 13)
    assert all(bench.most_at_once[p] == 1 for p in "abc")
    assert bench.lanes.running == 0


async def test_a_partition_goes_on_while_another_one_waits_for_long(bench: Bench) -> None:
    """Nothing arrives after the first moment, so nothing but the runners themselves can start what waits."""
    doors = gates(1, 2)
    bench.own("quick", "stuck")
    bench.run_async(behind_gates(doors))
    bench.send("quick", 1, 3, 5)
    bench.send("stuck", 2)
    await bench.until(lambda: set(bench.started()) == {1, 2})
    doors[1].set()
    await bench.acked(1, 3, 5)
    doors[2].set()
    await bench.acked(2)


async def test_one_waiting_handler_does_not_delay_many_other_partitions(bench: Bench) -> None:
    doors = gates(1)
    bench.own("stuck", *(f"p{i}" for i in range(20)))

    async def handler(message: Message) -> None:
        await behind_gates(doors)(message)
        await asyncio.sleep(0)

    bench.run_async(handler)
    bench.send("stuck", 1)
    for seq in range(2, 202):
        bench.send(f"p{seq % 20}", seq)
    await bench.acked(*range(2, 202))
    assert bench.ends.count(1) == 0


async def test_a_handler_that_exceeds_its_timeout_is_cancelled_and_retried(bench: Bench) -> None:
    bench.own("a")

    async def handler(message: Message) -> None:
        if message.seq == 1 and message.attempt == 1:
            await asyncio.Event().wait()

    bench.run_async(handler, timeout_s=0.02)
    bench.send("a", 1, 2)
    await bench.acked(1, 2)
    assert [(seq, attempt) for _, seq, attempt in bench.starts] == [(1, 1), (1, 2), (2, 1)]
    assert bench.metrics.handler_failures.child("timeout").value == 1


async def test_a_message_that_always_times_out_is_dead_lettered_as_such(bench: Bench) -> None:
    bench.own("a")

    async def handler(message: Message) -> None:
        if message.seq == 1:
            await asyncio.Event().wait()

    bench.run_async(handler, timeout_s=0.01)
    bench.send("a", 1, 2)
    await bench.acked(1, 2)
    assert [(seq, reason.split(":")[0]) for seq, reason, _ in bench.letters.sent] == [(1, "HandlerTimeout")]


async def test_a_handler_that_returns_in_spite_of_its_timeout_has_done_its_work(bench: Bench) -> None:
    bench.own("a")

    async def handler(message: Message) -> None:
        if message.seq == 1:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return

    bench.run_async(handler, timeout_s=0.01)
    bench.send("a", 1, 2)
    await bench.acked(1, 2)
    assert bench.started() == [1, 2]
    assert bench.letters.sent == []


async def test_a_timeout_does_not_cancel_what_the_same_task_handles_next(bench: Bench) -> None:
    bench.own("a", "b")

    async def handler(message: Message) -> None:
        if message.seq == 1 and message.attempt == 1:
            await asyncio.Event().wait()
        for _ in range(5):
            await asyncio.sleep(0)

    bench.run_async(handler, timeout_s=0.01)
    bench.send("a", 1)
    bench.send("b", 2, 3, 4)
    await bench.acked(1, 2, 3, 4)
    assert bench.letters.sent == []


async def test_a_handler_that_meets_a_cancelled_task_has_failed_like_any_other(bench: Bench) -> None:
    """`await other` raises CancelledError when somebody cancelled `other`: that is no reason to stop the lane."""
    bench.own("a")

    async def handler(message: Message) -> None:
        if message.seq == 1:
            other = asyncio.ensure_future(asyncio.Event().wait())
            other.cancel()
            await other

    bench.run_async(handler)
    bench.send("a", 1, 2)
    await bench.acked(1, 2)
    assert bench.started() == [1, 1, 1, 2]
    assert [seq for seq, _, _ in bench.letters.sent] == [1]
    assert bench.lanes.running == 0


async def test_drain_starts_nothing_more_and_waits_for_what_runs(bench: Bench) -> None:
    doors = gates(1)
    bench.own("a", "b")
    runners = bench.run_async(behind_gates(doors))
    bench.send("a", 1, 2)
    await bench.until(lambda: bench.started() == [1])
    draining = asyncio.ensure_future(runners.drain(BOUND_S))
    await asyncio.sleep(0)
    bench.send("b", 3)
    assert not draining.done()
    doors[1].set()
    assert await draining
    assert bench.started() == [1]
    assert bench.acks.acked == [1]
    assert bench.positions()["a"] == 2


async def test_drain_gives_up_after_its_time_and_stop_cancels(bench: Bench) -> None:
    bench.own("a")
    runners = bench.run_async(behind_gates(gates(1)))
    bench.send("a", 1, 2)
    await bench.until(lambda: bench.started() == [1])
    assert await runners.drain(0.01) is False
    await runners.stop()
    assert bench.ends == [1]
    assert bench.acks.acked == []
    assert bench.lanes.floors.floor == 1
    assert bench.letters.sent == []


async def test_drain_of_idle_runners_is_immediate(bench: Bench) -> None:
    bench.own("a")
    runners = bench.run_async(nothing)
    assert await runners.drain(BOUND_S)
    bench.send("a", 1)
    await asyncio.sleep(0)
    assert bench.started() == []


async def test_stop_returns_although_a_handler_swallows_its_cancellation(bench: Bench) -> None:
    bench.own("a")

    async def handler(message: Message) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return

    runners = bench.run_async(handler)
    bench.send("a", 1, 2)
    await bench.until(lambda: bench.started() == [1])
    async with asyncio.timeout(BOUND_S / 5):
        await runners.stop()
    assert bench.started() == [1]


async def test_stop_returns_although_a_handler_is_in_the_middle_of_its_timeout(bench: Bench) -> None:
    bench.own("a")
    cleaning = asyncio.Event()

    async def handler(message: Message) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaning.set()
            await asyncio.Event().wait()

    runners = bench.run_async(handler, timeout_s=0.01)
    bench.send("a", 1)
    async with asyncio.timeout(BOUND_S):
        await cleaning.wait()
    async with asyncio.timeout(BOUND_S / 5):
        await runners.stop()
    assert bench.acks.acked == []


# ── which runner ────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_kind_of_handler_chooses_the_runner(bench: Bench) -> None:
    class Callable_:  # noqa: N801
        async def __call__(self, message: Message) -> None:
            """Handle."""

    def plain(message: Message) -> None:
        """Handle."""

    for handler, kind in ((nothing, AsyncRunners), (Callable_(), AsyncRunners), (plain, ThreadRunners)):
        runners = make_runners(bench.lanes, handler, timeout_s=None, threads=1)
        assert isinstance(runners, kind)
        await runners.stop()
