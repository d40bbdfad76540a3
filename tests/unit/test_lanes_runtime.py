"""Lanes and runners on a real event loop, without a server."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from parti.core.lane import Lane
from parti.core.retry import Reject, Retry, RetryPolicy
from parti.model.message import Message
from parti.model.partition import Template
from parti.telemetry.metrics import Metrics
from parti.worker import lanes as lanes_module
from parti.worker.lanes import Lanes
from parti.worker.runners import AsyncRunners, Runners, ThreadRunners, make_runners
from parti.worker.unordered import UnorderedLanes

TEMPLATE = Template("dc.{p}")
QUICK = RetryPolicy(attempts=3, backoff_s=(0.002,))
BOUND_S = 3.0


def reply(seq: int, deliveries: int = 1) -> bytes:
    return b"$JS.ACK.DC.c.%d.%d.%d.1700000000000000000.0" % (deliveries, seq, seq)


def seq_of(reply: bytes) -> int:
    return int(reply.split(b".")[5])


class Signal:
    """Wakes whoever waits for something to become true."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    def fire(self) -> None:
        self._loop.call_soon_threadsafe(self._changed.set)

    async def until(self, true: Callable[[], object]) -> None:
        async with asyncio.timeout(BOUND_S):
            while not true():
                self._changed.clear()
                await self._changed.wait()


class Acks:
    """Writes down what an AckWriter would send."""

    def __init__(self, signal: Signal) -> None:
        self._signal = signal
        self.acked: list[int] = []
        self.alive: list[int] = []
        self.given_back: list[tuple[int, float]] = []

    def ack(self, reply: bytes) -> None:
        self.acked.append(seq_of(reply))
        self._signal.fire()

    def in_progress(self, reply: bytes) -> None:
        self.alive.append(seq_of(reply))

    def give_back(self, reply: bytes, delay_s: float) -> None:
        self.given_back.append((seq_of(reply), delay_s))
        self._signal.fire()


class Letters:
    """A dead-letter stream that may be closed for a while."""

    def __init__(self, signal: Signal) -> None:
        self._signal = signal
        self.open = asyncio.Event()
        self.open.set()
        self.sent: list[tuple[int, str, int]] = []
        self.asked = 0

    async def send(self, message: Message, reason: str) -> None:
        self.asked += 1
        self._signal.fire()
        await self.open.wait()
        self.sent.append((message.seq, reason, message.attempt))
        self._signal.fire()


