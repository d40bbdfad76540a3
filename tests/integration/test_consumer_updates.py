"""Which subjects a worker's consumer carries, and that no change of them ever costs a message.

The first test shows with plain API calls why it takes more than an edit of the filter.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import structlog
from nats.aio.msg import Msg
from tests.integration.conftest import Kit, Record, eventually, merge

import parti
from parti.app.worker import Worker
from parti.errors import ApiError, ConfigError, OverlappingSubjects, SubjectMismatch, TooManySubjects

RIVAL = "rival"
PARTITIONS = [f"p{n}" for n in range(20)]


@dataclass
class Audit:
    """The API requests about one consumer, as the server reports them: verb, body and when they were seen."""

    requests: list[tuple[str, dict[str, Any], float]] = field(default_factory=list)

    def filters(self) -> list[set[str]]:
        """The filter of each create or update, in order."""
        return [set(body["config"]["filter_subjects"]) for verb, body, _ in self.requests if verb == "CREATE"]

    def times(self, verb: str) -> list[float]:
        return [at_s for seen, _, at_s in self.requests if seen == verb]


@contextlib.asynccontextmanager
async def audited(kit: Kit) -> AsyncIterator[Audit]:
    audit = Audit()

    async def note(msg: Msg) -> None:
        event = json.loads(msg.data)
        tokens = event["subject"].split(".")
        if tokens[2:3] == ["CONSUMER"] and tokens[-1] == kit.consumer:
            body = json.loads(event.get("request") or "{}")
            audit.requests.append((tokens[3], body, time.monotonic()))

    subscription = await kit.connection.client.subscribe("$JS.EVENT.ADVISORY.API", cb=note)
    await kit.connection.flush()
    yield audit
    await subscription.unsubscribe()


async def settled(kit: Kit) -> None:
    """Every advisory that the server has sent so far has arrived."""
    await kit.connection.flush()


async def add_rival(kit: Kit, partition: str) -> None:
    config = {
        "name": RIVAL,
        "durable_name": RIVAL,
        "ack_policy": "explicit",
        "filter_subject": kit.subject(partition),
    }
    await kit.api.put_consumer(kit.stream, config, action="create")


async def pull(kit: Kit, consumer: str, count: int) -> list[int]:
    """Fetch and acknowledge with plain requests; returns the sequences."""
    client = kit.connection.client
    inbox = client.new_inbox()
    arrived = await client.subscribe(inbox)
    body = json.dumps({"batch": count, "no_wait": True}).encode()
    await client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{kit.stream}.{consumer}", body, reply=inbox)
    seqs: list[int] = []
    while True:
        msg = await arrived.next_msg(timeout=5)
        if not msg.reply:
            break
        seqs.append(msg.metadata.sequence.stream)
        await client.publish(msg.reply, b"+ACK")
        if len(seqs) == count:
            break
    await arrived.unsubscribe()
    return seqs


# ── what an edit of the filter does by itself ─────────────────────────────────────────────────────────────────


async def test_a_plain_edit_of_the_filter_never_delivers_the_backlog_of_an_added_subject(kit: Kit) -> None:
    await kit.publish(["old"], 5)
    await kit.publish(["a"], 5)
    config = {
        "name": RIVAL,
        "durable_name": RIVAL,
        "ack_policy": "explicit",
        "deliver_policy": "all",
        "filter_subjects": [kit.subject("a")],
    }
    await kit.api.put_consumer(kit.stream, config, action="create")
    assert await pull(kit, RIVAL, 5) == [6, 7, 8, 9, 10]
    config["filter_subjects"] = [kit.subject("a"), kit.subject("old")]
    await kit.api.put_consumer(kit.stream, config, action="update")
    assert await pull(kit, RIVAL, 5) == []


async def test_an_added_partition_gets_its_whole_backlog_in_order(kit: Kit, record: Record) -> None:
    sent = await kit.publish(["old"], 700)
    sent = merge(sent, await kit.publish(["a"], 50))
    async with kit.app(record.handle, ["a"]).running() as worker:
        await record.reaches(50)
        await worker.update_worker_consumer("one", ["a", "old"])
        sent = merge(sent, await kit.publish(["a", "old"], 50))
        await record.reaches(850)
        await eventually(kit.all_acked)
    record.is_exactly(sent)


async def test_leaving_in_the_middle_of_a_gained_backlog_loses_nothing(kit: Kit, record: Record) -> None:
    sent = await kit.publish(["old"], 1500)
    sent = merge(sent, await kit.publish(["a"], 50))
    async with kit.app(record.handle, ["a"]).running() as worker:
        await record.reaches(50)
        await worker.update_worker_consumer("one", ["a", "old"])
    async with kit.app(record.handle, ["a", "old"]).running():
        await record.reaches(1550, timeout_s=8)
    record.is_exactly(sent)


async def test_a_broken_session_in_the_middle_of_a_gained_backlog_loses_nothing(kit: Kit, record: Record) -> None:
    sent = await kit.publish(["old"], 1500)
    sent = merge(sent, await kit.publish(["a"], 50))
    async with kit.app(record.handle, ["a"]).running() as worker:
        await record.reaches(50)
        await worker.update_worker_consumer("one", ["a", "old"])
        await kit.api.delete_consumer(kit.stream, kit.consumer)
        await record.reaches(1550, timeout_s=8)
    record.is_exactly(sent)


# ── what is accepted, and what is not ─────────────────────────────────────────────────────────────────────────


async def test_name_and_durable_name_are_prefix_and_worker_id(kit: Kit, record: Record) -> None:
    async with kit.app(record.handle, ["a"], prefix="fleet", worker_id="w-7").running():
        info = await kit.api.consumer_info(kit.stream, "fleet-w-7")
    assert (info.config["name"], info.config["durable_name"]) == ("fleet-w-7", "fleet-w-7")


async def test_an_unchanged_set_asks_the_server_nothing_and_is_counted(kit: Kit, record: Record) -> None:
    async with kit.app(record.handle, ["a", "b"]).running() as worker, audited(kit) as audit:
        await worker.update_worker_consumer("one", ["b", "a"])
        await worker.update_worker_consumer("one", [{"p": "a"}, ["b"]])
        await settled(kit)
        assert audit.requests == []
        assert worker.metrics.update_skipped.value == 2


async def test_partitions_named_twice_are_counted_and_carried_once(kit: Kit, record: Record) -> None:
    async with kit.app(record.handle, ["a"]).running() as worker:
        await worker.update_worker_consumer("one", ["a", "b", "b", "a", "b"])
        assert worker.metrics.duplicate_subjects.value == 3
        assert worker.metrics.subject_count.value == 2
        assert await kit.filter() == {kit.subject("a"), kit.subject("b")}


@pytest.mark.parametrize(
    ("partitions", "error", "names"),
    [
        ([f"p{n}" for n in range(501)], TooManySubjects, ("501", "500")),
        (["*", "p3"], OverlappingSubjects, (".*'", ".p3'")),
        (["p1.p2"], SubjectMismatch, ("p1.p2",)),
    ],
    ids=["501 subjects", "overlap", "misfit"],
)
async def test_a_bad_set_is_refused_by_name_and_changes_nothing(
    kit: Kit, record: Record, partitions: list[str], error: type[ConfigError], names: tuple[str, ...]
) -> None:
    async with kit.app(record.handle, ["a"]).running() as worker, audited(kit) as audit:
        before = await kit.consumer_info()
        await settled(kit)
        audit.requests.clear()
        with pytest.raises(error) as refusal:
            await worker.update_worker_consumer("one", partitions)
        assert all(name in str(refusal.value) for name in names)
        await settled(kit)
        assert audit.requests == []
        assert (await kit.consumer_info()).config == before.config
        sent = await kit.publish(["a"], 5)
        await record.reaches(5)
    record.is_exactly(sent)


async def test_an_update_for_another_worker_is_refused(kit: Kit, record: Record) -> None:
    async with kit.app(record.handle, ["a"]).running() as worker:
        with pytest.raises(ConfigError, match="'two'"):
            await worker.update_worker_consumer("two", ["b"])
        assert await kit.filter() == {kit.subject("a")}


async def test_no_partitions_means_no_messages_and_they_can_come_back(kit: Kit, record: Record) -> None:
    async with kit.app(record.handle, ["a", "b"]).running() as worker:
        sent = await kit.publish(["a", "b"], 10)
        await record.reaches(20)
        await worker.update_worker_consumer("one", [])
        filters = await kit.filter()
        assert filters
        assert not filters & {kit.subject("a"), kit.subject("b"), f"{kit.root}.>", f"{kit.root}.*"}
        missed = await kit.publish(["a", "b"], 10)
        # A consumer that takes nothing has nothing pending, however much is published.
        assert (await kit.consumer_info()).pending == 0
        assert len(record.calls) == 20
        assert worker.metrics.messages.value == 20
        assert worker.metrics.pull_healthy.probe
        assert worker.metrics.pull_healthy.probe() == 1, "pulling nothing on purpose is healthy"
        await worker.update_worker_consumer("one", ["a", "b"])
        await record.reaches(40)
    record.is_exactly(merge(sent, missed))


async def test_a_worker_may_start_without_partitions(kit: Kit, record: Record) -> None:
    sent = await kit.publish(["a"], 10)
    async with kit.app(record.handle, []).running() as worker:
        assert await kit.filter()
        assert (await kit.consumer_info()).pending == 0
        await worker.update_worker_consumer("one", ["a"])
        await record.reaches(10)
    record.is_exactly(sent)


# ── taking away and giving back ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "unordered"])
async def test_a_removed_partition_stops_and_goes_on_where_it_was_when_it_comes_back(
    kit: Kit, record: Record, ordered: bool
) -> None:
    async with kit.app(record.handle, ["a", "b"], ordered=ordered).running() as worker:
        sent = await kit.publish(["a", "b"], 20)
        await eventually(lambda: worker.finished == 40)
        await worker.update_worker_consumer("one", ["a"])
        assert await kit.filter() == {kit.subject("a")}
        sent = merge(sent, await kit.publish(["a", "b"], 20))
        await eventually(lambda: worker.finished == 60)
        assert len(record.of("b")) == 20
        await worker.update_worker_consumer("one", ["a", "b"])
        await eventually(lambda: worker.finished >= 80)
        await eventually(kit.all_acked)
    record.is_exactly(sent)


async def test_a_removed_partition_keeps_its_position_over_a_restart(kit: Kit, record: Record) -> None:
    sent = await kit.publish(["a", "b"], 20)
    async with kit.app(record.handle, ["a", "b"]).running() as worker:
        await record.reaches(40)
        await worker.update_worker_consumer("one", ["a"])
    for _ in range(2):
        async with kit.app(record.handle, ["a"]).running():
            sent = merge(sent, await kit.publish(["a", "b"]))
            await eventually(kit.all_acked)
    async with kit.app(record.handle, ["a", "b"]).running():
        await record.reaches(44)
        await eventually(kit.all_acked)
    record.is_exactly(sent)


async def test_a_partition_that_comes_back_while_its_handler_still_runs_is_not_handled_twice(
    kit: Kit, record: Record
) -> None:
    running: list[int] = []
    gate = asyncio.Event()

    async def handle(message: parti.Message) -> None:
        record.note(message)
        if message.partition.id == "b":
            assert not running, "two handlers of one partition at the same time"
            running.append(message.seq)
            await gate.wait()
            running.clear()

    sent = await kit.publish(["a", "b"], 5)
    async with kit.app(handle, ["a", "b"], attempts=1).running() as worker:
        await eventually(lambda: worker.finished == 5 and bool(running))
        await worker.update_worker_consumer("one", ["a"])
        await worker.update_worker_consumer("one", ["a", "b"])
        sent = merge(sent, await kit.publish(["a"]))
        await eventually(lambda: len(record.of("a")) == 6)
        assert len(record.of("b")) == 1
        gate.set()
        await eventually(lambda: len(record.of("b")) >= 5)
        await eventually(kit.all_acked)
        assert worker.metrics.dead_letters.value == 0
    record.is_exactly(sent)


# ── many updates ──────────────────────────────────────────────────────────────────────────────────────────────


async def test_rapid_updates_are_merged_and_the_newest_wins(kit: Kit, record: Record) -> None:
    app = kit.app(record.handle, ["p0"], update_min_interval_s=0.3)
    async with app.running() as worker, audited(kit) as audit:
        sets = [PARTITIONS[: n + 1] for n in range(20)]
        await asyncio.gather(*(worker.update_worker_consumer("one", each) for each in sets))
        await worker.update_worker_consumer("one", ["p3", "p4"])
        await settled(kit)
        assert await kit.filter() == {kit.subject("p3"), kit.subject("p4")}
        filters = audit.filters()
        assert filters[-1] == {kit.subject("p3"), kit.subject("p4")}
        assert {kit.subject(p) for p in PARTITIONS} in filters
        assert len(filters) <= 3
        times = audit.times("CREATE")
        assert all(later - earlier >= 0.25 for earlier, later in itertools.pairwise(times))
        sent = await kit.publish(["p3", "p4"], 5)
        await record.reaches(10)
    record.is_exactly(sent)


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_updates_under_load_lose_nothing_and_keep_the_order(kit: Kit, record: Record, kind: str) -> None:
    async def handle(message: parti.Message) -> None:
        record.note(message)
        if not message.seq % 7:
            await asyncio.sleep(0.001)

    app = kit.app(handle if kind == "async" else record.note, PARTITIONS, handler_threads=4)
    async with app.running() as worker:
        publishing = asyncio.create_task(kit.publish(PARTITIONS, 150))
        for turn in range(15):
            await worker.update_worker_consumer("one", [p for p in PARTITIONS if hash(p) % 15 != turn])
            await asyncio.sleep(0.02)
        await worker.update_worker_consumer("one", PARTITIONS)
        sent = await publishing
        await record.reaches(3000)
        await eventually(kit.all_acked)
    record.is_exactly(sent)


async def test_unordered_updates_under_load_and_a_restart_lose_nothing(kit: Kit, record: Record) -> None:
    app = kit.app(record.handle, PARTITIONS, ordered=False, ack_wait_s=2)
    async with app.running() as worker:
        publishing = asyncio.create_task(kit.publish(PARTITIONS, 100))
        for turn in range(10):
            await worker.update_worker_consumer("one", PARTITIONS[turn % 2 :])
            await asyncio.sleep(0.01)
        sent = await publishing
    async with app.running():
        await eventually(lambda: len({c.seq for c in record.calls}) == 2000, timeout_s=10)
    assert {p: sorted(set(seqs)) for p, seqs in record.by_partition.items()} == sent


# ── when the server says no ───────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def contested(kit: Kit) -> Kit:
    """A work-queue stream where another consumer has the partition "taken": error 10100 for everybody else."""
    await kit.delete_stream()
    await kit.create_stream(retention="workqueue")
    await add_rival(kit, "taken")
    return kit


async def test_failing_updates_keep_the_last_good_set_and_raise_a_signal(contested: Kit, record: Record) -> None:
    kit = contested
    app = kit.app(record.handle, ["a"], update_attempts=2, update_failure_threshold=2)
    async with app.running() as worker:
        for failures in (1, 2):
            with pytest.raises(ApiError) as refusal:
                await worker.update_worker_consumer("one", ["a", "taken"])
            assert refusal.value.code == 10100
            assert worker.metrics.update_failures.value == failures
            assert ("consumer-update" in worker.health.reasons) == (failures == 2)
        assert await kit.filter() == {kit.subject("a")}
        assert worker.metrics.subject_count.value == 1
        sent = await kit.publish(["a", "taken"], 10)
        await record.reaches(10)
        record.is_exactly({"a": sent["a"]})
        await kit.api.delete_consumer(kit.stream, RIVAL)
        await worker.update_worker_consumer("one", ["a", "taken"])
        assert worker.health.healthy
        await record.reaches(20)
    record.is_exactly(sent)


async def test_a_failed_removal_loses_nothing_of_the_partition_that_stays(contested: Kit, record: Record) -> None:
    kit = contested
    gate = asyncio.Event()

    async def handle(message: parti.Message) -> None:
        record.note(message)
        if message.partition.id == "b":
            await gate.wait()

    sent = await kit.publish(["a", "b"], 20)
    app = kit.app(handle, ["a", "b"], update_attempts=1)
    async with app.running() as worker:
        await eventually(lambda: worker.finished == 20 and len(record.of("b")) == 1)
        with pytest.raises(ApiError):
            await worker.update_worker_consumer("one", ["a", "taken"])
        gate.set()
        await eventually(lambda: len(record.of("b")) >= 20)
        await eventually(kit.all_acked)
    record.is_exactly(sent)


async def test_a_newer_set_is_tried_although_an_older_one_has_just_failed(contested: Kit, record: Record) -> None:
    kit = contested
    app = kit.app(record.handle, ["a"], update_attempts=1)
    async with app.running() as worker:
        with structlog.testing.capture_logs() as logs:
            older = asyncio.create_task(worker.update_worker_consumer("one", ["a", "taken"]))
            await eventually(lambda: any(entry["event"] == "consumer update failed" for entry in logs))
        await worker.update_worker_consumer("one", ["a", "b"])
        with pytest.raises(ApiError):
            await older
        assert await kit.filter() == {kit.subject("a"), kit.subject("b")}


async def test_a_consumer_deleted_under_the_worker_is_made_again_at_the_position(kit: Kit, record: Record) -> None:
    async with kit.app(record.handle, PARTITIONS).running() as worker:
        sent = await kit.publish(PARTITIONS, 10)
        await eventually(lambda: worker.finished == 200)
        await kit.api.delete_consumer(kit.stream, kit.consumer)
        sent = merge(sent, await kit.publish(PARTITIONS, 10))
        await record.reaches(400)
        await eventually(kit.all_acked)
        assert worker.metrics.recreated.value == 1
        assert worker.metrics.skipped.value == 0
        assert await kit.filter() == {kit.subject(p) for p in PARTITIONS}
    record.is_exactly(sent)


async def test_a_consumer_deleted_while_the_worker_is_away_is_made_again_at_the_position(
    kit: Kit, record: Record
) -> None:
    sent = await kit.publish(PARTITIONS, 10)
    async with kit.app(record.handle, PARTITIONS).running():
        await record.reaches(200)
    await kit.api.delete_consumer(kit.stream, kit.consumer)
    sent = merge(sent, await kit.publish(PARTITIONS, 10))
    async with kit.app(record.handle, PARTITIONS).running():
        await record.reaches(400)
        await eventually(kit.all_acked)
    record.is_exactly(sent)


async def narrow(kit: Kit, *partitions: str) -> None:
    """Change the filter behind the worker's back."""
    info = await kit.consumer_info()
    config = {k: v for k, v in info.config.items() if k not in {"filter_subject", "filter_subjects"}}
    config["filter_subjects"] = [kit.subject(p) for p in partitions]
    await kit.api.put_consumer(kit.stream, config, action="update")


