"""Workers with several consumers each: more subjects than one consumer carries, and one shard in trouble."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.integration.conftest import Kit, Record, eventually, merge, only_suffixes_repeat
from tests.integration.fleet import PARTITIONS, Traffic, running
from tests.integration.handling import MANY
from tests.integration.processes import WorkerProcess, write_app
from tests.integration.test_fleet_processes import Processes
from tests.integration.test_hot_mirror import flowing

from parti.coordination.control_plane import ControlPlane
from parti.coordination.records import Records
from parti.coordination.roles import _remove_consumers
from parti.embedded import Server
from parti.errors import ConfigError, TooManySubjects
from parti.model.fleet import HealthRecord

SHARDED: dict[str, Any] = {"max_subjects": 3, "consumer_shards": 4}
"""Room for 12 partitions, three on each consumer."""
TENS: dict[str, Any] = {"max_subjects": 10, "consumer_shards": 4}


async def filters(kit: Kit, stream: str = "") -> dict[str, int]:
    """How many subjects each consumer carries."""
    names = await kit.api.consumer_names(stream or kit.stream)
    infos = [await kit.api.consumer_info(stream or kit.stream, name) for name in names]
    return {name: len(info.subjects) for name, info in zip(names, infos, strict=True) if "-hold-" not in name}


async def carries(kit: Kit, partitions: Iterable[str]) -> bool:
    """Whether each of these is in the filter of a consumer."""
    infos = [await kit.api.consumer_info(kit.stream, name) for name in await kit.api.consumer_names(kit.stream)]
    return {kit.subject(p) for p in partitions} <= {subject for info in infos for subject in info.subjects}


async def all_acked(kit: Kit) -> bool:
    """Whether no consumer has anything undelivered or unacknowledged."""
    infos = [await kit.api.consumer_info(kit.stream, name) for name in await kit.api.consumer_names(kit.stream)]
    return not any(info.ack_pending or info.pending for info in infos)


async def pause(kit: Kit, consumer: str, for_s: float) -> None:
    """Have the server deliver nothing from a consumer for a while (0: go on)."""
    until = (datetime.now(UTC) + timedelta(seconds=for_s)).isoformat()
    await kit.api.call(f"CONSUMER.PAUSE.{kit.stream}.{consumer}", {"pause_until": until} if for_s else {})


# ── many subjects ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_1200_subjects_on_one_worker(kit: Kit, record: Record) -> None:
    many = [f"p{n}" for n in range(1_200)]
    app = kit.app(record.handle, many, consumer_shards=3)
    sent = await kit.publish(many, 2)
    async with app.running() as worker:
        first = kit.consumer
        assert await filters(kit) == {first: 500, f"{first}-2": 500, f"{first}-3": 200}
        assert worker.metrics.subject_count.value == 1_200
        sent = merge(sent, await kit.publish(many, 2))
        await record.reaches(4 * 1_200)
        await eventually(lambda: all_acked(kit))
    sent = merge(sent, await kit.publish(many))
    async with app.running():
        await record.reaches(5 * 1_200)
        await eventually(lambda: all_acked(kit))
    record.is_exactly(sent)


async def test_one_more_than_all_shards_carry_is_refused_with_a_way_out(kit: Kit, record: Record) -> None:
    async with kit.app(record.handle, MANY[:12], **SHARDED).running() as worker:
        with pytest.raises(TooManySubjects, match=r"13 subjects .*at most 12 .*max_subjects=3 x consumer_shards=4"):
            await worker.update_worker_consumer("one", MANY[:13])
        await worker.update_worker_consumer("one", MANY[:12])


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "unordered"])
async def test_updates_under_load_lose_nothing_and_keep_the_order(kit: Kit, record: Record, ordered: bool) -> None:
    async with kit.app(record.handle, MANY, ordered=ordered, **TENS).running() as worker:
        publishing = asyncio.create_task(kit.publish(MANY, 60))
        for turn in range(12):
            await worker.update_worker_consumer("one", MANY[turn % 3 * 7 : 40 - turn % 4 * 5])
            await asyncio.sleep(0.02)
        await worker.update_worker_consumer("one", MANY)
        sent = await publishing
        await record.reaches(40 * 60)
        await eventually(lambda: all_acked(kit))
    if ordered:
        record.is_exactly(sent)
    else:
        assert {p: sorted(set(seqs)) for p, seqs in record.by_partition.items()} == sent


async def test_updates_where_finished_messages_are_deleted(kit: Kit, record: Record) -> None:
    await kit.delete_stream()
    await kit.create_stream(retention="workqueue")
    async with kit.app(record.handle, MANY, **TENS).running() as worker:
        publishing = asyncio.create_task(kit.publish(MANY, 40))
        for turn in range(8):
            await worker.update_worker_consumer("one", MANY[turn % 3 * 7 : 40 - turn % 4 * 5])
            await asyncio.sleep(0.02)
        await worker.update_worker_consumer("one", MANY)
        sent = await publishing
        await record.reaches(40 * 40)
        await eventually(lambda: all_acked(kit))
    record.is_exactly(sent)
    assert (await kit.api.stream_info(kit.stream)).messages == 0


@pytest.mark.parametrize("retention", ["workqueue", "interest"])
async def test_restarts_where_finished_messages_are_deleted(kit: Kit, record: Record, retention: str) -> None:
    await kit.delete_stream()
    await kit.create_stream(retention=retention)
    app = kit.app(record.handle, MANY, **TENS)
    async with app.running():
        sent = await kit.publish(MANY, 20)
    for _ in range(2):
        sent = merge(sent, await kit.publish(MANY, 5))
        async with app.running():
            sent = merge(sent, await kit.publish(MANY, 10))
    async with app.running():
        await record.reaches(40 * 50)
        await eventually(lambda: all_acked(kit))
    record.is_exactly(sent)


# ── one shard in trouble ──────────────────────────────────────────────────────────────────────────────────────────


async def test_a_shard_that_is_deleted_under_load_disturbs_no_other(kit: Kit, record: Record) -> None:
    async with kit.app(record.handle, MANY, **TENS).running() as worker:
        publishing = asyncio.create_task(kit.publish(MANY, 100))
        resets = worker.metrics.resets
        before = resets.total
        for gone, number in enumerate((2, 4, 2), start=1):
            await record.reaches(len(record.calls) + 100)
            await kit.api.delete_consumer(kit.stream, f"{kit.consumer}-{number}")
            await eventually(lambda n=gone: resets.total - before >= n)  # type: ignore[misc]
        sent = await publishing
        await record.reaches(40 * 100)
        await eventually(lambda: all_acked(kit))
        assert worker.metrics.recreated.value == 3
        assert resets.total - before == 3, "only the deleted ones have begun anew"
    record.is_exactly(sent)


async def test_a_shard_that_stalls_loses_nothing_when_the_process_is_killed(kit: Kit, tmp_path: Path) -> None:
    target = write_app(tmp_path, kit, MANY, **TENS)
    with WorkerProcess(tmp_path, target, kit.url) as worker:
        await eventually(lambda: has_consumers(kit, 4), 20)
        second = f"{kit.consumer}-2"
        await pause(kit, second, 60)
        stalled = {s.rpartition(".")[2] for s in (await kit.api.consumer_info(kit.stream, second)).subjects}
        sent = await kit.publish(MANY, 25)
        others = sum(len(seqs) for p, seqs in sent.items() if p not in stalled)
        await eventually(lambda: len(worker.handled) >= others, 20)
        assert len(stalled) == 10
        await eventually(lambda: stored_past(kit, max(max(seqs) for seqs in sent.values()) - 100))
        worker.kill()
    await pause(kit, second, 0)
    with WorkerProcess(tmp_path, target, kit.url) as worker:
        await eventually(lambda: len({seq for _, seq in worker.handled}) >= 40 * 25, 20)
        worker.terminate()  # whether it had told everybody by now that it had started is no matter here
        seen = worker.by_partition
    assert {p: sorted(set(seqs)) for p, seqs in seen.items()} == sent
    assert all(only_suffixes_repeat(seqs) for seqs in seen.values())


async def has_consumers(kit: Kit, count: int) -> bool:
    return len(await kit.api.consumer_names(kit.stream)) == count


async def stored_past(kit: Kit, seq: int) -> bool:
    """Whether a position is stored that is beyond a sequence."""
    progress = await kit.progress()
    return progress is not None and progress.highest > seq


async def test_after_crashes_nothing_is_lost_and_only_ends_of_partitions_are_repeated(
    kit: Kit, tmp_path: Path
) -> None:
    target = write_app(tmp_path, kit, MANY, body="await asyncio.sleep(0.002)", **TENS)
    sent = await kit.publish(MANY, 25)
    for crash_at in (200, 500):
        with WorkerProcess(tmp_path, target, kit.url) as worker:
            await eventually(lambda at=crash_at: len(worker.handled) >= at, 20)  # type: ignore[misc]
            worker.kill()
    with WorkerProcess(tmp_path, target, kit.url) as worker:
        await eventually(lambda: len({seq for _, seq in worker.handled}) >= 40 * 25, 20)
        await eventually(lambda: all_acked(kit), 20)
        assert worker.terminate() == 0
        seen = worker.by_partition
    assert {p: sorted(set(seqs)) for p, seqs in seen.items()} == sent
    assert all(only_suffixes_repeat(seqs) for seqs in seen.values())


# ── in a fleet ────────────────────────────────────────────────────────────────────────────────────────────────────


# A queue stands for the other kind that deletes what is handled.
@pytest.mark.parametrize("retention", ["limits", pytest.param("interest", marks=pytest.mark.slow), "workqueue"])
async def test_partitions_move_between_sharded_workers_under_load(kit: Kit, retention: str) -> None:
    await kit.delete_stream()
    await kit.create_stream(retention=retention)
    async with running(kit, 1, **SHARDED) as fleet, Traffic(kit) as traffic:
        assert len(await filters(kit)) == 3
        await traffic.goes_on()
        second = await fleet.join(**SHARDED)
        await fleet.settles()
        await traffic.goes_on()
        third = await fleet.join(**SHARDED)
        await fleet.settles()
        await traffic.goes_on()
        await fleet.leave(second)
        await fleet.settles()
        await traffic.goes_on()
        await fleet.leave(third)
        await fleet.settles()
        await traffic.goes_on()
        await traffic.stop()
        await eventually(lambda: fleet.journal.has(traffic.sent), 20)
        fleet.journal.is_clean(traffic.sent)


@pytest.mark.parametrize(
    "retention",
    # A queue stands for the others: what is acknowledged too early is gone there.
    [*(pytest.param(each, marks=pytest.mark.slow) for each in ("limits", "interest")), "workqueue"],
)
async def test_what_a_killed_worker_had_is_taken_over_from_all_its_shards(
    kit: Kit, tmp_path: Path, retention: str
) -> None:
    await kit.delete_stream()
    await kit.create_stream(retention=retention)
    with contextlib.ExitStack() as stack:
        processes = Processes(kit, tmp_path, stack, **SHARDED)
        first, second = processes.start(), processes.start()
        await processes.share(2)
        # A claim comes before its consumer, and until then an interest stream keeps nothing.
        await eventually(lambda: carries(kit, PARTITIONS), 20)
        async with Traffic(kit) as traffic:
            await traffic.goes_on(100)
            second.kill()
            await processes.share(1)
            await traffic.goes_on(100)
            processes.start()
            await processes.share(2)
            await traffic.goes_on(100)
        journal = processes.journal
        await eventually(lambda: journal.has(traffic.sent), 20)
        assert first.process.poll() is None
    journal.nothing_is_lost(traffic.sent)
    journal.order_holds()
    journal.fences_never_go_back()


async def test_the_shards_of_a_worker_that_is_gone_are_removed_and_no_others(kit: Kit) -> None:
    async with running(kit, 1, **SHARDED) as fleet:
        (worker,) = fleet.workers
        assert worker.manager
        plane = worker.manager._plane
        assert isinstance(plane, ControlPlane)
        mine, prefix = set(await filters(kit)), kit.settings["prefix"]
        config = {"ack_policy": "explicit", "filter_subject": f"{kit.root}.none"}

        async def make(name: str, shard: str = "") -> str:
            said = {"metadata": {"parti.shard": shard}} if shard else {}
            given = {**config, "name": name, "durable_name": name, **said}
            await kit.api.put_consumer(kit.stream, given, action="create")
            return name

        gone = {
            await make(f"{prefix}-worker-7"),
            await make(f"{prefix}-worker-7-2", "worker-7/2"),
            await make(f"{prefix}-worker-7-2-hold-1"),
        }
        # By their names, these could be shards of the worker that is there, or of one that is gone.
        kept = {await make(f"{prefix}-worker-0-9", "worker-0/9"), await make(f"{prefix}-stranger")}
        gone |= {await make(f"{prefix}-worker-0-8")}
        records = Records.of(await plane.read("ids.>", "health.>", "claims.>", "assignment.>"))
        said = next(iter(records.health.values()))
        assert isinstance(said, HealthRecord)
        records.health |= {"worker-7": said, "worker-0-9": said, "worker-0-8": said}
        await _remove_consumers(plane, kit.stream, prefix, records)
        assert set(await filters(kit)) == mine | kept
        assert not gone & set(await kit.api.consumer_names(kit.stream))


async def test_a_worker_id_that_is_another_ones_shard_is_refused(kit: Kit, record: Record) -> None:
    with pytest.raises(ConfigError, match="worker-2"):
        kit.app(record.handle, MANY, **{**TENS, "worker_id": "worker"}).worker()
    async with kit.app(record.handle, MANY[:2], worker_id="one-2", bucket=f"b{kit.root}").running():
        with pytest.raises(ConfigError, match=r"number 2 of worker 'one', but it is number 1 of worker 'one-2'"):
            await kit.app(record.handle, MANY, **TENS).worker().start()


# ── on the hot mirror ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
async def test_all_shards_are_on_the_mirror_or_none(nats_server: Server, stream_name: str) -> None:
    async with flowing(nats_server.url, stream_name, 8_000, workers=2, **TENS) as flow:
        await eventually(flow.inside)
        await eventually(lambda: has_none(flow, stream_name))
        assert {f"{stream_name}-worker-{n}-2" for n in (0, 1)} <= await flow.consumers(flow.mirror)
        await flow.handled(0.3)
        await flow.delete_mirror()
        await eventually(flow.inside)
        await flow.handled(0.6)
        await flow.join()
        await eventually(flow.inside)


async def has_none(flow: Any, stream: str) -> bool:
    return not await flow.consumers(stream)