class Bench:
    """Lanes with everything around them replaced by recorders."""

    def __init__(self, kind: type[Lanes] = Lanes, *, policy: RetryPolicy = QUICK, each_subject: bool = False) -> None:
        self.signal = Signal()
        self.acks = Acks(self.signal)
        self.letters = Letters(self.signal)
        self.metrics = Metrics("w0")
        acks: Any = self.acks
        self.lanes = kind(
            template=TEMPLATE,
            stream="DC",
            worker_id="w0",
            policy=policy,
            acks=acks,
            dead_letters=self.letters,
            metrics=self.metrics,
            each_subject=each_subject,
        )
        self.runners: Runners | None = None
        self.starts: list[tuple[str, int, int]] = []
        self.ends: list[int] = []
        self.at_once: Counter[str] = Counter()
        self.most_at_once: Counter[str] = Counter()

    def own(self, *ids: str, at: dict[str, int] | None = None) -> None:
        positions = at or {}
        subjects = {p.subject: p for p in TEMPLATE.partitions(ids)}

        def position_of(partition_id: str, subject: str) -> int:
            return max(positions.get(partition_id, 0), self.lanes.known_position(partition_id))

        self.lanes.own(subjects, position_of)

    def send(self, partition_id: str, *seqs: int, deliveries: int = 1) -> None:
        for seq in seqs:
            self.lanes.deliver(f"dc.{partition_id}".encode(), reply(seq, deliveries), None, b"x", seq)
        if self.runners:
            self.runners.kick()

    def began(self, message: Message) -> None:
        partition_id = message.partition.id
        self.starts.append((partition_id, message.seq, message.attempt))
        for key in (partition_id, "total"):
            self.at_once[key] += 1
            self.most_at_once[key] = max(self.most_at_once[key], self.at_once[key])
        self.signal.fire()

    def ended(self, message: Message) -> None:
        self.ends.append(message.seq)
        for key in (message.partition.id, "total"):
            self.at_once[key] -= 1
        self.signal.fire()

    def started(self, partition_id: str | None = None) -> list[int]:
        return [seq for pid, seq, _ in self.starts if partition_id in (None, pid)]

    def lane(self, partition_id: str) -> Lane:
        found = self.lanes._lanes[partition_id]
        assert isinstance(found, Lane)
        return found

    def positions(self) -> dict[str, int]:
        return dict(self.lanes.positions())

    async def until(self, true: Callable[[], object]) -> None:
        await self.signal.until(true)

    async def acked(self, *seqs: int) -> None:
        await self.until(lambda: set(seqs) <= set(self.acks.acked))

    def run_async(self, handler: Callable[[Message], Any], timeout_s: float | None = None) -> AsyncRunners:
        async def observed(message: Message) -> None:
            self.began(message)
            try:
                await handler(message)
            finally:
                self.ended(message)

        self.runners = runners = AsyncRunners(self.lanes, observed, timeout_s)
        return runners

    def run_threads(
        self, handler: Callable[[Message], Any], threads: int = 4, timeout_s: float | None = None
    ) -> ThreadRunners:
        lock = threading.Lock()

        def observed(message: Message) -> Any:
            with lock:
                self.began(message)
            try:
                return handler(message)
            finally:
                with lock:
                    self.ended(message)

        self.runners = runners = ThreadRunners(self.lanes, observed, timeout_s, threads)
        return runners

    async def overdue_checks(self, count: int) -> None:
        """Wait until somebody has looked this often for handlers that run too long."""
        looked, look = 0, self.lanes.running_lanes

        def counted() -> list[Lane]:
            nonlocal looked
            looked += 1
            self.signal.fire()
            return look()

        self.lanes.running_lanes = counted  # type: ignore[method-assign]
        await self.until(lambda: looked > count)

    async def close(self) -> None:
        if self.runners:
            async with asyncio.timeout(BOUND_S):
                await self.runners.stop()
        self.lanes.cancel_dead_letters()
        await self.lanes.settle_dead_letters()
        for thread in getattr(self.runners, "_threads", []):
            await asyncio.to_thread(thread.join, BOUND_S)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    it = Bench()
    yield it
    await it.close()


@pytest.fixture
async def unordered() -> AsyncIterator[Bench]:
    it = Bench(UnorderedLanes)
    yield it
    await it.close()


async def nothing(message: Message) -> None:
    """Handle a message without waiting."""


def gates(*seqs: int) -> dict[int, asyncio.Event]:
    return {seq: asyncio.Event() for seq in seqs}


def behind_gates(doors: dict[int, asyncio.Event]) -> Callable[[Message], Any]:
    async def handler(message: Message) -> None:
        if message.seq in doors:
            await doors[message.seq].wait()

    return handler


# ── deliveries, positions and floor ───────────────────────────────────────────────────────────────────────────────


async def test_messages_of_a_partition_are_handled_in_order_and_acknowledged(bench: Bench) -> None:
    bench.own("a", "b")
    bench.run_async(nothing)
    bench.send("a", 1, 3)
    bench.send("b", 2, 4)
    await bench.acked(1, 2, 3, 4)
    assert bench.started("a") == [1, 3]
    assert bench.started("b") == [2, 4]
    assert bench.positions() == {"a": 4, "b": 5}
    assert (bench.lanes.held, bench.lanes.finished, bench.lanes.floor) == (0, 4, 5)


