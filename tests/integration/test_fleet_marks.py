"""Two fleets on one stream: whose a consumer is, its mark tells, and nobody takes messages of the other."""

from __future__ import annotations

import asyncio
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.integration.conftest import Kit, Record, eventually
from tests.integration.fleet import FLEET
from tests.integration.processes import WorkerProcess, command, environment, write_app

from parti.core.consumer_config import FLEET as MARK
from parti.core.consumer_config import PREFIX
from parti.errors import ForeignConsumer, NotFound

PARTITIONS = [f"p{n}" for n in range(8)]
WITHIN_S = 10.0


def has_handled(worker: WorkerProcess, number: int) -> bool:
    return len(worker.handled) == number


def doctor(kit: Kit, bucket: str) -> tuple[int, str]:
    done = subprocess.run(
        command("doctor", "--nats", kit.url, "--bucket", bucket, "--stream", kit.stream),
        env=environment(PARTI_PREFIX=kit.settings["prefix"]),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, " ".join(done.stdout.split())


async def test_a_second_fleet_with_the_same_prefix_is_refused_and_changes_nothing(kit: Kit, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    other = f"o{kit.root}"
    first = write_app(ours, kit, PARTITIONS, **FLEET)
    second = write_app(theirs, kit, PARTITIONS, **{**FLEET, "bucket": other})
    with WorkerProcess(ours, first, kit.url) as worker:
        sent = await kit.publish(PARTITIONS, 5)
        await eventually(lambda: len(worker.handled) == 40)
        before = [info.config for info in await kit.api.consumers(kit.stream)]
        with WorkerProcess(theirs, second, kit.url) as refused:
            assert await asyncio.to_thread(refused.wait) == 2
            assert refused.process.stderr
            said = refused.process.stderr.read().strip()
        assert len(said.splitlines()) == 1
        assert f"belongs to the fleet of bucket 'b{kit.root}'" in said
        assert f"bucket {other!r} and the same prefix" in said
        assert "set PARTI_PREFIX" in said
        with pytest.raises(NotFound):
            await kit.api.stream_info(f"KV_{other}")
        assert [info.config for info in await kit.api.consumers(kit.stream)] == before
        more = await kit.publish(PARTITIONS, 5)
        await eventually(lambda: len(worker.handled) == 80, WITHIN_S)
        assert worker.by_partition == {p: sent[p] + more[p] for p in PARTITIONS}
        code, text = await asyncio.to_thread(doctor, kit, other)
        assert code == 1
        assert f"the fleets of bucket {other} and of bucket b{kit.root} have the same prefix" in text
        assert "have the same prefix" not in (await asyncio.to_thread(doctor, kit, f"b{kit.root}"))[1]


async def test_fleets_that_set_only_their_bucket_do_not_meet(kit: Kit, tmp_path: Path) -> None:
    workers = []
    buckets = [f"b{kit.root}", f"o{kit.root}"]
    try:
        for bucket in buckets:
            directory = tmp_path / bucket
            directory.mkdir()
            target = write_app(directory, kit, PARTITIONS, **{**FLEET, "bucket": None, "prefix": None})
            workers.append(WorkerProcess(directory, target, kit.url, PARTI_BUCKET=bucket))
        sent = await kit.publish(PARTITIONS, 5)
        for worker in workers:
            await eventually(partial(has_handled, worker, 40))
            assert worker.by_partition == sent
        configs = [info.config for info in await kit.api.consumers(kit.stream)]
        assert {(c["name"], c["metadata"][PREFIX], c["metadata"][MARK]) for c in configs} == {
            (f"{bucket}-worker-0", bucket, bucket) for bucket in buckets
        }
        for worker in workers:
            assert await asyncio.to_thread(worker.terminate) == 0
    finally:
        for worker in workers:
            worker.__exit__(None, None, None)
        for name in (f"KV_o{kit.root}", f"o{kit.root}-history"):
            await kit.delete_stream(name)


async def test_a_fleet_whose_bucket_was_deleted_starts_again(kit: Kit, record: Record) -> None:
    sent = await kit.publish(PARTITIONS, 2)
    async with kit.app(record.handle, PARTITIONS, **FLEET).running():
        await record.reaches(16)
    await kit.delete_stream(f"KV_b{kit.root}")
    async with kit.app(record.handle, PARTITIONS, **FLEET).running():
        more = await kit.publish(PARTITIONS, 2)
        newest = {p: seqs[-1] for p, seqs in more.items()}
        await eventually(lambda: all(record.of(p)[-1] == newest[p] for p in PARTITIONS))
    assert all(set(sent[p] + more[p]) <= set(record.of(p)) for p in PARTITIONS)


def by_hand(kit: Kit, **config: Any) -> dict[str, Any]:
    name = f"w{kit.root}-worker-0"
    return {
        "name": name,
        "durable_name": name,
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "filter_subjects": [kit.subject("p0")],
        **config,
    }


async def test_a_consumer_without_a_mark_is_adopted_if_a_worker_could_have_made_it(kit: Kit, record: Record) -> None:
    await kit.api.put_consumer(kit.stream, by_hand(kit), action="create")
    sent = await kit.publish(PARTITIONS, 2)
    async with kit.app(record.handle, PARTITIONS, **FLEET).running():
        await record.reaches(16)
        info = await kit.api.consumer_info(kit.stream, f"w{kit.root}-worker-0")
        assert info.config["metadata"][MARK] == f"b{kit.root}"
    record.is_exactly(sent)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"ack_policy": "none"}, "its ack_policy is none, not explicit"),
        ({"deliver_policy": "new"}, "its deliver_policy is new, not all"),
        ({"deliver_subject": "elsewhere"}, "it is a push consumer"),
    ],
)
async def test_a_consumer_of_another_kind_is_refused(
    kit: Kit, record: Record, config: dict[str, Any], why: str
) -> None:
    made = await kit.api.put_consumer(kit.stream, by_hand(kit, **config), action="create")
    with pytest.raises(ForeignConsumer, match=f"{why}: parti did not make it; set PARTI_PREFIX"):
        await kit.app(record.handle, PARTITIONS, **FLEET).worker().start()
    found = await kit.api.consumer_info(kit.stream, f"w{kit.root}-worker-0")
    assert found.config == made.config
    with pytest.raises(NotFound):
        await kit.api.stream_info(f"KV_b{kit.root}")


async def test_all_consumers_of_a_worker_carry_the_mark(kit: Kit, record: Record) -> None:
    await kit.delete_stream()
    await kit.create_stream(retention="interest")
    settings = {**FLEET, "max_subjects": 3, "consumer_shards": 3}
    async with kit.app(record.handle, PARTITIONS, **settings).running():
        await kit.publish(PARTITIONS, 2)
        await record.reaches(16)
        consumers = await kit.api.consumers(kit.stream)
        assert len(consumers) >= 3
        assert {info.config["metadata"][MARK] for info in consumers} == {f"b{kit.root}"}
