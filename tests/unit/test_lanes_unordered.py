"""Lanes in the unordered mode: nobody waits for another, and the server counts the attempts."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tests.unit.lanes_bench import BOUND_S, Bench, behind_gates, gates, nothing

from parti.model.message import Message


async def test_unordered_messages_of_one_partition_do_not_wait_for_each_other(unordered: Bench) -> None:
    doors = gates(1)
    unordered.own("a")
    unordered.run_async(behind_gates(doors))
    unordered.send("a", 1, 2, 3)
    await unordered.acked(2, 3)
    assert unordered.lanes.floors.floor == 1
    doors[1].set()
    await unordered.acked(1)
    assert (unordered.lanes.floors.floor, unordered.lanes.held) == (4, 0)


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
    assert (unordered.lanes.held, unordered.lanes.floors.floor) == (0, 1)
    unordered.send("a", 1, deliveries=2)
    await unordered.until(lambda: len(unordered.acks.given_back) == 2)
    unordered.send("a", 1, deliveries=3)
    await unordered.acked(1)
    assert [(seq, attempt) for seq, _, attempt in unordered.letters.sent] == [(1, 3)]
    assert (unordered.lanes.held, unordered.lanes.floors.floor) == (0, 3)


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
    assert unordered.lanes.floors.floor == 3
    unordered.send("a", 1, deliveries=2)
    assert unordered.lanes.floors.floor == 3
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
    assert unordered.lanes.roster.behind()["a"] <= 1
    assert (unordered.lanes.held, unordered.lanes.floors.floor) == (0, 3)


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
    assert (unordered.lanes.held, unordered.lanes.floors.floor) == (0, 3)
    assert unordered.lanes.roster.behind()["a"] <= 1


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


@pytest.mark.parametrize("succeeds", [True, False])
async def test_a_handler_of_a_deleted_stream_says_nothing_about_the_new_message_of_its_number(
    unordered: Bench, succeeds: bool
) -> None:
    door = asyncio.Event()

    async def handler(message: Message) -> None:
        if unordered.started() == [1]:
            await door.wait()
            if not succeeds:
                raise ValueError("too late")

    unordered.own("a")
    unordered.run_async(handler)
    unordered.send("a", 1)
    await unordered.until(lambda: unordered.started() == [1])
    unordered.lanes.start_over()
    door.set()
    await unordered.until(lambda: unordered.ends == [1])
    unordered.send("a", 1, 2)
    await unordered.acked(1, 2)
    assert unordered.started() == [1, 1, 2]
    assert (unordered.lanes.held, unordered.lanes.floors.floor) == (0, 3)


@pytest.mark.parametrize("succeeds", [True, False])
async def test_a_handler_of_a_deleted_stream_ends_while_the_new_message_of_its_number_runs(
    unordered: Bench, succeeds: bool
) -> None:
    """The new one fails after that: it is given back, and handled when it is delivered again."""
    doors = [asyncio.Event(), asyncio.Event()]

    async def handler(message: Message) -> None:
        call = len(unordered.starts)
        if call <= 2:
            await doors[call - 1].wait()
        if call == 2 or (call == 1 and not succeeds):
            raise ValueError("not this time")

    unordered.own("a")
    unordered.run_async(handler)
    unordered.send("a", 1)
    await unordered.until(lambda: unordered.started() == [1])
    unordered.lanes.start_over()
    unordered.send("a", 1)
    await unordered.until(lambda: unordered.started() == [1, 1])
    doors[0].set()
    await unordered.until(lambda: unordered.ends == [1])
    assert (unordered.lanes.queued(), unordered.acks.acked) == ({"a": 1}, [])
    doors[1].set()
    await unordered.until(lambda: unordered.acks.given_back)
    unordered.send("a", 1, deliveries=2)
    await unordered.acked(1)
    assert [(seq, attempt) for _, seq, attempt in unordered.starts] == [(1, 1), (1, 1), (1, 2)]
    assert (unordered.lanes.held, unordered.lanes.floors.floor) == (0, 2)