async def test_the_floor_is_the_lowest_message_that_is_not_finished(bench: Bench) -> None:
    doors = gates(2)
    bench.own("a", "b")
    bench.run_async(behind_gates(doors))
    bench.send("a", 1)
    bench.send("b", 2)
    bench.send("a", 3, 4)
    await bench.acked(1, 3, 4)
    assert bench.lanes.floor == 2
    assert bench.positions()["a"] == 5
    assert bench.positions()["b"] <= 2
    doors[2].set()
    await bench.acked(2)
    assert bench.lanes.floor == 5


async def test_a_delivery_below_the_position_is_acknowledged_and_skipped(bench: Bench) -> None:
    bench.own("a", at={"a": 10})
    bench.run_async(nothing)
    bench.send("a", 8, 9, 10)
    await bench.acked(8, 9, 10)
    assert bench.started() == [10]
    assert (bench.metrics.skipped.value, bench.metrics.redeliveries.value) == (2, 2)
    assert bench.lanes.held == 0


async def test_a_duplicate_while_its_message_runs_is_neither_handled_nor_acknowledged_twice(bench: Bench) -> None:
    doors = gates(1)
    bench.own("a")
    bench.run_async(behind_gates(doors))
    bench.send("a", 1, 2)
    await bench.until(lambda: bench.started() == [1])
    bench.send("a", 1, 2)
    assert bench.lanes.held == 2
    doors[1].set()
    await bench.acked(1, 2)
    bench.send("a", 1)
    assert bench.started() == [1, 2]
    assert bench.acks.acked == [1, 2, 1]
    assert bench.lanes.held == 0


async def test_a_message_of_a_partition_that_is_not_ours_is_left_alone(bench: Bench) -> None:
    bench.own("a")
    bench.run_async(nothing)
    bench.send("b", 1)
    bench.send("a", 2)
    await bench.acked(2)
    assert bench.acks.acked == [2]
    assert bench.started() == [2]


async def test_with_wildcard_partitions_one_order_spans_their_subjects(bench: Bench) -> None:
    bench.own("*")
    doors = gates(1)
    bench.run_async(behind_gates(doors))
    bench.send("x", 1)
    bench.send("y", 2)
    await bench.until(lambda: bench.started() == [1])
    doors[1].set()
    await bench.acked(1, 2)
    assert [(pid, seq) for pid, seq, _ in bench.starts] == [("*", 1), ("*", 2)]
    assert bench.most_at_once["*"] == 1


async def test_keep_alive_speaks_of_what_has_waited_or_run_long_enough(bench: Bench) -> None:
    bench.own("a", "b")
    bench.run_async(behind_gates(gates(1)))
    bench.send("a", 1, 2)
    await bench.until(lambda: bench.started() == [1])
    bench.lanes.keep_alive(60.0)
    assert bench.acks.alive == []
    bench.lanes.keep_alive(-1.0)
    assert sorted(bench.acks.alive) == [1, 2]


# ── retries and dead letters ──────────────────────────────────────────────────────────────────────────────────────


async def test_a_failing_message_is_retried_in_its_lane_and_the_next_one_waits(bench: Bench) -> None:
    bench.own("a", "b")

    async def handler(message: Message) -> None:
        if message.seq == 1 and message.attempt < 3:
            raise ValueError("not yet")

    bench.run_async(handler)
    bench.send("a", 1, 2)
    bench.send("b", 3)
    await bench.acked(1, 2, 3)
    in_a = [(seq, attempt) for pid, seq, attempt in bench.starts if pid == "a"]
    assert in_a == [(1, 1), (1, 2), (1, 3), (2, 1)]
    assert bench.acks.acked.index(3) < bench.acks.acked.index(1)
    assert bench.letters.sent == []


