"""A message whose handler fails: it is retried in its lane, then dead-lettered, and the lane goes on."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from typing import Any

import pytest
from tests.unit.lanes_bench import Bench

from parti.core.retry import Reject, Retry, RetryPolicy
from parti.model.message import Message


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
    assert (bench.lanes.held, bench.lanes.floors.floor) == (2, 1)
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
    assert bench.lanes.floors.floor == 1
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


DECIMAL: Any = Decimal("0.001")


class OwnRetry(Retry):
    def __init__(self, delay: Any) -> None:  # without a call of the base class
        self.delay = delay


class BareRetry(Retry):
    def __init__(self) -> None:
        """Without a call of the base class."""


@pytest.mark.parametrize(
    "error",
    [Retry(DECIMAL), OwnRetry(float("nan")), OwnRetry("soon"), OwnRetry(-1), BareRetry()],
    ids=["Decimal", "nan", "str", "negative", "bare"],
)
@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_a_retry_with_an_odd_delay_is_tried_as_often_as_others(bench: Bench, error: Retry, kind: str) -> None:
    bench.own("a")
    bench.run_failing(kind, 1, error)
    bench.send("a", 1, 2)
    await bench.acked(1, 2)
    assert [(seq, attempt) for _, seq, attempt in bench.starts] == [(1, 1), (1, 2), (1, 3), (2, 1)]
    assert [(seq, attempt) for seq, _, attempt in bench.letters.sent] == [(1, 3)]


async def test_an_unordered_retry_with_an_endless_delay_is_given_back_for_the_longest_one(unordered: Bench) -> None:
    async def handler(message: Message) -> None:
        raise Retry(10**400)

    unordered.own("a")
    unordered.run_async(handler)
    unordered.send("a", 1)
    await unordered.until(lambda: unordered.acks.given_back)
    assert unordered.acks.given_back == [(1, 2_592_000.0)]


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
