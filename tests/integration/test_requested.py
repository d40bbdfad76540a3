"""Reading by requests alone says what consumers would say, and makes none."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.integration.conftest import eventually

from parti.config import Settings
from parti.embedded import Server
from parti.errors import NotFound
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.kv import Bucket, Entry
from parti.jetstream.scan import Scanned, scan
from parti.jetstream.watch import Watch


@asynccontextmanager
async def connected(server: Server, read_by: str) -> AsyncIterator[tuple[Connection, JetStreamApi]]:
    settings = Settings(nats=(server.url,), read_by=read_by)  # type: ignore[arg-type]
    connection = await Connection.open(settings, name=f"test-{read_by}")
    try:
        yield connection, JetStreamApi(connection)
    finally:
        await connection.close()


def told(message: Scanned) -> tuple[int, str, dict[str, str], bytes]:
    headers = {name: value for name, value in message.headers.items() if name != "Nats-Msg-Size"}
    return message.seq, message.subject, headers, message.data


@pytest.mark.parametrize("payload", [True, False])
@pytest.mark.parametrize("subjects", [(), ("few.a",), ("few.a", "few.b.>")])
async def test_a_scan_finds_the_same_with_holes_and_headers(subjects: tuple[str, ...], payload: bool) -> None:
    async with (
        Server() as server,
        connected(server, "consumers") as (plain, api),
        connected(server, "requests") as (asking, _),
    ):
        await api.ensure_stream({"name": "FEW", "subjects": ["few.>"], "max_msgs_per_subject": 400})
        for number in range(1000):
            subject = ("few.a", "few.b.c", "few.d")[number % 3]
            await api.publish(subject, b"%d" % number, headers={"Number": str(number)} if number % 2 else None)
        for seq in (1, 500, 999, 1000):
            await api.call("STREAM.MSG.DELETE.FEW", {"seq": seq})
        for start in (1, 2, 400, 998, 1001):
            given = {"start": start, "subjects": subjects, "payload": payload}
            wanted = [told(each) async for each in scan(plain, api, "FEW", **given)]  # type: ignore[arg-type]
            found = [told(each) async for each in scan(asking, JetStreamApi(asking), "FEW", **given)]  # type: ignore[arg-type]
            assert found == wanted, given
        with pytest.raises(NotFound):
            [each async for each in scan(asking, JetStreamApi(asking), "NONE")]
        await asyncio.gather(*(api.delete_consumer("FEW", name) for name in await api.consumer_names("FEW")))
        assert await api.consumer_names("FEW") == []


async def test_a_scan_without_payloads_keeps_none_of_them_in_memory() -> None:
    """`parti dlq ls` as a user in an account of its own, with letters of a size."""
    size, count = 100_000, 1000
    async with Server() as server, connected(server, "requests") as (asking, api):
        await api.ensure_stream({"name": "LARGE", "subjects": ["large"], "storage": "memory"})
        for _ in range(count):
            await api.publish("large", b"x" * size)
        tracemalloc.start()
        try:
            assert sum([1 async for _ in scan(asking, api, "LARGE")]) == count
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < size * count / 2


async def test_a_watch_sees_writes_deletes_and_expiries_without_a_consumer() -> None:
    async with (
        Server() as server,
        connected(server, "consumers") as (_, api),
        connected(server, "requests") as (asking, asking_api),
    ):
        bucket = await Bucket.open(api, "fleet", replicas=1)
        revisions = [await bucket.put(f"claims.p{number}", b"%d" % number, revision=0) for number in range(300)]
        await bucket.put("orders", b"none", revision=0)
        state: dict[str, Entry] = {}
        watch = Watch(asking, asking_api, "fleet", ("claims.>", "ids.*"), state.__setitem__)
        await watch.start()
        try:
            assert {key: entry.value for key, entry in state.items()} == {
                f"claims.p{n}": b"%d" % n for n in range(300)
            }
            newer = await bucket.put("claims.p7", b"new", revision=revisions[7])
            await eventually(lambda: state["claims.p7"] == Entry(b"new", newer), 10)
            await bucket.delete("claims.p8", revision=revisions[8])
            await eventually(lambda: state["claims.p8"].value == b"", 10)
            await bucket.put("ids.worker-0", b"mine", revision=0, ttl_s=2)
            await eventually(lambda: state.get("ids.worker-0", Entry(b"", 0)).value == b"mine", 10)
            await eventually(lambda: state["ids.worker-0"].value == b"", 10)
            assert watch.healthy
            assert "orders" not in state
            assert await api.consumer_names("KV_fleet") == []
        finally:
            await watch.stop()


async def test_a_watch_without_consumer_comes_back_after_a_restart_and_knows_a_new_bucket() -> None:
    async with (
        Server() as server,
        connected(server, "consumers") as (plain, api),
        connected(server, "requests") as (asking, asking_api),
    ):
        bucket = await Bucket.open(api, "fleet", replicas=1)
        revision = await bucket.put("claims.p0", b"a", revision=0)
        state: dict[str, Entry] = {}
        resets: list[str] = []
        watch = Watch(asking, asking_api, "fleet", ("claims.>",), state.__setitem__, on_reset=resets.append)
        await watch.start()
        try:
            await server.kill()
            await server.restart()
            await plain.wait_connected(20)
            await bucket.put("claims.p0", b"b", revision=revision)
            await eventually(lambda: state["claims.p0"].value == b"b", 20)
            await api.call("STREAM.DELETE.KV_fleet")
            await eventually(lambda: not watch.healthy, 20)
            again = await Bucket.open(api, "fleet", replicas=1)
            await again.put("claims.p0", b"c", revision=0)
            await eventually(lambda: state["claims.p0"] == Entry(b"c", 1), 20)
            assert len(resets) == 1
        finally:
            await watch.stop()