async def test_the_backoff_is_kept_and_the_lane_holds_its_message_meanwhile() -> None:
    bench = Bench(policy=RetryPolicy(attempts=3, backoff_s=(30.0,)))
    bench.own("a")

    async def handler(message: Message) -> None:
        raise ValueError("bad")

    bench.run_async(handler)
    bench.send("a", 1, 2)
    await bench.until(lambda: bench.ends == [1])
    bench.send("a", 1)
    await asyncio.sleep(0)
    assert bench.started() == [1]
    assert (bench.lanes.held, bench.lanes.floor) == (2, 1)
    bench.lanes.keep_alive(-1.0)
    assert sorted(bench.acks.alive) == [1, 2]
    await bench.close()


async def test_after_the_last_attempt_the_message_is_dead_lettered_and_the_lane_goes_on(bench: Bench) -> None:
    bench.own("a")

    async def handler(message: Message) -> None:
        if message.seq == 1:
            raise ValueError("always")

    bench.run_async(handler)
    bench.letters.open.clear()
    bench.send("a", 1, 2)
    await bench.until(lambda: bench.letters.asked)
    assert bench.acks.acked == []
    assert bench.lanes.floor == 1
    assert bench.started() == [1, 1, 1]
    bench.letters.open.set()
    await bench.acked(1, 2)
    assert bench.acks.acked == [1, 2]
    assert bench.letters.sent == [(1, "ValueError: always", 3)]
    assert bench.metrics.dead_letters.value == 1
    assert bench.positions() == {"a": 3}


async def test_reject_dead_letters_at_once(bench: Bench) -> None:
    bench.own("a")

    async def handler(message: Message) -> None:
        if message.seq == 1:
            raise Reject("not for us")

    bench.run_async(handler)
    bench.send("a", 1, 2)
    await bench.acked(1, 2)
    assert bench.letters.sent == [(1, "not for us", 1)]
    assert bench.started() == [1, 2]


async def test_retry_sets_its_own_delay(bench: Bench) -> None:
    slow = Bench(policy=RetryPolicy(attempts=2, backoff_s=(60.0,)))
    slow.own("a")

    async def handler(message: Message) -> None:
        if message.attempt == 1:
            raise Retry(0.001)

    slow.run_async(handler)
    slow.send("a", 1)
    await slow.acked(1)
    assert [attempt for _, _, attempt in slow.starts] == [1, 2]
    await slow.close()


async def test_an_exception_that_cannot_describe_itself_does_not_stop_the_worker(bench: Bench) -> None:
    class Speechless(Exception):  # noqa: N818
        def __str__(self) -> str:
            raise RuntimeError("no words")

    async def handler(message: Message) -> None:
        if message.seq == 1:
            raise Speechless

    bench.own("a", "b")
    bench.run_async(handler)
    bench.send("a", 1)
    bench.send("b", 2)
    await bench.acked(1, 2)
    assert bench.letters.sent == [(1, "Speechless", 3)]


# ── release ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_released_partition_finishes_what_runs_and_drops_what_waits(bench: Bench) -> None:
    doors = gates(1)
    bench.own("a", "b")
    bench.run_async(behind_gates(doors))
    bench.send("a", 1, 2, 3)
    await bench.until(lambda: bench.started() == [1])
    bench.own("b")
    assert bench.lanes.behind()["a"] <= 1
    doors[1].set()
    await bench.acked(1)
    bench.send("b", 4)
    await bench.acked(4)
    assert bench.started() == [1, 4]
    assert bench.lanes.behind()["a"] == 2
    assert (bench.lanes.held, bench.lanes.floor) == (0, 5)


async def test_a_handler_that_fails_after_the_release_leaves_its_message_to_the_next_owner(bench: Bench) -> None:
    door = asyncio.Event()

    async def handler(message: Message) -> None:
        await door.wait()
        raise ValueError("bad")

    bench.own("a")
    bench.run_async(handler)
    bench.send("a", 1, 2)
    await bench.until(lambda: bench.started() == [1])
    bench.own()
    door.set()
    await bench.until(lambda: bench.ends == [1])
    await bench.until(lambda: bench.lanes.held == 0)
    assert bench.acks.acked == []
    assert bench.lanes.behind()["a"] <= 1


