"""Attempts outlive a change of owner: what has failed before is not at its first attempt again."""

from __future__ import annotations

import asyncio
import time

import pytest
from tests.unit.lanes_bench import TEMPLATE, Bench, nothing

from parti.core.retry import RetryPolicy
from parti.model.message import Message, StoredMessage


async def fail(message: Message) -> None:
    raise ValueError("bad")


def attempts(bench: Bench, seq: int) -> list[int]:
    return [attempt for _, started, attempt in bench.starts if started == seq]


async def test_what_failed_at_an_earlier_owner_is_counted_on(bench: Bench) -> None:
    bench.lanes.roster.note_failed("a", 5, 2)
    bench.own("a", at={"a": 4})
    bench.run_async(fail)
    bench.send("a", 5)
    await bench.acked(5)
    assert attempts(bench, 5) == [3]
    assert bench.letters.sent == [(5, "ValueError: bad", 3)]


async def test_only_that_message_is_counted_on(bench: Bench) -> None:
    bench.lanes.roster.note_failed("a", 5, 2)
    bench.own("a", "b")
    bench.run_async(nothing)
    bench.send("a", 5, 6)
    bench.send("b", 7)
    await bench.acked(5, 6, 7)
    assert [attempts(bench, seq) for seq in (5, 6, 7)] == [[3], [1], [1]]


@pytest.mark.parametrize("head", [4, 6], ids=["restored from before", "deleted"])
async def test_another_head_is_at_its_first_attempt(bench: Bench, head: int) -> None:
    bench.lanes.roster.note_failed("a", 5, 2)
    bench.own("a")
    bench.run_async(nothing)
    bench.send("a", head)
    await bench.acked(head)
    assert attempts(bench, head) == [1]


async def test_the_pause_before_the_next_attempt_is_kept() -> None:
    bench = Bench(policy=RetryPolicy(attempts=5, backoff_s=(0.001, 0.1)))
    bench.lanes.roster.note_failed("a", 5, 2)
    bench.own("a")
    bench.run_async(nothing)
    began_s = time.monotonic()
    bench.send("a", 5, 6)
    await bench.acked(5, 6)
    assert time.monotonic() - began_s >= 0.1
    await bench.close()


async def test_a_partition_that_comes_back_is_counted_on(bench: Bench) -> None:
    async def handler(message: Message) -> None:
        if message.attempt == 1:
            raise ValueError("not yet")

    bench.own("a")
    bench.run_async(handler)
    bench.send("a", 1)
    await bench.until(lambda: bench.ends == [1])
    bench.own()
    bench.own("a")
    bench.send("a", 1)
    await bench.acked(1)
    assert attempts(bench, 1) == [1, 2]


async def test_a_partition_that_was_incoming_is_counted_on(bench: Bench) -> None:
    a = TEMPLATE.partition("a")
    bench.run_async(nothing)
    bench.lanes.roster.expect({a.subject: a})
    bench.send("a", 4, 5, 6)
    bench.lanes.roster.note_failed("a", 5, 1)
    bench.own("a", at={"a": 5})
    await bench.acked(4, 5, 6)
    assert [(seq, attempt) for _, seq, attempt in bench.starts] == [(5, 2), (6, 1)]


async def test_a_partition_that_is_fed_from_the_stream_is_counted_on(bench: Bench) -> None:
    bench.run_async(nothing)
    bench.lanes.roster.note_failed("a", 5, 1)
    bench.own("a", at={"a": 5})
    bench.lanes.roster.gain(TEMPLATE.partition("a"), 5, feed_to=6)
    lane = bench.lane("a")
    lane.feed([StoredMessage("dc.a", b"x", seq, lane.ownership) for seq in (5, 6)], exhausted=True)
    bench.lanes.fed(lane)
    await bench.until(lambda: bench.ends == [5, 6])
    assert [(seq, attempt) for _, seq, attempt in bench.starts] == [(5, 2), (6, 1)]


async def test_a_pause_of_a_partition_does_not_forget_the_count(bench: Bench) -> None:
    """Its state is saved before its first message is there."""
    bench.run_async(nothing)
    bench.lanes.roster.note_failed("a", 5, 1)
    bench.own("a", at={"a": 5})
    bench.lanes.roster.gain(TEMPLATE.partition("a"), 5)
    async with bench.lanes.pauses.paused("a") as position:
        assert position == 5
    bench.send("a", 5)
    await bench.acked(5)
    assert attempts(bench, 5) == [2]


async def test_what_failed_is_told_until_it_is_finished(bench: Bench) -> None:
    door = asyncio.Event()

    async def handler(message: Message) -> None:
        if message.attempt == 1:
            raise ValueError("not yet")
        await door.wait()

    bench.own("a")
    bench.run_async(handler)
    bench.send("a", 1)
    await bench.until(lambda: len(bench.starts) == 2)
    assert bench.lanes.roster.still_failed() == {"a": (1, 1)}
    door.set()
    await bench.acked(1)
    assert bench.lanes.roster.still_failed() == {}


async def test_what_fails_after_the_release_is_told(bench: Bench) -> None:
    door = asyncio.Event()

    async def handler(message: Message) -> None:
        await door.wait()
        raise ValueError("bad")

    bench.own("a")
    bench.run_async(handler)
    bench.send("a", 1)
    await bench.until(lambda: bench.started() == [1])
    bench.own()
    door.set()
    await bench.until(lambda: bench.lanes.held == 0)
    assert bench.lanes.roster.still_failed() == {"a": (1, 1)}
