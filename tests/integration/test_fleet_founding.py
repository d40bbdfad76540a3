"""What a bucket belongs to, where partitions begin, and what is remembered of them."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from tests.integration.conftest import Kit, Record, eventually
from tests.integration.fleet import FLEET, PARTITIONS, Fleet, Journal, running

import parti
from parti.config import load_settings
from parti.coordination.control_plane import agree
from parti.embedded import Cluster
from parti.errors import ConfigError, NotFound
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.kv import Bucket
from parti.model.fleet import FleetRecord


async def test_a_worker_of_another_app_is_refused(kit: Kit, record: Record) -> None:
    async with kit.app(record.handle, ["a"], **FLEET).running():
        pass
    other = kit.app(record.handle, ["a.b"], subject=f"{kit.root}.{{p}}.{{q}}", **FLEET).worker()
    with pytest.raises(ConfigError, match=r"belongs to a fleet with template .*PARTI_BUCKET"):
        await other.start()


async def test_a_worker_with_another_prefix_is_told_how_to_be_part_of_the_fleet(kit: Kit, record: Record) -> None:
    """Earlier versions had one prefix for all buckets: its fleets are to go on, and to keep their positions."""
    async with kit.app(record.handle, ["a"], **{**FLEET, "prefix": "parti"}).running():
        pass
    other = kit.app(record.handle, ["a"], **{**FLEET, "prefix": None}).worker()
    with pytest.raises(ConfigError, match=r"a fleet with prefix 'parti', .*set PARTI_PREFIX=parti to be part of"):
        await other.start()


async def test_working_alone_beside_a_fleet_is_refused(kit: Kit, record: Record) -> None:
    async with kit.app(record.handle, ["a"], **FLEET).running():
        alone = kit.app(record.handle, ["a"]).worker()
        with pytest.raises(ConfigError, match=r"a fleet runs on bucket .*worker-0"):
            await alone.start()


async def test_new_means_newer_than_the_fleet(kit: Kit, record: Record) -> None:
    await kit.publish(["old"], each=3)
    source = parti.Discovered(refresh_s=0.05)
    async with kit.app(record.handle, source, start="new", **FLEET).running():
        sent = await kit.publish(["old", "found"], each=3)
        await record.reaches(6)
    record.is_exactly(sent)


async def test_a_partition_that_is_named_again_goes_on_where_it_was(kit: Kit, record: Record) -> None:
    wanted = ["a", "b"]
    app = kit.app(record.handle, parti.Callback(lambda: list(wanted), refresh_s=0.05), **FLEET)
    async with app.running() as first:
        sent = await kit.publish(["a", "b"], each=5)
        await record.reaches(10)
        wanted.remove("a")
        await eventually(lambda: len(first.partitions) == 1)
    more = await kit.publish(["a"], each=2)
    wanted.append("a")
    async with app.running(worker_id="another"):
        await record.reaches(12)
    record.is_exactly({"a": sent["a"] + more["a"], "b": sent["b"]})


async def test_what_starts_while_a_partition_leaves_carries_its_token(kit: Kit) -> None:
    fences: dict[str, list[int]] = {}

    async def handle(message: parti.Message) -> None:
        fences.setdefault(message.partition.id, []).append(message.fence)

    partitions = [f"p{n}" for n in range(8)]
    async with kit.app(handle, partitions, **FLEET).running() as one:
        async with kit.app(handle, partitions, **FLEET).running() as two:
            while len(two.partitions) < 4:
                await kit.publish(partitions)
            await eventually(lambda: len(one.partitions) == 4)
        await eventually(lambda: len(one.partitions) == 8)
        await kit.publish(partitions)
        await eventually(lambda: all(len(set(f)) >= 1 for f in fences.values()))
    for tokens in fences.values():
        assert tokens[0] > 0
        assert tokens == sorted(tokens), "tokens never go back"


async def test_a_worker_without_capacity_gets_nothing(kit: Kit) -> None:
    async with Fleet(kit, Journal()) as fleet:
        standby = await fleet.join(capacity=0)
        other = await fleet.join()
        await eventually(lambda: len(other.partitions) == len(PARTITIONS), 5.0)
        assert standby.partitions == ()


async def test_more_capacity_than_a_consumer_can_carry_is_refused(kit: Kit) -> None:
    async with Fleet(kit, Journal()) as fleet:
        with pytest.raises(ConfigError, match="max_subjects"):
            await fleet.join(capacity=8, max_subjects=4)


async def test_two_deployments_in_one_bucket_do_not_take_each_others_partitions(kit: Kit) -> None:
    """They differ in stream and prefix and share the bucket, which has the same name by default."""
    other_stream, other_root = f"{kit.stream}_2", f"{kit.root}x"
    await kit.api.call(
        f"STREAM.CREATE.{other_stream}", {"name": other_stream, "subjects": [f"{other_root}.>"], "storage": "memory"}
    )
    journal = Journal()
    try:
        async with running(kit, 1) as fleet:
            settings = {**kit.settings, **FLEET, "prefix": f"w{other_root}"}
            other = parti.App(stream=other_stream, subject=f"{other_root}.{{p}}", partitions=["q0", "q1"], **settings)
            other.handler(lambda message: journal.note("start", message))
            try:
                worker = other.worker()
                await worker.start()
            except ConfigError:
                return  # A clear word is as good.
            fleet.workers.append(worker)
            sent = await kit.publish(PARTITIONS)
            theirs = [await kit.api.publish(f"{other_root}.{p}", b"x") for p in ("q0", "q1")]
            await eventually(lambda: fleet.journal.has(sent) and journal.has({"q": theirs}), 5.0)
    finally:
        await kit.delete_stream(other_stream)


async def test_streams_that_a_fleet_could_only_serve_with_losses_are_refused(kit: Kit) -> None:
    await kit.delete_stream()
    await kit.create_stream(retention="interest")
    found = kit.app(lambda message: None, parti.Discovered(), **FLEET).worker()
    with pytest.raises(ConfigError, match=r"interest retention.*cannot be discovered; list them"):
        await found.start()
    unordered = kit.app(lambda message: None, ["p0"], **{**FLEET, "ordered": False}).worker()
    with pytest.raises(ConfigError, match=r"interest retention.*set ordered=true"):
        await unordered.start()


OURS = FleetRecord(prefix="p", stream="S", template="s.{p}", stream_created="now", first_seq=1)


class Deaf(Bucket):
    """A bucket that a node of a cluster has not heard of when it is written to for the first times."""

    unheard = 3

    async def put(self, key: str, value: bytes, *, revision: int, ttl_s: float | None = None) -> int:
        name = self.name
        self.name = f"{name}-unheard" if self.unheard > 0 else name
        self.unheard -= 1
        try:
            return await super().put(key, value, revision=revision, ttl_s=ttl_s)
        finally:
            self.name = name


async def test_a_bucket_that_was_just_made_is_listened_for(kit: Kit) -> None:
    """On three nodes, two of 450 first writes met nobody, for up to 0.7 s."""
    bucket = await Bucket.open(kit.api, f"b{kit.root}", replicas=1)
    deaf = Deaf(kit.api, bucket.name)
    assert await agree(deaf, OURS) == OURS
    assert deaf.unheard == -1
    assert await bucket.get("fleet")


async def test_a_bucket_that_is_gone_is_not_waited_for(kit: Kit) -> None:
    bucket = await Bucket.open(kit.api, f"b{kit.root}", replicas=1)
    await kit.delete_stream(bucket.stream)
    with pytest.raises(NotFound):
        await asyncio.wait_for(agree(bucket, OURS), 2.0)


async def test_new_nodes_of_a_cluster_agree_on_a_new_bucket(nats_cluster: Cluster, stream_name: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        nodes = []
        for server in nats_cluster.servers:
            connection = await Connection.open(load_settings({"nats": server.url}), name="founder")
            stack.push_async_callback(connection.close)
            nodes.append(JetStreamApi(connection))
        for number in range(6):
            name = f"{stream_name}-{number}"
            await Bucket.open(nodes[number % 3], name, replicas=3)
            found = await asyncio.gather(*(agree(Bucket(node, name), OURS) for node in nodes))
            assert found == [OURS] * 3