async def test_a_released_partition_in_backoff_is_not_started_again(bench: Bench) -> None:
    bench.own("a", "b")

    async def handler(message: Message) -> None:
        if message.partition.id == "a":
            raise ValueError("bad")

    bench.run_async(handler)
    bench.send("a", 1)
    await bench.until(lambda: bench.ends == [1])
    bench.own("b")
    # A retry of "a" would have come before the last of these.
    for seq in range(2, 30):
        bench.send("b", seq)
        await bench.acked(seq)
        await asyncio.sleep(0.0005)
    assert bench.started("a") == [1]
    assert bench.lanes.held == 0


async def test_a_dead_letter_on_its_way_counts_after_the_release(bench: Bench) -> None:
    bench.own("a")
    bench.letters.open.clear()

    async def handler(message: Message) -> None:
        raise Reject("no")

    bench.run_async(handler)
    bench.send("a", 1, 2)
    await bench.until(lambda: bench.letters.asked)
    bench.own()
    bench.letters.open.set()
    await bench.acked(1)
    assert bench.lanes.behind()["a"] == 2
    assert bench.lanes.held == 0


async def test_a_partition_that_comes_back_starts_at_its_position(bench: Bench) -> None:
    bench.own("a", "b")
    bench.run_async(nothing)
    bench.send("a", 1, 2)
    await bench.acked(1, 2)
    bench.own("b")
    bench.own("a", "b")
    bench.send("a", 1, 2, 3)
    await bench.acked(3)
    assert bench.started("a") == [1, 2, 3]
    assert bench.positions()["a"] == 4


async def test_a_partition_that_comes_back_while_its_handler_still_runs_does_not_run_twice_at_once(
    bench: Bench,
) -> None:
    doors = gates(1)
    bench.own("a", "b")
    bench.run_async(behind_gates(doors))
    bench.send("a", 1, 2)
    await bench.until(lambda: bench.started() == [1])
    bench.own("b")
    bench.own("a", "b")
    bench.send("a", 1, 2)
    bench.send("b", 3)
    await bench.acked(3)
    assert bench.most_at_once["a"] == 1, "two handlers of one partition at the same time"
    assert bench.started("a") == [1]
    doors[1].set()
    await bench.acked(1, 2)
    assert bench.started("a") == [1, 2]


async def test_a_gained_partition_has_not_caught_up_before_its_messages_came(bench: Bench) -> None:
    """The upkeep may look between the gain and the RESET that it asks for."""
    bench.own("a")
    bench.run_async(nothing)
    bench.send("a", 1, 9)
    await bench.acked(1, 9)
    bench.own("a", "b")
    bench.lanes.gain(TEMPLATE.partition("b"), 4)
    bench.lanes.catch_up()
    assert bench.lanes.behind() == {"b": 4}
    assert bench.lanes.resume_at == 4
    bench.send("b", 4)
    bench.send("a", 9)
    await bench.acked(4)
    bench.lanes.catch_up()
    assert bench.lanes.behind() == {}
    assert bench.lanes.resume_at == 10


# ── many subjects ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_very_many_idle_lanes_are_forgotten_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "_EVICT_ABOVE", 3)
    bench = Bench(each_subject=True)
    doors = gates(4)
    bench.own("*")
    bench.run_async(behind_gates(doors))
    for seq, partition_id in enumerate("abc", start=1):
        bench.send(partition_id, seq)
    await bench.acked(1, 2, 3)
    bench.lanes.evict()
    assert bench.lanes.count == 3
    bench.send("d", 4)
    bench.send("e", 5)
    await bench.acked(5)
    bench.lanes.evict()
    assert sorted(bench.positions()) == ["d", "e"]
    doors[4].set()
    bench.send("a", 6)
    await bench.acked(4, 6)
    assert bench.started("a") == [1, 6]
    await bench.close()