async def test_a_filter_changed_behind_its_back_is_put_right_at_the_next_session(kit: Kit, record: Record) -> None:
    async with kit.app(record.handle, ["a", "b"]).running() as worker:
        sent = await kit.publish(["a", "b"], 5)
        await eventually(lambda: worker.finished == 10)
        await narrow(kit, "a")
        sent = merge(sent, await kit.publish(["b", "a"], 5))
        await eventually(lambda: len(record.of("a")) == 10)
        await kit.api.reset_consumer(kit.stream, kit.consumer, 1)  # breaks the chain of deliveries
        await eventually(lambda: len(record.of("b")) == 10, timeout_s=5)
        assert await kit.filter() == {kit.subject("a"), kit.subject("b")}
    record.is_exactly(sent)


async def test_a_filter_changed_while_the_worker_is_away_is_put_right_at_its_start(kit: Kit, record: Record) -> None:
    sent = await kit.publish(["a", "b"], 5)
    app = kit.app(record.handle, ["a", "b"])
    async with app.running():
        await record.reaches(10)
    await narrow(kit, "a")
    sent = merge(sent, await kit.publish(["b", "a"], 5))
    async with app.running():
        await record.reaches(20)
        assert await kit.filter() == {kit.subject("a"), kit.subject("b")}
    record.is_exactly(sent)


