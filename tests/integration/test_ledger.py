"""The ledger on a real server: a row for each message, there before anybody takes the message for finished."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.conftest import Kit, Record, eventually, merge
from tests.integration.fleet import PARTITIONS, Fleet, Journal, Traffic
from tests.integration.handling import MANY
from tests.integration.ledger import Book, read_book, rows_below_the_position
from tests.integration.processes import WorkerProcess, write_app

import parti
from parti.errors import ConfigError, NotFound
from parti.model.ledger import ledger_stream, sample_hash, sample_limit

FULL: dict[str, Any] = {"ledger": "full"}
START_S = 40.0
"""A process takes a second to begin, on a busy machine many."""
RETENTIONS = ["limits", "interest", "workqueue"]


def now_us() -> int:
    return int(time.time() * 1e6)


@pytest.fixture(autouse=True)
async def no_ledger_stays(kit: Kit) -> AsyncIterator[None]:
    yield
    try:
        await kit.delete_stream(ledger_stream(kit.stream))
    except NotFound:
        pass


async def with_retention(kit: Kit, retention: str) -> None:
    if retention != "limits":
        await kit.delete_stream()
        await kit.create_stream(retention=retention)


# ── what is in it ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("retention", RETENTIONS)
@pytest.mark.parametrize("kind", ["async", "plain", "unordered"])
async def test_a_full_ledger_has_each_message_once(kit: Kit, record: Record, kind: str, retention: str) -> None:
    await with_retention(kit, retention)
    begin_us = now_us()
    handler = record.note if kind == "plain" else record.handle
    async with kit.app(handler, MANY, ordered=kind != "unordered", **FULL).running() as worker:
        sent = await kit.publish(MANY, 20)
        await record.reaches(800)
        await eventually(kit.all_acked)
        rows = worker.metrics.ledger_rows.value
    book = await read_book(kit)
    book.is_exactly(sent)
    book.chains_are_whole()
    book.times_are_sensible(begin_us, now_us())
    if kind != "unordered":
        book.order_holds()
    assert rows == 800
    assert {(e.worker, e.row.fence, e.row.attempt, e.row.outcome) for e in book.entries} == {("one", 0, 1, "handled")}
    (chain,) = book.chains.values()
    assert chain[-1].closed
    created = (await kit.api.stream_info(kit.stream)).created
    assert {(batch.stream, batch.stream_created) for batch in chain} == {(kit.stream, created)}


async def test_off_leaves_nothing_behind(kit: Kit, record: Record) -> None:
    async with kit.app(record.handle, ["a"]).running():
        await kit.publish(["a"], 5)
        await record.reaches(5)
    assert ledger_stream(kit.stream) not in await kit.api.stream_names()


async def test_a_sampled_ledger_has_the_messages_that_everybody_chooses(kit: Kit, record: Record) -> None:
    async with kit.app(record.handle, MANY, ledger="sampled", ledger_sample=10).running():
        sent = await kit.publish(MANY, 20)
        await record.reaches(800)
        await eventually(kit.all_acked)
    expected = [seq for seqs in sent.values() for seq in seqs if sample_hash(seq) < sample_limit(10)]
    assert 60 < len(expected) < 100
    book = await read_book(kit)
    assert book.seqs == sorted(expected)
    book.chains_are_whole()


@pytest.mark.parametrize("ordered", [True, False])
async def test_attempts_and_dead_letters_are_recorded(kit: Kit, ordered: bool) -> None:
    calls: dict[int, int] = {}

    async def handle(message: parti.Message) -> None:
        calls[message.seq] = calls.get(message.seq, 0) + 1
        if message.data == b"poison" or (message.data == b"twice" and message.attempt == 1):
            raise RuntimeError("no")

    async with kit.app(handle, ["a", "b", "c"], ordered=ordered, backoff_s=(0.1,), **FULL).running():
        (poison,) = (await kit.publish(["a"], 1, b"poison"))["a"]
        (twice,) = (await kit.publish(["b"], 1, b"twice"))["b"]
        (good,) = (await kit.publish(["c"], 1, b"good"))["c"]
        await eventually(kit.all_acked)
    book = await read_book(kit)
    assert book.seqs == [poison, twice, good]
    found = {seq: book.of(seq).row for seq in book.seqs}
    assert (found[poison].outcome, found[poison].attempt) == ("dead_lettered", 3)
    assert (found[twice].outcome, found[twice].attempt) == ("handled", 2)
    assert (found[good].outcome, found[good].attempt) == ("handled", 1)
    # From the first start to the end, waits between the attempts included.
    assert found[poison].finished_us - found[poison].started_us >= 150_000
    assert found[twice].finished_us - found[twice].started_us >= 75_000
    assert calls == {poison: 3, twice: 2, good: 1}


async def test_a_stream_made_anew_begins_new_rows(kit: Kit, record: Record) -> None:
    async with kit.app(record.handle, ["a"], pull_heartbeat_s=0.2, **FULL).running():
        await kit.publish(["a"], 5)
        await record.reaches(5)
        await eventually(kit.all_acked)
        old = (await kit.api.stream_info(kit.stream)).created
        await kit.delete_stream()
        await kit.create_stream()
        await kit.publish(["a"], 3)
        await record.reaches(8)
    new = (await kit.api.stream_info(kit.stream)).created
    book = await read_book(kit)
    book.chains_are_whole()
    rows = {(batch.stream_created, row.seq) for batch in book.batches for row in batch.rows()}
    assert rows == {(old, seq) for seq in range(1, 6)} | {(new, seq) for seq in range(1, 4)}


# ── processes that die ──────────────────────────────────────────────────────────────────────────────────────────────


LAZY = """
from parti.worker import ledger, recording
ledger._EVERY_S = 60.0
ledger._MOST_ROWS = 1_000_000
"""
TOO_SOON = {
    "positions": """