async def test_a_redelivery_to_a_lane_that_was_forgotten_is_still_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "_EVICT_ABOVE", 0)
    bench = Bench(each_subject=True)
    bench.own("*")
    bench.run_async(nothing)
    bench.send("a", 1)
    bench.send("b", 2)
    await bench.acked(1, 2)
    bench.lanes.evict()
    assert bench.lanes.count == 0
    bench.send("a", 1, deliveries=2)
    bench.send("b", 3)
    await bench.acked(3)
    assert bench.started("a") == [1]
    await bench.close()


async def test_each_subject_is_a_partition_of_its_own() -> None:
    bench = Bench(each_subject=True)
    bench.own("*")
    bench.run_async(nothing)
    bench.send("a", 1)
    bench.send("b", 2)
    bench.send("a.b", 3)
    await bench.acked(1, 2)
    assert bench.positions() == {"a": 2, "b": 3}
    assert bench.acks.acked == [1, 2]
    await bench.close()


# ── coroutine handlers ────────────────────────────────────────────────────────────────────────────────────────────


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
    assert bench.lanes.floor == 1
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


# ── plain handlers ────────────────────────────────────────────────────────────────────────────────────────────────


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
    assert (bench.lanes.held, bench.lanes.floor) == (0, 1001)


async def test_threads_work_on_partitions_in_parallel_up_to_the_limit(bench: Bench) -> None:
    meeting = threading.Barrier(3)
    bench.own(*"abcdef")

    def handler(message: Message) -> None:
        meeting.wait(BOUND_S)

    bench.run_threads(handler, threads=3)
    for seq, partition_id in enumerate("abcdef", start=1):
        bench.send(partition_id, seq)
    await bench.acked(*range(1, 7))
    assert bench.most_at_once["total"] == 3
    assert len({t for t in threading.enumerate() if t.name.startswith("parti-handler")}) <= 3


async def test_a_stuck_thread_does_not_stop_the_other_partitions(bench: Bench) -> None:
    door = threading.Event()
    bench.own("stuck", "a")
    bench.run_threads(lambda message: message.partition.id == "stuck" and door.wait(BOUND_S), threads=2)
    bench.send("stuck", 1, 2)
    for seq in range(3, 50):
        bench.send("a", seq)
    await bench.acked(*range(3, 50))
    assert bench.lanes.floor == 1
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
    assert bench.lanes.behind()["a"] == 3
    assert (bench.lanes.held, bench.lanes.floor) == (0, 6)


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


# ── which runner ──────────────────────────────────────────────────────────────────────────────────────────────────


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


# ── the unordered mode ────────────────────────────────────────────────────────────────────────────────────────────


async def test_unordered_messages_of_one_partition_do_not_wait_for_each_other(unordered: Bench) -> None:
    doors = gates(1)
    unordered.own("a")
    unordered.run_async(behind_gates(doors))
    unordered.send("a", 1, 2, 3)
    await unordered.acked(2, 3)
    assert unordered.lanes.floor == 1
    doors[1].set()
    await unordered.acked(1)
    assert (unordered.lanes.floor, unordered.lanes.held) == (4, 0)


async def test_an_unordered_failure_goes_back_to_the_server_which_counts_the_attempts(unordered: Bench) -> None:
    async def handler(message: Message) -> None:
        if message.seq == 1:
            raise ValueError("bad")

    unordered.own("a")
    unordered.run_async(handler)
    unordered.send("a", 1, 2)
    await unordered.until(lambda: unordered.acks.given_back)
    await unordered.acked(2)
    assert unordered.acks.given_back == [(1, 0.002)]
    assert (unordered.lanes.held, unordered.lanes.floor) == (0, 1)
    unordered.send("a", 1, deliveries=2)
    await unordered.until(lambda: len(unordered.acks.given_back) == 2)
    unordered.send("a", 1, deliveries=3)
    await unordered.acked(1)
    assert [(seq, attempt) for seq, _, attempt in unordered.letters.sent] == [(1, 3)]
    assert (unordered.lanes.held, unordered.lanes.floor) == (0, 3)