# ── other kinds of streams ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("storage", ["memory", "file"])
@pytest.mark.parametrize("retention", ["workqueue", "interest"])
async def test_streams_that_delete_what_is_acknowledged_are_worked_off_once(
    kit: Kit, record: Record, retention: str, storage: str
) -> None:
    await kit.delete_stream()
    await kit.create_stream(retention=retention, storage=storage)
    app = kit.app(record.handle, PARTITIONS)
    async with app.running():
        sent = await kit.publish(PARTITIONS, 10)
        await record.reaches(100)
    sent = merge(sent, await kit.publish(PARTITIONS, 10))
    async with app.running():
        await record.reaches(400)
        await eventually(lambda: _empty(kit))
    record.is_exactly(sent)


async def _empty(kit: Kit) -> bool:
    return (await kit.api.stream_info(kit.stream)).messages == 0


async def test_a_backlog_on_a_work_queue_is_gained_whole(kit: Kit, record: Record) -> None:
    await kit.delete_stream()
    await kit.create_stream(retention="workqueue")
    sent = await kit.publish(["old", "a"], 200)
    async with kit.app(record.handle, ["a"]).running() as worker:
        await record.reaches(200)
        await _gain(worker, ["a", "old"])
        await record.reaches(400)
        await eventually(lambda: _empty(kit))
    record.is_exactly(sent)


