"""A worker that stops, crashes or finds its consumer, record or stream changed goes on where it was."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import structlog
from tests.integration.conftest import Kit, Record, eventually, merge, only_suffixes_repeat
from tests.integration.handling import MANY, Gate
from tests.integration.processes import WorkerProcess, write_app

import parti
from parti.errors import TooManySubjects


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


async def test_attempts_are_counted_on_after_a_restart(kit: Kit) -> None:
    attempts = []

    async def handle(message: parti.Message) -> None:
        attempts.append(message.attempt)
        raise ValueError("bad")

    await kit.publish(["a"])
    for expected in ([1], [1, 2]):
        app = kit.app(handle, ["a"], attempts=2, backoff_s=(0.5,))
        async with app.running() as worker:
            await eventually(lambda: bool(worker.metrics.handler_failures.total))
        assert attempts == expected
    assert len(await kit.dead_letters()) == 1


async def test_stopping_right_after_the_start_forgets_no_position(kit: Kit, record: Record) -> None:
    gate = Gate("slow")
    sent = await kit.publish(["slow"])
    sent = merge(sent, await kit.publish(["quick"], 20))
    app = kit.app(gate.after(record), ["slow", "quick"], drain_timeout_s=0)
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
    sent = await kit.publish(["slow"])
    sent = merge(sent, await kit.publish(["quick"], 50))
    async with kit.app(gate.after(record), ["slow", "quick"]).running() as worker:
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
    slow = await kit.publish(["slow"])
    quick = await kit.publish(["quick"], 9)
    async with kit.app(gate.after(record), ["slow", "quick"]).running() as worker:
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