async def test_an_unordered_duplicate_or_finished_delivery_is_not_handled_again(unordered: Bench) -> None:
    doors = gates(1)
    unordered.own("a")
    unordered.run_async(behind_gates(doors))
    unordered.send("a", 1, 2)
    await unordered.acked(2)
    unordered.send("a", 1, 2, deliveries=2)
    assert unordered.acks.acked == [2, 2]
    assert unordered.lanes.held == 1
    doors[1].set()
    await unordered.acked(1)
    assert unordered.started() == [1, 2]


async def test_an_unordered_redelivery_below_the_floor_is_skipped_and_the_floor_stays(unordered: Bench) -> None:
    """As after a reconnect: the acknowledgement was lost, the server delivers again after AckWait."""
    unordered.own("a")
    unordered.run_async(nothing)
    unordered.send("a", 1, 2)
    await unordered.acked(1, 2)
    assert unordered.lanes.floor == 3
    unordered.send("a", 1, deliveries=2)
    assert unordered.lanes.floor == 3
    unordered.send("a", 3)
    await unordered.acked(3)
    assert unordered.started() == [1, 2, 3]


async def test_an_unordered_release_keeps_the_position_below_everything_unfinished(unordered: Bench) -> None:
    doors = gates(2)
    unordered.own("a", "b")
    runners = unordered.run_async(behind_gates(doors))
    unordered.send("a", 2)
    await unordered.until(lambda: unordered.started() == [2])
    # 1 is delivered again after a failure elsewhere, and waits when the partition goes.
    unordered.runners = None
    unordered.send("a", 1)
    unordered.runners = runners
    unordered.own("b")
    doors[2].set()
    await unordered.acked(2)
    assert unordered.started() == [2]
    assert unordered.lanes.behind()["a"] <= 1
    assert (unordered.lanes.held, unordered.lanes.floor) == (0, 3)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_an_unordered_failure_of_a_released_partition_does_not_hold_the_floor_for_ever(
    unordered: Bench, when: str
) -> None:
    door = asyncio.Event()

    async def handler(message: Message) -> None:
        if message.partition.id == "a":
            await door.wait()
            raise ValueError("bad")

    unordered.own("a", "b")
    unordered.run_async(handler)
    unordered.send("a", 1)
    await unordered.until(lambda: unordered.started() == [1])
    if when == "before":
        door.set()
        await unordered.until(lambda: unordered.acks.given_back)
        unordered.own("b")
    else:
        unordered.own("b")
        door.set()
        await unordered.until(lambda: unordered.ends == [1])
    unordered.send("b", 2)
    await unordered.acked(2)
    assert (unordered.lanes.held, unordered.lanes.floor) == (0, 3)
    assert unordered.lanes.behind()["a"] <= 1


async def test_unordered_threads_report_each_overdue_message_once(unordered: Bench) -> None:
    door = threading.Event()
    unordered.own("a")
    unordered.run_threads(lambda message: door.wait(BOUND_S), threads=2, timeout_s=0.01)
    unordered.send("a", 1, 2)
    await unordered.until(lambda: sorted(unordered.started()) == [1, 2])
    await unordered.overdue_checks(6)
    assert unordered.metrics.handler_failures.child("timeout").value == 2
    door.set()
    await unordered.acked(1, 2)


async def test_unordered_keep_alive_speaks_of_what_is_in_hand(unordered: Bench) -> None:
    unordered.own("a")
    unordered.run_async(behind_gates(gates(1)))
    unordered.send("a", 1)
    await unordered.until(lambda: unordered.started() == [1])
    unordered.lanes.keep_alive(60.0)
    assert unordered.acks.alive == []
    unordered.lanes.keep_alive(-1.0)
    assert unordered.acks.alive == [1]