async def _gain(worker: Worker, partitions: list[str]) -> None:
    await worker.update_worker_consumer("one", partitions)


@pytest.mark.parametrize("partitions", [["a"], ["a", "b"]], ids=["one subject", "two subjects"])
async def test_a_new_session_of_an_unchanged_consumer_edits_nothing(
    kit: Kit, record: Record, partitions: list[str]
) -> None:
    app = kit.app(record.handle, partitions)
    async with app.running() as worker, audited(kit) as audit:
        sent = await kit.publish(["a"], 3)
        await eventually(lambda: worker.finished == 3)
        await kit.api.reset_consumer(kit.stream, kit.consumer, 1)
        await eventually(lambda: worker.metrics.resets.child("session").value >= 1)
        sent = merge(sent, await kit.publish(["a"], 3))
        await record.reaches(6)
    async with app.running(), audited(kit) as again:
        sent = merge(sent, await kit.publish(["a"], 3))
        await record.reaches(9)
    assert audit.filters() + again.filters() == []
    record.is_exactly(sent)


async def test_two_workers_with_one_id_are_reported(kit: Kit, record: Record) -> None:
    app = kit.app(record.handle, ["a"])
    async with app.running() as one, app.running() as other:

        async def noticed() -> bool:
            await kit.publish(["a"])
            return any("worker_id" in reason for w in (one, other) for reason in w.health.reasons.values())

        await eventually(noticed)
