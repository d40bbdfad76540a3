"""Partitions that are let go and come back: what runs is finished, what waits is left to the next owner."""

from __future__ import annotations

import asyncio

from tests.unit.lanes_bench import TEMPLATE, Bench, behind_gates, gates, nothing

from parti.core.lease import NEVER_S
from parti.core.retry import Reject
from parti.model.message import Message


async def test_a_released_partition_finishes_what_runs_and_drops_what_waits(bench: Bench) -> None:
    doors = gates(1)
    bench.own("a", "b")
    bench.run_async(behind_gates(doors))
    bench.send("a", 1, 2, 3)
    await bench.until(lambda: bench.started() == [1])
    bench.own("b")
    assert bench.lanes.roster.behind()["a"] <= 1
    doors[1].set()
    await bench.acked(1)
    bench.send("b", 4)
    await bench.acked(4)
    assert bench.started() == [1, 4]
    assert bench.lanes.roster.behind()["a"] == 2
    assert (bench.lanes.held, bench.lanes.floors.floor) == (0, 5)


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
    assert bench.lanes.roster.behind()["a"] <= 1


async def test_a_last_attempt_that_fails_after_the_release_is_a_dead_letter(bench: Bench) -> None:
    door = asyncio.Event()

    async def handler(message: Message) -> None:
        await door.wait()
        raise Reject("no")

    bench.own("a")
    bench.run_async(handler)
    bench.letters.open.clear()
    bench.send("a", 1, 2)
    await bench.until(lambda: bench.started() == [1])
    bench.own()
    door.set()
    await bench.until(lambda: bench.letters.asked)
    assert set(bench.lanes.leaving) == {"a"}, "the next owner would not wait for the dead letter"
    bench.letters.open.set()
    await bench.acked(1)
    assert not set(bench.lanes.leaving)
    assert bench.lanes.roster.behind()["a"] == 2
    assert (bench.started(), bench.lanes.held) == ([1], 0)


async def test_a_worker_whose_lease_has_ended_dead_letters_nothing_of_a_released_partition(bench: Bench) -> None:
    door = asyncio.Event()

    async def handler(message: Message) -> None:
        await door.wait()
        raise Reject("no")

    bench.own("a")
    bench.run_async(handler)
    bench.send("a", 1)
    await bench.until(lambda: bench.started() == [1])
    bench.lanes.permit(NEVER_S)
    bench.own()
    door.set()
    await bench.until(lambda: bench.lanes.held == 0)
    assert bench.letters.asked == 0
    assert bench.lanes.roster.behind()["a"] <= 1


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
    assert bench.lanes.roster.behind()["a"] == 2
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
    bench.lanes.roster.gain(TEMPLATE.partition("b"), 4)
    bench.lanes.floors.catch_up()
    assert bench.lanes.roster.behind() == {"b": 4}
    assert bench.lanes.floors.resume_at == 4
    bench.send("b", 4)
    bench.send("a", 9)
    await bench.acked(4)
    bench.lanes.floors.catch_up()
    assert bench.lanes.roster.behind() == {}
    assert bench.lanes.floors.resume_at == 10


# ── what the stored record speaks for ──────────────────────────────────────────────────────────────────────────────
#
# After a crash the ack floor counts as a position of all that the record speaks for: nothing of that may be
# acknowledged unhandled.


def store(bench: Bench) -> None:
    bench.lanes.summarised()
    bench.lanes.stored()


async def test_what_was_let_go_is_acknowledged_when_a_record_is_stored_that_does_not_speak_for_it(
    bench: Bench,
) -> None:
    bench.lanes.lets_go = True
    bench.own("a", "b")
    bench.lanes.permit(0)
    bench.run_async(nothing)
    bench.send("b", 1, 2)
    bench.own("a")
    bench.send("b", 3)
    assert bench.acks.acked == []
    store(bench)
    assert bench.acks.acked == [1, 2, 3]
    bench.send("b", 4)
    assert bench.acks.acked == [1, 2, 3, 4], "nobody takes it for a position any more"


async def test_what_is_let_go_while_a_record_is_stored_waits_for_the_next_one(bench: Bench) -> None:
    bench.lanes.lets_go = True
    bench.own("a", "b")
    bench.lanes.permit(0)
    bench.run_async(nothing)
    bench.send("b", 1)
    bench.lanes.summarised()  # it speaks for b
    bench.own("a")
    bench.send("b", 2)
    bench.lanes.stored()
    bench.send("b", 3)
    assert bench.acks.acked == []
    bench.lanes.summarised()
    bench.own("a", "b")
    bench.own("a")
    bench.lanes.stored()
    assert bench.acks.acked == [1, 2, 3]
    bench.send("b", 4)
    assert bench.acks.acked == [1, 2, 3], "the record may have been told of b again meanwhile"


async def test_what_an_earlier_run_owned_is_not_acknowledged_while_its_record_stands(bench: Bench) -> None:
    bench.lanes.lets_go = True
    b, wide = TEMPLATE.partition("b"), TEMPLATE.partition("*")
    bench.own("a")
    bench.lanes.roster.restore({"b": 7}, let_go=[b.subject])
    bench.lanes.roster.expect({b.subject: b})
    bench.send("b", 8)
    bench.send("c", 9)
    assert bench.acks.acked == [9]
    store(bench)
    assert bench.acks.acked == [9, 8]
    bench.lanes.roster.restore({"*": 7}, let_go=[wide.subject])
    bench.send("d", 10)
    assert bench.acks.acked == [9, 8], "a partition of several subjects"


async def test_what_arrives_for_a_partition_with_a_wildcard_is_held_until_it_is_owned(bench: Bench) -> None:
    """On an interest stream it comes only once: dropped, it would be lost."""
    any_b = TEMPLATE.partition("*")
    bench.run_async(nothing)
    bench.lanes.roster.expect({any_b.subject: any_b})
    bench.send("b", 1, 2)
    assert bench.lanes.held == 2
    bench.lanes.roster.own({any_b.subject: any_b}, lambda partition_id, subject: 2)
    await bench.acked(1, 2)
    assert [seq for _, seq, _ in bench.starts] == [2]
