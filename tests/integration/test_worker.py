"""What a worker promises its handler, on a real server: all of it, in order, once, and what becomes of failures."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import nats
import pytest
import structlog
from tests.integration.conftest import Kit, Record, eventually, merge, only_suffixes_repeat
from tests.integration.processes import WorkerProcess, write_app

import parti
from parti.embedded import Server
from parti.errors import TooManySubjects
from parti.jetstream.wire import Wire
from parti.model.message import parse_headers

MANY = [f"p{n}" for n in range(40)]


def headers_of(letter: dict[str, Any]) -> dict[str, str]:
    return parse_headers(base64.b64decode(letter["hdrs"]))


class Gate:
    """Holds handlers of the named partitions until it is opened."""

    def __init__(self, *held: str) -> None:
        self.held = set(held)
        self.opened = asyncio.Event()
        self.entered = asyncio.Event()

    async def passes(self, message: parti.Message) -> None:
        if message.partition.id in self.held:
            self.entered.set()
            await self.opened.wait()


# ── everything, in order ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_every_message_is_handled_once_and_in_order_per_partition(kit: Kit, record: Record, kind: str) -> None:
    app = kit.app(record.handle if kind == "async" else record.note, MANY)
    backlog = await kit.publish(MANY, 25)
    async with app.running():
        sent = merge(backlog, await kit.publish(MANY, 25))
        await record.reaches(2000)
        await eventually(kit.all_acked)
    record.is_exactly(sent)


async def test_waiting_handlers_of_many_partitions_run_at_the_same_time(kit: Kit, record: Record) -> None:
    running = highest = 0

    async def handle(message: parti.Message) -> None:
        nonlocal running, highest
        record.note(message)
        running += 1
        highest = max(highest, running)
        await asyncio.sleep(0.005)
        running -= 1

    sent = await kit.publish(MANY, 5)
    async with kit.app(handle, MANY).running():
        await record.reaches(200)
    record.is_exactly(sent)
    assert highest > 10


async def test_the_message_carries_everything_a_handler_needs(kit: Kit) -> None:
    seen: list[parti.Message] = []

    async def handle(message: parti.Message) -> None:
        seen.append(message)

    app = kit.app(handle, ["etch1.c3"], subject=f"{kit.root}.{{tool}}.{{chamber}}.done")
    before = datetime.now(UTC) - timedelta(seconds=1)
    seq = await kit.api.publish(f"{kit.root}.etch1.c3.done", b"\x00payload", headers={"Trace": "abc"})
    async with app.running():
        await eventually(lambda: bool(seen))
    (message,) = seen
    assert message.subject == f"{kit.root}.etch1.c3.done"
    assert message.data == b"\x00payload"
    assert message.headers == {"Trace": "abc"}
    assert (message.stream, message.seq, message.worker_id) == (kit.stream, seq, "one")
    assert (message.attempt, message.fence, message.deliveries) == (1, 0, 1)
    assert message.partition.id == "etch1.c3"
    assert dict(message.partition.keys) == {"tool": "etch1", "chamber": "c3"}
    assert before < message.published_at <= message.received_at < datetime.now(UTC)
    context = message.context
    assert (context.partition_id, context.seq, context.published_at) == ("etch1.c3", seq, message.published_at)
    assert "payload" not in repr(message)
    assert "payload" not in repr(context)


async def test_without_a_list_every_subject_of_the_template_is_a_partition(kit: Kit, record: Record) -> None:
    sent = await kit.publish(["a", "b", "c"], 20)
    await kit.api.publish(f"{kit.root}.too.deep", b"")
    async with kit.app(record.handle).running() as worker:
        later = await kit.publish(["b", "new"], 20)
        await record.reaches(100)
        await eventually(lambda: worker.metrics.lane_count.export("one").samples[0].value == 4)
    record.is_exactly(merge(sent, later))


async def test_a_wildcard_partition_keeps_one_order_over_its_subjects(kit: Kit, record: Record) -> None:
    app = kit.app(record.handle, ["etch1.*", "etch2.c1"], subject=f"{kit.root}.{{tool}}.{{chamber}}")
    sent = await kit.publish(["etch1.c1", "etch1.c2", "etch1.c3", "etch2.c1"], 30)
    async with app.running():
        await record.reaches(120)
    record.is_exactly(
        {"etch1.*": sent["etch1.c1"] + sent["etch1.c2"] + sent["etch1.c3"], "etch2.c1": sent["etch2.c1"]}
    )


async def test_a_message_larger_than_a_pull_may_return_is_delivered(kit: Kit, record: Record) -> None:
    small = await kit.publish(["a"], 3)
    large = await kit.publish(["a"], 2, data=b"L" * 50_000)
    async with kit.app(record.handle, ["a"], pull_max_bytes=1024).running():
        last = await kit.publish(["a"], 3)
        await record.reaches(8)
    record.is_exactly(merge(small, large, last))


async def test_start_new_leaves_old_messages_alone(kit: Kit, record: Record) -> None:
    await kit.publish(["a", "b"], 10)
    app = kit.app(record.handle, ["a", "b"], start="new")
    async with app.running():
        sent = await kit.publish(["a", "b"], 10)
        await record.reaches(20)
    async with app.running():
        sent = merge(sent, await kit.publish(["a", "b"], 10))
        await record.reaches(40)
    record.is_exactly(sent)


# ── failures ──────────────────────────────────────────────────────────────────────────────────────────────────


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
    assert headers == {
        "Parti-Stream": kit.stream,
        "Parti-Sequence": str(poison),
        "Parti-Subject": kit.subject("bad"),
        "Parti-Partition": "bad",
        "Parti-Error": "ValueError: cannot parse this",
        "Parti-Attempts": "3",
        "Parti-Worker": "one",
    }


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

    async def handle(message: parti.Message) -> None:
        record.note(message)
        await gate.passes(message)

    async with kit.app(handle, MANY).running() as worker:
        sent = await kit.publish(MANY, 25)
        await record.reaches(39 * 25 + 1)
        assert worker.finished == 39 * 25
        gate.opened.set()
        await record.reaches(1000)
    record.is_exactly(sent)


async def test_a_sleeping_partition_with_a_long_backlog_does_not_stop_the_others(kit: Kit, record: Record) -> None:
    gate = Gate("p0")

    async def handle(message: parti.Message) -> None:
        record.note(message)
        await gate.passes(message)

    app = kit.app(handle, ["p0", "p1"], max_ack_pending=50, pull_batch=10)
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


# ── the unordered mode ────────────────────────────────────────────────────────────────────────────────────────


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

    async def handle(message: parti.Message) -> None:
        record.note(message)
        await gate.passes(message)

    sent = await kit.publish(["a"], 30)
    async with kit.app(handle, ["a"], ordered=False).running() as worker:
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


# ── restarts ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "unordered"])
async def test_a_graceful_restart_repeats_nothing_and_loses_nothing(kit: Kit, record: Record, ordered: bool) -> None:
    async def handle(message: parti.Message) -> None:
        record.note(message)
        await asyncio.sleep(0.001 * (message.seq % 4))

    app = kit.app(handle, MANY, ordered=ordered, ack_wait_s=1)
    sent = await kit.publish(MANY, 10)
    for count in (50, 100, 150):
        async with app.running():
            await record.reaches(count)
            sent = merge(sent, await kit.publish(MANY, 2))
    async with app.running():
        await record.reaches(640)
    if ordered:
        record.is_exactly(sent)
    else:
        assert {p: sorted(seqs) for p, seqs in record.by_partition.items()} == sent


async def test_stopping_right_after_the_start_forgets_no_position(kit: Kit, record: Record) -> None:
    gate = Gate("slow")

    async def handle(message: parti.Message) -> None:
        record.note(message)
        await gate.passes(message)

    sent = await kit.publish(["slow"])
    sent = merge(sent, await kit.publish(["quick"], 20))
    app = kit.app(handle, ["slow", "quick"], drain_timeout_s=0)
    async with app.running() as worker:
        await eventually(lambda: worker.finished == 20)
    for _ in range(2):
        async with app.running():
            pass
    gate.opened.set()
    async with app.running() as worker:
        await eventually(kit.all_acked)
    assert record.of("quick") == sent["quick"]
    assert set(record.of("slow")) == set(sent["slow"])


async def test_a_partition_left_out_for_a_while_goes_on_where_it_was(kit: Kit, record: Record) -> None:
    sent = await kit.publish(["a", "b"], 20)
    async with kit.app(record.handle, ["a", "b"]).running():
        await record.reaches(40)
    async with kit.app(record.handle, ["a"]).running():
        sent = merge(sent, await kit.publish(["a", "b"], 10))
        await record.reaches(50)
    async with kit.app(record.handle, ["a", "b"]).running():
        await record.reaches(60)
        await eventually(kit.all_acked)
    record.is_exactly(sent)


async def test_after_a_crash_nothing_is_lost_and_only_the_end_of_a_partition_is_repeated(
    kit: Kit, tmp_path: Path
) -> None:
    target = write_app(tmp_path, kit, MANY, body="await asyncio.sleep(0.002)")
    sent = await kit.publish(MANY, 25)
    for crash_at in (200, 500):
        with WorkerProcess(tmp_path, target, kit.url) as worker:
            await eventually(lambda at=crash_at: len(worker.handled) >= at, 20)  # type: ignore[misc]
            worker.kill()
    with WorkerProcess(tmp_path, target, kit.url) as worker:
        await eventually(kit.all_acked, 20)
        assert worker.terminate() == 0
        seen = worker.by_partition
    assert {p: sorted(set(seqs)) for p, seqs in seen.items()} == sent
    assert all(only_suffixes_repeat(seqs) for seqs in seen.values())
    repeats = sum(len(seqs) - len(set(seqs)) for seqs in seen.values())
    assert repeats <= 600  # two crashes, each with at most 80 % of MaxAckPending in flight, mostly not started


async def test_what_is_delivered_again_below_a_position_is_acknowledged_and_skipped(kit: Kit, record: Record) -> None:
    gate = Gate("slow")

    async def handle(message: parti.Message) -> None:
        record.note(message)
        await gate.passes(message)

    sent = await kit.publish(["slow"])
    sent = merge(sent, await kit.publish(["quick"], 50))
    async with kit.app(handle, ["slow", "quick"]).running() as worker:
        await eventually(lambda: worker.finished == 50)
        # Somebody sets the consumer back by hand: the worker goes to its floor, which "slow" holds at its beginning.
        await kit.api.reset_consumer(kit.stream, kit.consumer, 1)
        sent = merge(sent, await kit.publish(["quick"]))
        await eventually(lambda: worker.finished == 51)
        await eventually(lambda: worker.metrics.skipped.value >= 50)
        gate.opened.set()
        await eventually(kit.all_acked)
    record.is_exactly(sent)


async def test_a_consumer_set_back_while_the_worker_is_away_repeats_nothing(kit: Kit, record: Record) -> None:
    sent = await kit.publish(["a"], 30)
    app = kit.app(record.handle, ["a"])
    async with app.running():
        await record.reaches(30)
    await kit.api.reset_consumer(kit.stream, kit.consumer, 1)
    async with app.running():
        sent = merge(sent, await kit.publish(["a"]))
        await record.reaches(31)
    record.is_exactly(sent)


async def test_the_progress_record_says_what_is_finished(kit: Kit, record: Record) -> None:
    gate = Gate("slow")

    async def handle(message: parti.Message) -> None:
        record.note(message)
        await gate.passes(message)

    slow = await kit.publish(["slow"])
    quick = await kit.publish(["quick"], 9)
    async with kit.app(handle, ["slow", "quick"]).running() as worker:
        await eventually(lambda: worker.finished == 9)

        async def stored() -> bool:
            found = await kit.progress()
            return found is not None and found.ahead == {"quick": quick["quick"][-1] + 1}

        await eventually(stored)
        found = await kit.progress()
        assert found
        assert (found.stream, found.floor) == (kit.stream, slow["slow"][0])
        assert found.stream_created == (await kit.api.stream_info(kit.stream)).created
        assert set(found.covered) == {kit.subject("slow"), kit.subject("quick")}
        assert found.behind == {}
        gate.opened.set()
    found = await kit.progress()
    assert found
    assert (found.floor, found.ahead, found.behind) == (11, {}, {})


async def test_a_progress_record_that_somebody_deleted_is_written_again(kit: Kit, record: Record) -> None:
    app = kit.app(record.handle, ["a"])
    async with app.running():
        await kit.publish(["a"])
        await record.reaches(1)
    await kit.api.publish(f"$KV.b{kit.root}.progress.one", b"", headers={"KV-Operation": "DEL"})
    async with app.running() as worker:
        await kit.publish(["a"])
        await record.reaches(2)
    assert worker.metrics.progress_writes.value > 0
    found = await kit.progress()
    assert found
    assert found.floor == 3


async def test_positions_of_a_stream_that_was_made_anew_are_ignored_with_a_warning(kit: Kit, record: Record) -> None:
    app = kit.app(record.handle, ["a"])
    await kit.publish(["a"], 20)
    async with app.running():
        await record.reaches(20)
    await kit.delete_stream()
    await kit.create_stream()
    sent = await kit.publish(["a"], 5)
    with structlog.testing.capture_logs() as logs:
        async with app.running():
            await record.reaches(25)
    assert record.of("a")[20:] == sent["a"]
    assert [entry["log_level"] for entry in logs if "belongs to another stream" in entry["event"]] == ["warning"]


async def test_a_stream_made_anew_under_a_running_worker_is_read_from_its_beginning(kit: Kit, record: Record) -> None:
    await kit.publish(["a"], 20)
    async with kit.app(record.handle, ["a"]).running():
        await record.reaches(20)
        await kit.delete_stream()
        await kit.create_stream()
        sent = await kit.publish(["a"], 5)
        await record.reaches(25, timeout_s=8)
    assert record.of("a")[20:] == sent["a"]


async def test_a_start_that_fails_leaves_nothing_behind(kit: Kit, record: Record) -> None:
    before = asyncio.all_tasks()
    app = kit.app(record.handle, [f"p{n}" for n in range(501)], handler_timeout_s=1)
    with pytest.raises(TooManySubjects):
        await app.worker().start()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() <= before
    assert kit.consumer not in (await kit.api.call(f"CONSUMER.NAMES.{kit.stream}"))["consumers"]


# ── telemetry ─────────────────────────────────────────────────────────────────────────────────────────────────


def fetch(port: int | None, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


async def test_metrics_and_health_are_served_while_the_worker_runs(kit: Kit, record: Record) -> None:
    app = kit.app(record.handle, ["a", "b"], metrics_port=0)
    async with app.running() as worker:
        await kit.publish(["a", "b"], 10)
        await eventually(lambda: worker.finished == 20)
        status, text = await asyncio.to_thread(fetch, worker.metrics_port, "/metrics")
        assert status == 200
        for line in (
            'parti_consumer_messages_total{worker="one"} 20.0',
            'parti_handler_latency_seconds_count{worker="one"} 20.0',
            'parti_consumer_subject_count{worker="one"} 2.0',
            'parti_consumer_inflight{worker="one"} 0.0',
            'parti_lane_count{worker="one"} 2.0',
            'parti_pull_healthy{worker="one"} 1.0',
            'parti_connection_state{state="connected",worker="one"} 1.0',
        ):
            assert line in text
        status, text = await asyncio.to_thread(fetch, worker.metrics_port, "/healthz")
        assert (status, json.loads(text)) == (200, {"state": "healthy", "reasons": {}})
        worker.health.raise_signal("test", "said so")
        status, text = await asyncio.to_thread(fetch, worker.metrics_port, "/healthz")
        assert (status, json.loads(text)["reasons"]) == (503, {"test": "said so"})


async def test_a_worker_that_may_not_pull_says_so_by_name(nats_server_factory: Callable[..., Server]) -> None:
    server = nats_server_factory(
        config="""authorization { users: [
            { user: ann, password: pw, permissions: { publish: { deny: ["$JS.API.CONSUMER.MSG.NEXT.>"] } } }
        ] }"""
    )
    client = await nats.connect(server.url, user="ann", password="pw")
    await client.jetstream().add_stream(name="S", subjects=["s.*"])
    await client.close()
    app = parti.App(stream="S", subject="s.{k}", partitions=["a"], nats=server.url, user="ann", password="pw")

    @app.handler
    async def handle(message: parti.Message) -> None:
        """Never called."""

    async with app.running() as worker:
        await eventually(lambda: "$JS.API.CONSUMER.MSG.NEXT" in worker.health.reasons.get("permissions", ""))
