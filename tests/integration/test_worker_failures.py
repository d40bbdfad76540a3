"""Handlers that fail or take too long, on a real server: retries, dead letters, and lanes that go on."""

from __future__ import annotations

import asyncio
import base64
import threading
import time
from datetime import UTC, datetime

import pytest
from structlog.testing import capture_logs
from tests.integration.conftest import Kit, Record, eventually, merge
from tests.integration.handling import MANY, Gate, headers_of

import parti
from parti.jetstream.wire import Wire


async def test_a_failing_message_is_retried_in_its_lane_then_dead_lettered_and_the_lane_goes_on(
    kit: Kit, record: Record
) -> None:
    poison = (await kit.publish(["bad"]))["bad"][0]
    bad = await kit.publish(["bad"], 3)
    good = await kit.publish(["good"], 200)

    async def handle(message: parti.Message) -> None:
        record.note(message)
        if message.seq == poison:
            raise ValueError("cannot\nparse this")

    async with kit.app(handle, ["bad", "good"], attempts=3, backoff_s=(0.3, 0.6)).running() as worker:
        await record.reaches(206)
        await eventually(kit.all_acked)
        assert worker.metrics.dead_letters.value == 1
    calls = [call for call in record.calls if call.partition == "bad"]
    assert [(c.seq, c.attempt) for c in calls[:3]] == [(poison, 1), (poison, 2), (poison, 3)]
    assert [(c.seq, c.attempt) for c in calls[3:]] == [(seq, 1) for seq in bad["bad"]]
    assert calls[1].at_s - calls[0].at_s >= 0.3
    assert calls[2].at_s - calls[1].at_s >= 0.6
    assert record.of("good") == good["good"]
    assert max(c.at_s for c in record.calls if c.partition == "good") < calls[2].at_s
    (letter,) = await kit.dead_letters()
    assert base64.b64decode(letter["data"]) == b"x"
    headers = headers_of(letter)
    assert headers.pop("Nats-Msg-Id").startswith(f"{kit.stream}:{poison}:")
    assert datetime.fromisoformat(headers.pop("Parti-Published")).tzinfo == UTC
    trace = headers.pop("Parti-Traceback").split("␤")
    assert (trace[0], trace[-1]) == ("Traceback (most recent call last):", "ValueError: cannot parse this")
    assert "test_worker_failures.py" in trace[-3]
    assert 'raise ValueError("cannot' in trace[-2]
    assert headers == {
        "Parti-Stream": kit.stream,
        "Parti-Sequence": str(poison),
        "Parti-Subject": kit.subject("bad"),
        "Parti-Partition": "bad",
        "Parti-Error": "ValueError: cannot parse this",
        "Parti-Attempts": "3",
        "Parti-Worker": "one",
    }


async def test_a_dead_letter_of_a_group_names_its_first_error_and_where_it_was_raised(kit: Kit) -> None:
    async def parse(text: str) -> int:
        return int(text)

    async def handle(message: parti.Message) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(parse(message.data.decode()))

    await kit.publish(["a"])
    async with kit.app(handle, ["a"], attempts=1).running() as worker:
        await eventually(lambda: worker.finished == 1)
    (letter,) = await kit.dead_letters()
    headers = headers_of(letter)
    cause = "ValueError: invalid literal for int() with base 10: 'x'"
    group = f"ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception): first: {cause}"
    trace = headers["Parti-Traceback"].split("␤")
    assert (headers["Parti-Error"], trace[-1]) == (group, group)
    assert "return int(text)" in trace[trace.index(cause) - 1]


