"""The unordered mode on a real server: messages side by side, and retries that come from the server."""

from __future__ import annotations

import asyncio

from tests.integration.conftest import Kit, Record, eventually, merge
from tests.integration.handling import Gate, headers_of

import parti


async def test_unordered_retries_come_from_the_server_and_end_in_a_dead_letter(kit: Kit, record: Record) -> None:
    poison = (await kit.publish(["a"]))["a"][0]
    await kit.publish(["a"], 20)

    async def handle(message: parti.Message) -> None:
        record.note(message)
        assert message.attempt == message.deliveries
        if message.seq == poison:
            raise ValueError("never")

    app = kit.app(handle, ["a"], ordered=False, attempts=3, backoff_s=(0.3, 0.6))
    async with app.running() as worker:
        await eventually(lambda: worker.finished == 21)
        await eventually(kit.all_acked)
    tries = [c for c in record.calls if c.seq == poison]
    assert [c.attempt for c in tries] == [1, 2, 3]
    assert tries[1].at_s - tries[0].at_s >= 0.3
    assert tries[2].at_s - tries[1].at_s >= 0.6
    assert max(c.at_s for c in record.calls if c.seq != poison) < tries[1].at_s
    (letter,) = await kit.dead_letters()
    headers = headers_of(letter)
    assert (headers["Parti-Sequence"], headers["Parti-Attempts"]) == (str(poison), "3")


async def test_unordered_runs_messages_of_one_partition_side_by_side(kit: Kit, record: Record) -> None:
    gate = Gate("a")
    sent = await kit.publish(["a"], 30)
    async with kit.app(gate.after(record), ["a"], ordered=False).running() as worker:
        await record.reaches(30)
        assert worker.finished == 0
        gate.opened.set()
        await eventually(lambda: worker.finished == 30)
    record.is_exactly(sent)


async def test_unordered_skips_what_is_delivered_again_below_its_position(kit: Kit, record: Record) -> None:
    sent = await kit.publish(["a"], 30)
    async with kit.app(record.handle, ["a"], ordered=False).running() as worker:
        await eventually(lambda: worker.finished == 30)
        await eventually(lambda: worker.metrics.progress_writes.value > 0)
        await kit.api.reset_consumer(kit.stream, kit.consumer, 1)
        later = await kit.publish(["a"], 5)
        await eventually(lambda: set(later["a"]) <= set(record.of("a")))
        await eventually(kit.all_acked)
    record.is_exactly(merge(sent, later))


async def test_a_handler_of_a_deleted_stream_does_not_finish_the_new_message_of_its_number(
    kit: Kit, record: Record
) -> None:
    old, new = asyncio.Event(), asyncio.Event()

    async def handle(message: parti.Message) -> None:
        record.note(message)
        if len(record.calls) == 1:
            await old.wait()
        elif len(record.calls) == 2:
            await new.wait()
            raise ValueError("not this time")

    app = kit.app(handle, ["a"], ordered=False, pull_heartbeat_s=0.2, backoff_s=(0.1,))
    async with app.running() as worker:
        await kit.publish(["a"])
        await record.reaches(1)
        await kit.delete_stream()
        await kit.create_stream()
        await kit.publish(["a"])
        await record.reaches(2)
        old.set()
        await eventually(lambda: worker.finished == 1)
        new.set()
        await record.reaches(3)
        await eventually(kit.all_acked)
    assert [(call.seq, call.attempt) for call in record.calls] == [(1, 1), (1, 1), (1, 2)]
