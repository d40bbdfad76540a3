"""Replays whose tasks run in the test's process: the protocol between driver and tasks, and what handlers may do.

No Spark here: it would add a minute and nothing to what is checked. `test_replay.py` runs the same on Spark.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import threading
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.integration.conftest import Kit, eventually, kit, merge
from tests.integration.fleet import PARTITIONS, Journal, claims_of, owners
from tests.spark.replays import NAME, LocalRounds, app_of, noting, replay_of, replayed, workers

import parti
from parti.errors import ConfigError, ReplayFailed
from parti.model.ledger import decode_batch, ledger_stream
from parti.spark.replay_task import Work

__all__ = ["kit"]
CHOSEN, OTHERS = PARTITIONS[:5], PARTITIONS[5:]


async def test_a_backlog_is_handled_beside_live_workers_and_given_back(kit: Kit, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    sent = merge(await kit.publish(CHOSEN, each=200), await kit.publish(OTHERS, each=20))
    app = app_of(kit, noting(tmp_path / "journal", rejects=97))
    async with workers(app):
        before = owners(await claims_of(kit))
        outcome = await replayed(app, CHOSEN, LocalRounds(), messages_per_round=150)
        late = await kit.publish(PARTITIONS, each=3)
        await eventually(lambda: journal.has(merge(sent, late)), 30)
        assert owners(await claims_of(kit)) == before
    journal.is_clean(merge(sent, late))
    by_guest = [call for call in journal.starts if call.worker == NAME]
    assert outcome.complete
    assert outcome.given_back
    assert outcome.rounds >= 2
    assert outcome.handled + outcome.dead_lettered == len(by_guest) > 100
    assert {call.partition for call in by_guest} == set(CHOSEN)
    assert len(await kit.dead_letters()) == len({c.seq for c in journal.starts if c.seq % 97 == 0})


async def test_a_replay_that_is_stopped_leaves_the_rest_to_the_workers(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "journal")
    sent = await kit.publish(CHOSEN, each=30)
    note, stopped = noting(tmp_path / "journal", worker_s=0.0), threading.Event()

    async def handle(message: parti.Message) -> None:
        await note(message)
        if message.seq > sent["p0"][10] and message.worker_id == NAME:
            await asyncio.to_thread(stopped.wait)

    app = app_of(kit, handle)
    replay = replay_of(app, CHOSEN)
    answer, questions = replay._answer, 0

    async def answer_and_count(message: Any) -> None:
        nonlocal questions
        questions += 1
        await answer(message)

    monkeypatch.setattr(replay, "_answer", answer_and_count)
    running = asyncio.create_task(replay.run(LocalRounds))
    await eventually(lambda: len(journal.starts) > 50, 30)
    replay.stop()
    # Not before the task has heard of it: who asks again has taken in the answer to the question before.
    questions = 0
    await eventually(lambda: questions >= 2)
    stopped.set()
    outcome = await running
    assert not outcome.complete
    assert 50 < outcome.handled < 5 * 30
    async with workers(app, 1):
        await eventually(lambda: journal.has(sent), 30)
    journal.is_clean(sent)


async def test_failures_are_tried_again_and_given_up_as_in_a_worker(kit: Kit) -> None:
    sent = await kit.publish(["p0"], each=6)
    first, tries = sent["p0"][0], Counter[int]()

    def handle(message: parti.Message) -> None:
        tries[message.seq] += 1
        assert tries[message.seq] == message.attempt
        if message.seq == first:
            raise ValueError("never")
        if message.seq == first + 1:
            raise parti.Reject("at once")
        if message.seq == first + 2 and message.attempt == 1:
            raise parti.Retry(0.01)

    outcome = await replayed(app_of(kit, handle), ["p0"], LocalRounds())
    assert (outcome.handled, outcome.dead_lettered) == (4, 2)
    assert [tries[first + n] for n in range(6)] == [3, 1, 2, 1, 1, 1]
    letters = await kit.dead_letters()
    assert [letter["subject"] for letter in letters] == [f"d{kit.root}.{kit.stream}.{kit.subject('p0')}"] * 2


async def test_a_batch_handler_gets_each_partition_in_order_and_the_ledger_has_every_row(kit: Kit) -> None:
    sent = await kit.publish(CHOSEN, each=50)
    seen: dict[str, list[int]] = defaultdict(list)
    lock = threading.Lock()

    def handle(batch: pa.RecordBatch) -> None:
        with lock:
            partition = batch.schema.metadata[b"partition"].decode()
            assert int(batch.schema.metadata[b"fence"]) > 0
            seen[partition] += batch.column("seq").to_pylist()

    app = app_of(kit, noting(Path("unused")), ledger="full")
    outcome = await replayed(app, CHOSEN, LocalRounds(), batch_handler=handle, messages_per_round=60)
    assert dict(seen) == sent
    assert outcome.handled == 250
    rows = [row for batch in await ledger_of(kit) for row in batch.rows()]
    assert sorted(row.seq for row in rows) == sorted(seq for seqs in sent.values() for seq in seqs)
    assert {row.outcome for row in rows} == {"handled"}
    assert all(batch.worker == NAME for batch in await ledger_of(kit))


async def ledger_of(kit: Kit) -> list[Any]:
    name = ledger_stream(kit.stream)
    last = (await kit.api.stream_info(name)).last_seq
    asked = (kit.api.call(f"STREAM.MSG.GET.{name}", {"seq": seq}) for seq in range(1, last + 1))
    return [decode_batch(base64.b64decode(found["message"]["data"])) for found in await asyncio.gather(*asked)]


async def test_a_round_that_fails_keeps_what_others_have_finished(kit: Kit, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    sent = await kit.publish(PARTITIONS, each=20)
    app = app_of(kit, noting(tmp_path / "journal"))

    class Dying(LocalRounds):
        """Fails after its tasks have said how far they are, so that Spark tells nothing of them."""

        def run(self, work: Work, start: int) -> int:
            super().run(work, start)
            raise RuntimeError("the executor was lost\n  at some line\nConnectionResetError: peer is gone")

    with pytest.raises(ReplayFailed, match=r"round 1 failed: ConnectionResetError: peer is gone"):
        await replayed(app, CHOSEN, Dying())
    assert {call.worker for call in journal.starts} == {NAME}
    async with workers(app, 1):
        await eventually(lambda: journal.has(sent), 30)
    journal.is_clean(sent)


async def test_a_replay_goes_no_further_than_its_bound(kit: Kit, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    sent = await kit.publish(["p0", "p1"], each=10)
    bound = sent["p0"][5]
    app = app_of(kit, noting(tmp_path / "journal"))
    outcome = await replayed(app, ["p0", "p1"], LocalRounds(), until=bound)
    assert outcome.complete
    assert not outcome.given_back  # nobody else is there
    below = sorted(seq for seqs in sent.values() for seq in seqs if seq < bound)
    assert sorted(call.seq for call in journal.starts) == below
    async with workers(app, 1):
        await eventually(lambda: journal.has(sent))
    journal.is_clean(sent)


async def test_what_cannot_be_replayed_is_refused_before_anything_changes(kit: Kit) -> None:
    app = app_of(kit, noting(Path("unused")))
    with pytest.raises(ConfigError, match="there is no partition p77"):
        await replayed(app, ["p0", "p77"], LocalRounds())
    with pytest.raises(ConfigError, match="no partition was chosen"):
        await replayed(app, [], LocalRounds())
    assert not await claims_of(kit)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("next_one", ["the same command", pytest.param("a worker", marks=pytest.mark.slow)])
async def test_a_replay_that_is_killed_loses_nothing(kit: Kit, tmp_path: Path, next_one: str) -> None:
    journal = Journal(tmp_path / "journal")
    sent = await kit.publish(CHOSEN, each=120)
    app = app_of(kit, noting(tmp_path / "journal"))
    given = {
        "stream": kit.stream,
        "subject": kit.template,
        "settings": {k: v for k, v in app.overrides.items() if v is not None},
        "journal": str(tmp_path / "journal"),
        "partitions": CHOSEN,
    }
    command = [sys.executable, "-m", "tests.spark.replay_process", json.dumps(given)]
    killed = await asyncio.create_subprocess_exec(*command)
    await eventually(lambda: sum(call.worker == NAME for call in journal.starts) > 200, 60)
    killed.kill()
    await killed.wait()
    before = {call.fence for call in journal.starts}
    if next_one == "the same command":
        again = await asyncio.create_subprocess_exec(*command)
        assert await again.wait() == 0
        assert {call.worker for call in journal.starts} == {NAME}
        assert journal.has(sent)
    async with workers(app, 1):
        late = await kit.publish(CHOSEN, each=10)
        await eventually(lambda: journal.has(merge(sent, late)), 60)
    journal.nothing_is_lost(merge(sent, late))
    journal.order_holds()
    journal.fences_never_go_back()
    # What was in flight or finished since the last store, in each partition.
    assert len(journal.repeats) < 100
    assert {call.fence for call in journal.starts} > before