async def test_retry_names_its_delay_and_reject_gives_up_at_once(kit: Kit, record: Record) -> None:
    sent = await kit.publish(["later", "never"])

    async def handle(message: parti.Message) -> None:
        record.note(message)
        if message.partition.id == "never":
            raise parti.Reject("no such tool")
        if message.attempt == 1:
            raise parti.Retry(0.5)

    app = kit.app(handle, ["later", "never"])
    async with app.running() as worker:
        await record.reaches(3)
        await eventually(lambda: worker.finished == 2)
    assert record.of("never") == sent["never"]
    first, second = (c for c in record.calls if c.partition == "later")
    assert second.attempt == 2
    assert 0.5 <= second.at_s - first.at_s < 5
    (letter,) = await kit.dead_letters()
    headers = headers_of(letter)
    assert (headers["Parti-Error"], headers["Parti-Attempts"]) == ("no such tool", "1")


async def test_a_dead_letter_keeps_the_publishers_headers_but_not_its_orders_to_the_server(kit: Kit) -> None:
    async def handle(message: parti.Message) -> None:
        raise parti.Reject

    steering = {"Nats-Msg-Id": "mine", "Nats-Expected-Stream": kit.stream}
    await kit.api.publish(kit.subject("a"), b"1", headers={"Trace": "abc", **steering})
    async with kit.app(handle, ["a"]).running() as worker:
        await eventually(lambda: worker.finished == 1)
    (letter,) = await kit.dead_letters()
    headers = headers_of(letter)
    assert headers["Trace"] == "abc"
    assert headers["Nats-Msg-Id"] != "mine"
    assert "Nats-Expected-Stream" not in headers


async def test_a_reason_of_any_length_becomes_a_dead_letter(kit: Kit, record: Record) -> None:
    await kit.publish(["a"], 2)

    async def handle(message: parti.Message) -> None:
        record.note(message)
        raise parti.Reject("far too long " * 200_000)

    async with kit.app(handle, ["a"]).running():
        await record.reaches(2)


async def test_a_header_that_cannot_be_sent_again_does_not_hold_up_the_dead_letter(kit: Kit, record: Record) -> None:
    header = b"NATS/1.0\r\nNot A Token: 1\r\nGood: 2\r\n\r\n"
    line = f"HPUB {kit.subject('a')} {len(header)} {len(header) + 1}\r\n".encode()
    Wire(kit.connection.client).write(line + header + b"x\r\n")
    await kit.connection.flush()
    await kit.publish(["a"])

    async def handle(message: parti.Message) -> None:
        record.note(message)
        raise parti.Reject("always")

    async with kit.app(handle, ["a"]).running():
        await record.reaches(2, timeout_s=5)


async def test_while_dead_letters_cannot_be_stored_their_lane_waits_and_others_go_on(
    kit: Kit, record: Record
) -> None:
    async def handle(message: parti.Message) -> None:
        record.note(message)
        if message.partition.id == "bad":
            raise parti.Reject("not this one")

    async with kit.app(handle, ["bad", "good"]).running() as worker:
        dead_letters = (await kit.api.call(f"STREAM.INFO.d{kit.root}"))["config"]
        await kit.delete_stream(f"d{kit.root}")
        sent = await kit.publish(["bad", "good"], 3)
        await eventually(lambda: "dead-letters" in worker.health.reasons)
        await eventually(lambda: len(record.of("good")) == 3)
        assert len(record.of("bad")) == 1
        await kit.api.call(f"STREAM.CREATE.d{kit.root}", dead_letters)
        await eventually(lambda: worker.finished == 6)
        assert worker.health.healthy
    record.is_exactly(sent)
    assert [headers_of(letter)["Parti-Sequence"] for letter in await kit.dead_letters()] == [
        str(seq) for seq in sent["bad"]
    ]


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_a_handler_slower_than_ack_wait_is_not_run_twice(kit: Kit, record: Record, kind: str) -> None:
    async def slow(message: parti.Message) -> None:
        record.note(message)
        await asyncio.sleep(3)

    def slow_in_a_thread(message: parti.Message) -> None:
        record.note(message)
        time.sleep(3)

    # The second message of the partition waits in its lane for as long as the first one runs.
    sent = await kit.publish(["a"])
    app = kit.app(slow if kind == "async" else slow_in_a_thread, ["a"], ack_wait_s=1)
    async with app.running() as worker:
        await eventually(lambda: worker.finished == 1)
        await eventually(kit.all_acked)
        assert worker.metrics.redeliveries.value == 0
    record.is_exactly(sent)