async def durable(self, timeout_s=0):
    return True
ledger.Ledger.durable = durable
""",
    "acks": """
before = recording.RecordingLanes.__init__
def init(self, *, ledger, **options):
    before(self, ledger=ledger, **options)
    self._hold = self._ack = ledger.acks.direct.ack
recording.RecordingLanes.__init__ = init
""",
}
"""Workers that say that messages are finished whose rows have not been stored."""


def process(kit: Kit, directory: Path) -> WorkerProcess:
    return WorkerProcess(directory, "orders:app", kit.url, "--solo")


@pytest.mark.parametrize("what", TOO_SOON)
async def test_a_worker_that_is_too_soon_is_found_out(kit: Kit, tmp_path: Path, what: str) -> None:
    """What the next tests look for can be found."""
    interval_s = 0.05 if what == "positions" else 60.0
    write_app(tmp_path, kit, MANY, max_ack_pending=100_000, progress_interval_s=interval_s, **FULL)
    app = tmp_path / "orders.py"
    app.write_text(LAZY + TOO_SOON[what] + app.read_text())
    sent = await kit.publish(MANY, 10)
    with process(kit, tmp_path) as worker:
        await eventually(lambda: len(worker.handled) == 400, START_S)

        async def all_below() -> bool:
            below, _ = await rows_below_the_position(kit, sent)
            return len(below) == 400

        await eventually(all_below)
        worker.kill()
    _, missing = await rows_below_the_position(kit, sent)
    assert len(missing) == 400


async def killed_at_random(kit: Kit, directory: Path, kills: int, *, each: int, **settings: Any) -> Book:
    """Kill a worker again and again under load, look at what is left, and let the last one finish."""
    write_app(directory, kit, MANY, **{**FULL, **settings})
    chance = random.Random(kit.stream)
    sent = await kit.publish(MANY, each)
    for number in range(kills):
        with process(kit, directory) as worker:
            before = len(worker.handled)
            # The one before may have got everything done.
            sent = merge(sent, await kit.publish(MANY, 1))
            await eventually(lambda: len(worker.handled) > before, START_S)  # noqa: B023
            publishing = asyncio.create_task(kit.publish(MANY, each))
            await asyncio.sleep(chance.uniform(0.0, 0.15))
            worker.kill()
            handled = len(worker.handled)
        below, missing = await rows_below_the_position(kit, sent)
        print(f"kill {number}: {handled} handled, {len(below)} below the position, {len(missing)} without a row")
        assert not missing
        sent = merge(sent, await publishing)
    with process(kit, directory) as worker:
        # Something that only the last one can have handled: before that it might not listen to signals yet.
        sent = merge(sent, await kit.publish(MANY, 1))
        everything = {seq for seqs in sent.values() for seq in seqs}
        await eventually(lambda: everything <= {seq for _, seq in worker.handled}, START_S)
        await eventually(kit.all_acked)
        assert worker.terminate() == 0
    book = await read_book(kit)
    book.chains_are_whole()
    assert set(book.seqs) == everything
    assert len(book.chains) == kills + 1
    assert sum(book.closed(chain) for chain in book.chains) == 1
    assert set(book.seqs) == {seq for _, seq in worker.handled}
    print(f"{book.only_crashes_repeat()} of {len(sent) * len(sent[MANY[0]])} recorded twice")
    return book


@pytest.mark.timeout(120)
async def test_no_row_is_missing_after_a_kill(kit: Kit, tmp_path: Path) -> None:
    await killed_at_random(kit, tmp_path, 2, each=40)


@pytest.mark.timeout(120)
async def test_no_row_is_missing_after_a_kill_on_a_work_queue(kit: Kit, tmp_path: Path) -> None:
    """Where an acknowledgement deletes, a message without a row would never come back."""
    await with_retention(kit, "workqueue")
    await killed_at_random(kit, tmp_path, 1, each=40)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("retention", RETENTIONS)
async def test_no_row_is_missing_after_many_kills(kit: Kit, tmp_path: Path, retention: str, ordered: bool) -> None:
    await with_retention(kit, retention)
    await killed_at_random(kit, tmp_path, 10, each=40, ordered=ordered)


# ── moves ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_planned_moves_leave_rows_of_both_owners_and_no_gap(kit: Kit) -> None:
    async with Fleet(kit, Journal()) as fleet, Traffic(kit) as traffic:
        first = await fleet.join(**FULL)
        await fleet.settles()
        second = await fleet.join(**FULL)
        await fleet.settles()
        await eventually(lambda: second.finished > 50)
        assert await fleet.leave(first)
        await fleet.settles()
        await traffic.stop()
        await eventually(lambda: fleet.journal.has(traffic.sent))
        assert await fleet.leave(second)
    fleet.journal.is_clean(traffic.sent)
    book = await read_book(kit)
    book.is_exactly(traffic.sent)
    book.chains_are_whole()
    book.order_holds()
    assert len(book.chains) == 2
    assert all(map(book.closed, book.chains))
    assert len({entry.worker for entry in book.entries}) == 2
    noted = {call.seq: (call.worker, call.fence) for call in fleet.journal.starts}
    assert {entry.row.seq: (entry.worker, entry.row.fence) for entry in book.entries} == noted
    moved = {p for p in PARTITIONS if len({e.worker for e in book.entries if e.row.partition == p}) == 2}
    assert moved


# ── a ledger that takes nothing ─────────────────────────────────────────────────────────────────────────────────────


async def stands_still(kit: Kit, worker: Any, record: Record) -> None:
    """Nothing more is started, acknowledged or stored, however long one waits."""
    await eventually(lambda: "ledger" in worker.health.reasons)
    calls, floor = len(record.calls), (await kit.consumer_info()).ack_floor
    progress = await kit.progress()
    await kit.publish(MANY, 2)
    await asyncio.sleep(0.5)  # long enough for several positions to be stored, were they
    assert len(record.calls) == calls
    assert (await kit.consumer_info()).ack_floor == floor
    assert await kit.progress() == progress


async def test_a_ledger_that_is_deleted_holds_the_worker_up_until_it_is_back(kit: Kit, record: Record) -> None:
    async with kit.app(record.handle, MANY, **FULL).running() as worker:
        await kit.publish(MANY, 10)
        await record.reaches(10 * len(MANY))
        await eventually(kit.all_acked)
        config = await kit.api.stream_config(ledger_stream(kit.stream))
        await kit.delete_stream(ledger_stream(kit.stream))
        await kit.publish(MANY, 10)
        await stands_still(kit, worker, record)
        assert "takes no rows" in worker.health.reasons["ledger"]
        failures = worker.metrics.ledger_failures.value
        assert failures
        await kit.api.call(f"STREAM.CREATE.{ledger_stream(kit.stream)}", config)
        await record.reaches(880)
        await eventually(kit.all_acked)
        assert "ledger" not in worker.health.reasons
    book = await read_book(kit)
    assert book.seqs == list(range(401, 881))
    assert [call.seq for call in record.calls if call.partition == "p0"] == list(range(1, 881, 40))


async def test_a_ledger_that_is_full_holds_the_worker_up_until_there_is_room(kit: Kit, record: Record) -> None:
    name = ledger_stream(kit.stream)
    config = {"name": name, "subjects": [f"w{kit.root}.ledger.{kit.stream}.*"], "max_msgs": 3, "discard": "new"}
    await kit.api.call(f"STREAM.CREATE.{name}", config)
    async with kit.app(record.handle, MANY, **FULL).running() as worker:
        sent = await kit.publish(MANY, 20)
        await stands_still(kit, worker, record)
        assert "maximum messages" in worker.health.reasons["ledger"]
        below, missing = await rows_below_the_position(kit, sent)
        assert not missing
        assert len(below) < 800
        await kit.api.call(f"STREAM.UPDATE.{name}", {**config, "max_msgs": -1})
        await record.reaches(880)
        await eventually(kit.all_acked)
    book = await read_book(kit)
    assert book.seqs == list(range(1, 881))
    book.chains_are_whole()
    assert [call.seq for call in record.calls if call.partition == "p0"] == list(range(1, 881, 40))


async def test_a_worker_that_stops_while_the_ledger_is_away_leaves_its_messages_to_the_next(
    kit: Kit, record: Record
) -> None:
    async with kit.app(record.handle, ["a"], drain_timeout_s=0.3, **FULL).running() as worker:
        await kit.publish(["a"], 5)
        await record.reaches(5)
        await eventually(kit.all_acked)
        config = await kit.api.stream_config(ledger_stream(kit.stream))
        await kit.delete_stream(ledger_stream(kit.stream))
        await kit.publish(["a"], 1)
        await record.reaches(6)
        assert not await worker.stop()
    await kit.api.call(f"STREAM.CREATE.{ledger_stream(kit.stream)}", config)
    async with kit.app(record.handle, ["a"], **FULL).running():
        await eventually(kit.all_acked)
    book = await read_book(kit)
    assert book.seqs == [6]
    assert record.of("a") == [1, 2, 3, 4, 5, 6, 6]


# ── a stream that cannot be one ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"subjects": ["elsewhere.>"]}, "does not take"),
        ({"subjects": ["{prefix}.ledger.>"], "retention": "workqueue"}, "workqueue retention"),
    ],
)
async def test_a_stream_that_cannot_be_a_ledger_is_refused(
    kit: Kit, record: Record, config: dict[str, Any], text: str
) -> None:
    name = ledger_stream(kit.stream)
    config["subjects"] = [s.format(prefix=f"w{kit.root}") for s in config["subjects"]]
    await kit.api.call(f"STREAM.CREATE.{name}", {"name": name, **config})
    with pytest.raises(ConfigError, match=text):
        await kit.app(record.handle, ["a"], **FULL).worker().start()


async def test_a_stream_is_not_its_own_ledger_and_a_taken_subject_is_said(kit: Kit, record: Record) -> None:
    with pytest.raises(ConfigError, match="is the stream whose messages are handled"):
        await kit.app(record.handle, ["a"], ledger_stream=kit.stream, **FULL).worker().start()
    await kit.delete_stream()
    await kit.create_stream(subjects=[f"{kit.root}.>", f"w{kit.root}.>"])
    with pytest.raises(ConfigError, match=r"another stream takes .*choose another prefix"):
        await kit.app(record.handle, ["a"], **FULL).worker().start()
