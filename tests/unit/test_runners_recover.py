"""Runners that die and outcomes that cannot be settled: the lane goes on, and so do the others."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.unit.lanes_bench import BOUND_S, Bench, Signal, nothing

from parti.core.retry import RetryPolicy
from parti.model.message import Message


def break_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have the first acknowledgement raise, as a write to a closed transport did under uvloop."""
    broken: list[int] = []
    settle = bench.lanes.settle

    def raises_once(*arguments: object, **options: object) -> None:
        settle(*arguments, **options)  # type: ignore[arg-type]
        if not broken:
            broken.append(1)
            raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    monkeypatch.setattr(bench.lanes, "settle", raises_once)
    return broken


async def test_a_settle_that_raises_stops_neither_its_partition_nor_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = break_once(bench, monkeypatch)
    bench.own("a", "b")
    bench.run_async(nothing)
    with capture_logs() as logs:
        bench.send("a", 1, 2)
        bench.send("b", 3)
        await bench.acked(1, 2, 3)
    assert broken
    assert [entry["event"] for entry in logs] == ["an outcome could not be settled; the partition goes on"]
    assert bench.started("a") == [1, 2]


async def test_an_acknowledgement_that_raises_does_not_end_the_thread_of_a_handler(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = break_once(bench, monkeypatch)
    bench.own("a", "b")
    bench.run_threads(lambda message: None, threads=1)
    bench.send("a", 1, 2, 3)
    bench.send("b", 4)
    await bench.acked(1, 2, 3, 4)
    assert broken
    assert bench.started("a") == [1, 2, 3]


async def test_an_outcome_that_is_never_settled_holds_up_its_own_partition_only(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What broke before anything was finished is handled again, not lost."""
    failed = bench.lanes.failed

    def raises(*arguments: object) -> None:
        if bench.started("a") == [1]:
            raise ValueError("no words for it")
        failed(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(bench.lanes, "failed", raises)

    async def handler(message: Message) -> None:
        if message.seq == 1 and bench.started("a") == [1]:
            raise KeyError("first time")

    bench.own("a", "b")
    bench.run_async(handler)
    bench.send("a", 1, 2)
    bench.send("b", 3)
    await bench.acked(1, 2, 3)
    assert bench.started("a") == [1, 1, 2]


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_a_failure_that_cannot_be_settled_counts_as_an_attempt(kind: str) -> None:
    """Here because no timer takes the wait. So it comes to an end, and others of the partition are handled."""
    waits: Any = ("soon",)
    bench = Bench(policy=RetryPolicy(attempts=2, backoff_s=waits))

    bench.own("a")
    bench.run_failing(kind, 1, ValueError("bad"))
    bench.send("a", 1, 2)
    await bench.acked(1, 2)
    assert [(seq, attempt) for _, seq, attempt in bench.starts] == [(1, 1), (1, 2), (2, 1)]
    assert bench.letters.sent == [(1, "ValueError: bad", 2)]
    await bench.close()


async def test_a_handler_that_cancels_its_own_task_stops_nothing(bench: Bench) -> None:
    async def handler(message: Message) -> None:
        if message.seq == 1:
            task = asyncio.current_task()
            assert task
            task.cancel()  # takes effect at the next wait, which is the runner's own

    bench.own("a", "b")
    bench.run_async(handler)
    bench.send("a", 1, 2)
    await bench.acked(1, 2)
    bench.send("b", 3)
    await bench.acked(3)


@pytest.mark.parametrize("waits", [True, False], ids=["in a handler", "between two handlers"])
async def test_a_runner_that_is_killed_is_replaced(bench: Bench, waits: bool) -> None:
    entered = asyncio.Event()

    async def handler(message: Message) -> None:
        if waits and message.seq == 1 and message.attempt == 1:
            entered.set()
            await asyncio.Event().wait()

    bench.own("a", "b")
    bench.run_async(handler)
    bench.send("a", 1, 2)
    await (entered.wait() if waits else bench.acked(1, 2))
    runners = [task for task in asyncio.all_tasks() if task.get_name() == "parti-runner"]
    assert runners
    for task in runners:
        task.cancel()
    await asyncio.wait(runners, timeout=0.05)
    bench.send("b", 3)
    await bench.acked(1, 2, 3)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
async def test_a_handler_that_exits_is_a_handler_that_failed(bench: Bench, error: type[BaseException]) -> None:
    async def handler(message: Message) -> None:
        if message.attempt < 3 and message.seq == 1:
            raise error

    bench.own("a")
    bench.run_async(handler)
    bench.send("a", 1, 2)
    await bench.acked(1, 2)
    assert bench.started("a") == [1, 1, 1, 2]


class ThreadLimit:
    """Lets so many threads of handlers start, as in a container; `refused` counts the others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, allowed: int, signal: Signal) -> None:
        self.allowed = allowed
        self.refused = 0
        start = threading.Thread.start

        def start_or_refuse(thread: threading.Thread) -> None:
            if thread.name.startswith("parti-handler"):
                if not self.allowed:
                    self.refused += 1
                    signal.fire()
                    raise RuntimeError("can't start new thread")
                self.allowed -= 1
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_or_refuse)


async def test_a_worker_that_is_short_of_threads_may_start_only_what_it_has_threads_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for a thread that the system does not give is no stall, while those that there are have work."""
    doors = {seq: threading.Event() for seq in (1, 2, 3)}
    threads = ThreadLimit(monkeypatch, 1, bench.signal)
    bench.own("a", "b", "c")
    runners = bench.run_threads(lambda message: doors[message.seq].wait(10 * BOUND_S), threads=16)

    def may_start() -> bool:
        return runners.may_start

    bench.send("a", 1)
    await bench.until(lambda: bench.started() == [1])
    bench.send("b", 2)
    await bench.until(lambda: threads.refused >= 1)
    assert not may_start()
    await bench.until(lambda: threads.refused >= 2)
    assert not may_start(), "as short of threads as before"
    threads.allowed = 2
    await bench.until(lambda: bench.started() == [1, 2])
    assert may_start(), "there are threads again"
    bench.send("c", 3)
    await bench.until(lambda: bench.started() == [1, 2, 3])
    for door in doors.values():
        door.set()
    await bench.acked(1, 2, 3)


async def test_a_worker_that_gets_no_thread_at_all_is_to_start_something(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = ThreadLimit(monkeypatch, 0, bench.signal)
    bench.own("a")
    runners = bench.run_threads(lambda message: None)
    bench.send("a", 1)
    await bench.until(lambda: threads.refused >= 1)
    assert runners.may_start
    threads.allowed = 1
    await bench.acked(1)


async def test_a_thread_that_cannot_start_is_started_later(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that has as many threads as it may have."""
    start, refusals = threading.Thread.start, [1, 2]

    def start_or_refuse(thread: threading.Thread) -> None:
        if refusals and thread.name.startswith("parti-handler"):
            refusals.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_refuse)
    bench.own("a")
    bench.run_threads(lambda message: None, threads=2)
    bench.send("a", 1, 2)
    await bench.acked(1, 2)
    assert not refusals