async def test_an_async_handler_over_its_time_is_stopped_and_retried(kit: Kit, record: Record) -> None:
    stopped = asyncio.Event()

    async def handle(message: parti.Message) -> None:
        record.note(message)
        if message.attempt == 1:
            try:
                await asyncio.sleep(60)
            finally:
                stopped.set()

    await kit.publish(["a"])
    async with kit.app(handle, ["a"], handler_timeout_s=0.2).running() as worker:
        await eventually(lambda: worker.finished == 1)
        assert worker.metrics.handler_failures.child("timeout").value == 1
    assert stopped.is_set()
    assert [c.attempt for c in record.calls] == [1, 2]


async def test_a_plain_handler_over_its_time_is_reported_and_its_partition_waits(kit: Kit, record: Record) -> None:
    release = threading.Event()

    def handle(message: parti.Message) -> None:
        record.note(message)
        if len(record.calls) == 1:
            release.wait(30)

    sent = await kit.publish(["a"], 2)
    async with kit.app(handle, ["a"], handler_timeout_s=0.2).running() as worker:
        await eventually(lambda: worker.metrics.handler_failures.child("timeout").value == 1)
        assert len(record.calls) == 1
        release.set()
        await eventually(lambda: worker.finished == 2)
    record.is_exactly(sent)


async def test_a_handler_whose_inner_task_was_cancelled_has_failed_and_its_lane_goes_on(
    kit: Kit, record: Record
) -> None:
    async def handle(message: parti.Message) -> None:
        record.note(message)
        if message.attempt == 1:
            inner = asyncio.create_task(asyncio.sleep(60))
            await asyncio.sleep(0)
            inner.cancel()
            await inner

    await kit.publish(["a"])
    async with kit.app(handle, ["a"]).running() as worker:
        await eventually(lambda: worker.finished == 1, timeout_s=3)
    assert [c.attempt for c in record.calls] == [1, 2]


async def test_a_sleeping_partition_does_not_stop_the_others(kit: Kit, record: Record) -> None:
    gate = Gate("p0")
    async with kit.app(gate.after(record), MANY).running() as worker:
        sent = await kit.publish(MANY, 25)
        await record.reaches(39 * 25 + 1)
        assert worker.finished == 39 * 25
        gate.opened.set()
        await record.reaches(1000)
    record.is_exactly(sent)


async def test_a_sleeping_partition_with_a_long_backlog_does_not_stop_the_others(kit: Kit, record: Record) -> None:
    gate = Gate("p0")
    app = kit.app(gate.after(record), ["p0", "p1"], max_ack_pending=50, pull_batch=10)
    async with app.running():
        slow = await kit.publish(["p0"], 200)
        await gate.entered.wait()
        quick = await kit.publish(["p1"], 50)
        try:
            await eventually(lambda: record.of("p1") == quick["p1"], timeout_s=5)
        finally:
            gate.opened.set()
        await record.reaches(250)
    record.is_exactly(merge(slow, quick))


async def test_a_handler_that_ignores_its_timeout_is_told_of(kit: Kit, record: Record) -> None:
    await kit.publish(["a", "b"])
    ends = asyncio.Event()

    async def stubborn(message: parti.Message) -> None:
        record.note(message)
        while message.partition.id == "a" and not ends.is_set():
            try:
                await ends.wait()
            except asyncio.CancelledError:
                continue

    with capture_logs() as logs:
        async with kit.app(stubborn, ["a", "b"], handler_timeout_s=0.2).running() as worker:
            await eventually(lambda: any("cannot be interrupted" in entry["event"] for entry in logs))
            assert worker.metrics.handler_failures.child("timeout").value == 1
            ends.set()
            await eventually(lambda: worker.finished == 2)
            await eventually(kit.all_acked)
    assert len([entry for entry in logs if "cannot be interrupted" in entry["event"]]) == 1
