"""Acknowledgements that a server kill swallows: what is finished leaves the stream all the same."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.integration.conftest import Kit, Record, eventually
from tests.integration.proxy import proxy_to

import parti
from parti.config import Settings
from parti.core.progress import Progress, encode_progress
from parti.embedded import Server
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.kv import Bucket

PARTITIONS = [f"p{n}" for n in range(10)]
KILLS = 3
EACH = 40


def make_app(url: str, record: Record, **settings: Any) -> parti.App:
    quick = {"nats": url, "fleet": False, "reconnect_wait_s": 0.02, "log_level": "error", **settings}
    app = parti.App(stream="WORK", subject="work.{p}", partitions=PARTITIONS, **quick)
    app.handler(record.handle)
    return app


async def stored(api: JetStreamApi) -> int:
    return int((await api.call("STREAM.INFO.WORK"))["state"]["messages"])


async def comes_to_store(kit: Kit, count: int) -> None:
    """Wait until the stream has so many messages: one leaves it some time after its acknowledgement."""

    async def as_many() -> bool:
        return (await kit.api.stream_info(kit.stream)).messages == count

    await eventually(as_many, 10)


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "unordered"])
@pytest.mark.parametrize("retention", ["workqueue", "interest"])
async def test_what_was_handled_just_before_a_server_kill_does_not_stay_in_the_stream(
    retention: str, ordered: bool
) -> None:
    """The server forgets acknowledgements of the last 50 ms; the worker goes back for them, and repeats nothing."""
    record = Record()
    async with Server() as server:
        connection = await Connection.open(Settings(nats=(server.url,), reconnect_wait_s=0.02), name="test")
        api = JetStreamApi(connection)
        config = {"name": "WORK", "subjects": ["work.*"], "retention": retention, "storage": "file"}
        await api.call("STREAM.CREATE.WORK", config)
        async with make_app(server.url, record, ordered=ordered).running():
            for kill in range(1, KILLS + 1):
                await asyncio.gather(*(api.publish(f"work.{p}", b"x") for p in PARTITIONS * EACH))
                await record.reaches(kill * EACH * len(PARTITIONS))
                await server.kill()
                await server.restart()
                await connection.wait_connected(10)

            async def empty() -> bool:
                return await stored(api) == 0

            await eventually(empty, 15)
        await connection.close()
    seqs = [call.seq for call in record.calls]
    assert len(seqs) == len(set(seqs)) == KILLS * EACH * len(PARTITIONS)


async def test_a_partition_that_is_added_while_the_stream_is_empty_leaves_nothing_behind(
    kit: Kit, record: Record
) -> None:
    """The hold that guards its older messages is given up, though there are none."""
    await kit.delete_stream()
    await kit.create_stream(retention="interest")
    async with kit.app(record.handle, ["a"]).running() as worker:
        await worker.update_worker_consumer("one", ["a", "b"])
        await kit.publish(["a", "b"], 5)
        await record.reaches(10)

        async def empty() -> bool:
            info = await kit.api.stream_info(kit.stream)
            return not info.messages and await kit.api.consumer_names(kit.stream) == [kit.consumer]

        await eventually(empty, 10)


async def test_what_is_acknowledged_on_a_connection_that_takes_nothing_away_leaves_the_stream(
    kit: Kit, record: Record
) -> None:
    """The server is heard well, and hears nothing: only unanswered pings show that."""
    await kit.delete_stream()
    await kit.create_stream(retention="workqueue")
    async with proxy_to(int(kit.url.rpartition(":")[2])) as proxy:
        app = kit.app(record.handle, ["a"], nats=proxy.url, ping_interval_s=2.5, reconnect_wait_s=0.05)
        async with app.running() as worker:
            await kit.publish(["a"], 10)
            await record.reaches(10)
            await eventually(kit.all_acked)
            proxy.deafen()
            connected = proxy.connections
            await kit.publish(["a"], 10)
            await record.reaches(20)
            # The connection is given up as one whose pings are not answered, some time after.
            await eventually(lambda: "connection" in worker.health.reasons or proxy.connections > connected)
            proxy.deafen(False)

            async def empty() -> bool:
                return not (await kit.api.stream_info(kit.stream)).messages

            await eventually(empty, 15)
    assert len(record.calls) == 20


async def forget_acknowledgements(kit: Kit, record: Record, **settings: Any) -> None:
    """Leave a stream of which the record says that it is finished, and the consumer that nothing is acknowledged."""
    async with kit.app(record.handle, ["a"], **settings).running():
        pass
    sent = await kit.publish(["a"], 10)
    before = await kit.progress()
    assert before
    bucket = Bucket(kit.api, kit.settings["bucket"])
    entry = await bucket.get("progress.one")
    assert entry
    after = Progress(
        stream=before.stream, stream_created=before.stream_created, floor=max(sent["a"]) + 1, covered=before.covered
    )
    await bucket.put("progress.one", encode_progress(after), revision=entry.revision)


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "unordered"])
@pytest.mark.parametrize("retention", ["workqueue", "interest"])
async def test_what_the_record_calls_finished_and_the_server_still_has_is_acknowledged_at_the_start(
    kit: Kit, record: Record, retention: str, ordered: bool
) -> None:
    await kit.delete_stream()
    await kit.create_stream(retention=retention)
    await forget_acknowledgements(kit, record, ordered=ordered)
    async with kit.app(record.handle, ["a"], ordered=ordered).running():
        await comes_to_store(kit, 0)
        sent = await kit.publish(["a"])
        await record.reaches(1)
    assert record.of("a") == sent["a"]


async def test_what_only_a_consumer_calls_finished_stays_in_the_stream(kit: Kit, record: Record) -> None:
    """Without a record nothing shows that a message below the ack floor was handled: others may have set it there."""
    await kit.delete_stream()
    await kit.create_stream(retention="workqueue")
    config = {"name": kit.consumer, "durable_name": kit.consumer, "ack_policy": "explicit"}
    await kit.api.put_consumer(kit.stream, {**config, "filter_subjects": [kit.subject("a")]}, action="create")
    sent = await kit.publish(["a"], 5)
    await kit.api.reset_consumer(kit.stream, kit.consumer, max(sent["a"]) + 1)
    async with kit.app(record.handle, ["a"]).running():
        await kit.publish(["a"])
        await record.reaches(1)
        await eventually(kit.all_acked)
    await comes_to_store(kit, 5)


async def test_messages_older_than_the_start_stay_on_a_work_queue_over_a_restart(kit: Kit, record: Record) -> None:
    """With `start="new"` they were never handled, though the record's floor lies above them."""
    await kit.delete_stream()
    await kit.create_stream(retention="workqueue")
    await kit.publish(["a"], 5)
    for runs in (1, 2):
        async with kit.app(record.handle, ["a"], start="new").running():
            await kit.publish(["a"])
            await record.reaches(runs)
            await eventually(kit.all_acked)
    await comes_to_store(kit, 5)
