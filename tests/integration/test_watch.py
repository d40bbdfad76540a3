"""What a watch tells: the state, every change, and the truth again after anything that may have hidden one."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.integration.conftest import Kit, eventually
from tests.integration.proxy import proxy_to
from tests.pace import unhindered_s

from parti.config import Settings
from parti.embedded import Cluster, Server
from parti.errors import ConfigError, ConnectionFailed, PartiError, PermissionDenied, WrongRevision
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection, ConnectionState
from parti.jetstream.kv import Bucket, Entry
from parti.jetstream.watch import Watch

HEARTBEAT_S = 0.2
START_S = 15.0
NEXT_CHANGE_S = 0.5
"""A change is seen at most this long after the watch's own connection is back."""


@dataclass
class Seen:
    """Everything that a watch has reported."""

    reports: list[tuple[str, Entry]] = field(default_factory=list)
    at_s: dict[str, float] = field(default_factory=dict)
    state: dict[str, bytes] = field(default_factory=dict)
    resets: list[str] = field(default_factory=list)
    synced: int = 0

    def entry(self, key: str, entry: Entry) -> None:
        self.reports.append((key, entry))
        self.at_s[key] = unhindered_s()
        if entry.value:
            self.state[key] = entry.value
        else:
            self.state.pop(key, None)

    def whole(self) -> None:
        self.synced += 1

    def reset(self, created: str) -> None:
        self.resets.append(created)
        self.state.clear()

    def of(self, key: str) -> list[Entry]:
        return [entry for name, entry in self.reports if name == key]


@dataclass
class Party:
    """A bucket with a writer of its own."""

    connection: Connection
    api: JetStreamApi
    bucket: Bucket

    async def put(self, key: str, value: str, **options: Any) -> int:
        entry = await self.bucket.get(key)
        return await self.bucket.put(key, value.encode(), revision=entry.revision if entry else 0, **options)

    async def fill(self, prefix: str, count: int, value: bytes = b"v") -> None:
        for begin in range(0, count, 250):
            names = [f"{prefix}{n}" for n in range(begin, min(begin + 250, count))]
            await asyncio.gather(*(self.bucket.put(name, value, revision=0) for name in names))

    async def delete(self, key: str) -> int:
        entry = await self.bucket.get(key)
        assert entry
        return await self.bucket.delete(key, revision=entry.revision)

    async def purge(self, keys: str) -> None:
        """Remove keys in a way that leaves no marker."""
        await self.api.call(f"STREAM.PURGE.{self.bucket.stream}", {"filter": f"$KV.{self.bucket.name}.{keys}"})

    async def drop(self) -> None:
        await self.api.call(f"STREAM.DELETE.{self.bucket.stream}")

    async def consumers(self) -> list[str]:
        answer = await self.api.call(f"CONSUMER.NAMES.{self.bucket.stream}")
        return list(answer.get("consumers") or [])


@contextlib.asynccontextmanager
async def connected(url: str, **settings: Any) -> AsyncIterator[Connection]:
    quick = {"reconnect_wait_s": 0.02, **settings}
    connection = await Connection.open(Settings(nats=(url,), **quick), name="test")
    try:
        yield connection
    finally:
        await connection.close()


@contextlib.asynccontextmanager
async def party_on(url: str, name: str, *, replicas: int = 1) -> AsyncIterator[Party]:
    async with connected(url) as connection:
        api = JetStreamApi(connection)
        yield Party(connection, api, await Bucket.open(api, name, replicas=replicas))


@pytest.fixture
async def party(kit: Kit) -> Party:
    """A fresh bucket on the shared server; the kit removes it."""
    return Party(kit.connection, kit.api, await Bucket.open(kit.api, f"b{kit.root}", replicas=1))


def make_watch(connection: Connection, bucket: str, *keys: str, **options: Any) -> tuple[Watch, Seen]:
    seen = Seen()
    options = {"heartbeat_s": HEARTBEAT_S, "resync_s": 60.0, **options}
    watch = Watch(
        connection,
        JetStreamApi(connection),
        bucket,
        keys or ("ids.>", "leader.*"),
        seen.entry,
        on_synced=seen.whole,
        on_reset=seen.reset,
        **options,
    )
    return watch, seen


@contextlib.asynccontextmanager
async def watching(
    url: str, bucket: str, *keys: str, **options: Any
) -> AsyncIterator[tuple[Watch, Seen, Connection]]:
    """A started watch on a connection of its own."""
    async with connected(url) as connection:
        watch, seen = make_watch(connection, bucket, *keys, **options)
        await asyncio.wait_for(watch.start(), START_S)
        try:
            yield watch, seen, connection
        finally:
            await watch.stop()


# ── what is reported ──────────────────────────────────────────────────────────────────────────────────────────────


async def test_first_the_state_then_every_change(kit: Kit, party: Party) -> None:
    await party.put("ids.w0", "old")
    first = await party.put("ids.w0", "a")
    second = await party.put("leader.rebalancer", "b")
    await party.put("claims.p0", "not watched")
    async with watching(kit.url, party.bucket.name) as (watch, seen, _):
        assert dict(seen.reports) == {"ids.w0": Entry(b"a", first), "leader.rebalancer": Entry(b"b", second)}
        assert (len(seen.reports), seen.synced, watch.healthy, watch.last_error) == (2, 1, True, "")
        changed = await party.put("ids.w0", "c")
        gone = await party.delete("leader.rebalancer")
        again = await party.put("leader.rebalancer", "d")
        await party.put("claims.p0", "not watched")
        await eventually(lambda: len(seen.reports) == 5)
        assert seen.reports[2:] == [
            ("ids.w0", Entry(b"c", changed)),
            ("leader.rebalancer", Entry(b"", gone)),
            ("leader.rebalancer", Entry(b"d", again)),
        ]
        assert len(await party.consumers()) == 1
    assert await party.consumers() == []
    assert (seen.resets, watch.healthy) == ([], False)


async def test_an_empty_bucket_is_known_at_once(kit: Kit, party: Party) -> None:
    async with asyncio.timeout(2), watching(kit.url, party.bucket.name, heartbeat_s=10.0) as (_, seen, _):
        assert (seen.reports, seen.synced) == ([], 1)


@pytest.mark.parametrize("operation", ["DEL", "PURGE"])
async def test_the_payload_of_a_removal_is_no_value(kit: Kit, party: Party, operation: str) -> None:
    async with watching(kit.url, party.bucket.name) as (_, seen, _):
        subject = f"$KV.{party.bucket.name}.ids.w0"
        revision = await party.api.publish(subject, b"by whom", headers={"KV-Operation": operation})
        await eventually(lambda: seen.reports == [("ids.w0", Entry(b"", revision))])


async def test_an_expired_key_is_reported_with_the_revision_of_its_marker(kit: Kit, party: Party) -> None:
    async with watching(kit.url, party.bucket.name) as (_, seen, _):
        written = await party.put("ids.w0", "lease", ttl_s=1.0)
        await eventually(lambda: len(seen.reports) == 2)
        marker = await party.bucket.get("ids.w0")
        assert marker
        assert seen.of("ids.w0") == [Entry(b"lease", written), Entry(b"", marker.revision)]


async def test_a_key_that_vanished_without_a_marker_is_reported_by_the_next_whole_state(
    kit: Kit, party: Party
) -> None:
    await party.put("ids.w0", "a")
    await party.put("ids.w1", "b")
    async with watching(kit.url, party.bucket.name) as (watch, seen, _):
        await party.purge("ids.w0")
        await watch.resync()
        assert seen.of("ids.w0")[1:] == [Entry(b"", 0)]
        again = await party.bucket.put("ids.w0", b"c", revision=0)
        await eventually(lambda: seen.of("ids.w0")[2:] == [Entry(b"c", again)])
        assert len(seen.of("ids.w1")) == 1


async def test_a_marker_that_ends_is_not_a_change(kit: Kit, party: Party) -> None:
    await party.put("ids.w0", "a")
    async with watching(kit.url, party.bucket.name) as (watch, seen, _):
        await party.delete("ids.w0")
        await eventually(lambda: len(seen.reports) == 2)
        await party.purge("ids.w0")
        await watch.resync()
        assert len(seen.reports) == 2


async def test_a_whole_state_without_changes_is_silent(kit: Kit, party: Party) -> None:
    await party.fill("ids.w", 20)
    await party.delete("ids.w3")
    async with watching(kit.url, party.bucket.name, resync_s=0.1) as (watch, seen, _):
        tasks = len(asyncio.all_tasks())
        for _ in range(5):
            await watch.resync()
            assert watch.healthy
        assert len(asyncio.all_tasks()) == tasks, "each subscription of nats-py is a task"
        asked_for = seen.synced
        await eventually(lambda: seen.synced >= asked_for + 3)
        assert (len(seen.reports), watch.last_error) == (20, "")
        assert len(await party.consumers()) <= 1


async def test_changed_patterns_are_reported_and_those_given_up_forgotten(kit: Kit, party: Party) -> None:
    for key in ("ids.w0", "leader.rebalancer", "claims.p0"):
        await party.put(key, "a")
    async with watching(kit.url, party.bucket.name) as (watch, seen, _):
        await watch.set_keys(["leader.*", "claims.>"])
        assert [key for key, _ in seen.reports[2:]] == ["claims.p0"]
        await party.put("ids.w1", "b")
        await party.put("claims.p0", "b")
        await eventually(lambda: seen.state["claims.p0"] == b"b")
        assert len(seen.reports) == 4
        assert len(await party.consumers()) == 1
        await watch.set_keys(["ids.>"])
        assert [(key, entry.value) for key, entry in seen.reports[4:]] == [("ids.w0", b"a"), ("ids.w1", b"b")]


async def test_a_callback_that_raises_does_not_end_the_watch(kit: Kit, party: Party) -> None:
    seen = Seen()

    def entry(key: str, entry: Entry) -> None:
        seen.entry(key, entry)
        raise RuntimeError("as planned")

    async with connected(kit.url) as connection:
        watch = Watch(connection, JetStreamApi(connection), party.bucket.name, ["ids.>"], entry)
        await watch.start()
        for value in ("a", "b"):
            await party.put("ids.w0", value)
            await eventually(lambda wanted=value: seen.state.get("ids.w0") == wanted.encode())  # type: ignore[misc]
        await watch.stop()


@pytest.mark.parametrize("keys", [(), ("ids.*", "ids.w0"), ("ids..x",), ("ids.w 0",)])
async def test_patterns_that_cannot_be_watched_are_refused(kit: Kit, keys: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        Watch(kit.connection, kit.api, "b", keys, lambda key, entry: None)


# ── many keys ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_5000_keys_are_known_within_two_seconds_while_they_change(kit: Kit, party: Party) -> None:
    await party.fill("claims.p", 5_000, b"x" * 1_000)
    stop = asyncio.Event()

    async def change() -> int:
        count = 0
        while not stop.is_set():
            count += 1
            await party.put(f"claims.p{count * 7919 % 5_000}", f"changed {count}")
        return count

    changing = asyncio.create_task(change())
    try:
        started_s = unhindered_s()
        async with watching(kit.url, party.bucket.name, "claims.>") as (watch, seen, _):
            assert unhindered_s() - started_s < 2.0
            assert len({key for key, _ in seen.reports}) == 5_000
            await watch.resync()
            stop.set()
            count = await changing
            await watch.resync()
            changed = {f"claims.p{n * 7919 % 5_000}": f"changed {n}".encode() for n in range(1, count + 1)}
            assert changed
            assert seen.state == {f"claims.p{n}": b"x" * 1_000 for n in range(5_000)} | changed
            revisions: dict[str, int] = {}
            for key, entry in seen.reports:
                assert entry.revision > revisions.get(key, 0), "never the same twice, never an older one, never gone"
                revisions[key] = entry.revision
            assert watch.last_error == ""
    finally:
        stop.set()
        await changing


# ── outages ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_after_a_crash_of_the_server_the_next_change_is_seen_at_once(
    nats_server_factory: Callable[..., Server], stream_name: str
) -> None:
    server = nats_server_factory()
    async with (
        party_on(server.url, stream_name) as party,
        watching(server.url, stream_name, heartbeat_s=1.0) as (watch, seen, connection),
    ):
        await party.fill("ids.w", 200)
        back_s: list[float] = []
        connection.on_state(
            lambda state, _: back_s.append(unhindered_s()) if state is ConnectionState.CONNECTED else None
        )
        for crash in range(3):
            await server.kill()
            await server.restart()
            await party.put(f"leader.r{crash}", "next")
            put_s = unhindered_s()
            await eventually(lambda at=crash: f"leader.r{at}" in seen.state)  # type: ignore[misc]
            await eventually(lambda: watch.healthy)
            assert seen.at_s[f"leader.r{crash}"] - max(put_s, back_s[-1]) < NEXT_CHANGE_S
        assert len(seen.reports) == 203, "what did not change is not reported again"
        assert seen.resets == []
        assert len(await party.consumers()) == 1


async def test_what_happened_while_cut_off_is_reported_once(kit: Kit, party: Party, nats_server: Server) -> None:
    for n in range(4):
        await party.put(f"ids.w{n}", "a")
    async with (
        proxy_to(nats_server.port) as proxy,
        watching(proxy.url, party.bucket.name) as (watch, seen, connection),
    ):
        proxy.refuse()
        await eventually(lambda: not watch.healthy)
        assert "connection suspended" in watch.last_error
        await party.put("ids.w0", "b")
        await party.delete("ids.w1")
        await party.purge("ids.w2")
        proxy.refuse(False)
        await connection.wait_connected(5)
        await eventually(lambda: watch.healthy, NEXT_CHANGE_S)
        assert seen.state == {"ids.w0": b"b", "ids.w3": b"a"}
        assert len(seen.reports) == 4 + 3
        assert len(await party.consumers()) == 1


async def test_connections_cut_again_and_again_do_not_slow_it_down(
    kit: Kit, party: Party, nats_server: Server
) -> None:
    async with (
        proxy_to(nats_server.port) as proxy,
        watching(proxy.url, party.bucket.name) as (_, seen, connection),
    ):
        back_s: list[float] = []
        connection.on_state(
            lambda state, _: back_s.append(unhindered_s()) if state is ConnectionState.CONNECTED else None
        )
        for cut in range(8):
            proxy.cut()
            await party.put(f"ids.w{cut}", "meanwhile")
            await eventually(lambda at=cut: f"ids.w{at}" in seen.state)  # type: ignore[misc]
            assert len(back_s) == cut + 1
            assert seen.at_s[f"ids.w{cut}"] - back_s[-1] < NEXT_CHANGE_S


async def test_a_consumer_deleted_by_somebody_is_missed_and_made_again(kit: Kit, party: Party) -> None:
    async with watching(kit.url, party.bucket.name) as (watch, seen, _):
        for consumer in await party.consumers():
            await party.api.delete_consumer(party.bucket.stream, consumer)
        await party.put("ids.w0", "a")
        await eventually(lambda: seen.state == {"ids.w0": b"a"}, 3 * HEARTBEAT_S + 1.0)
        assert "heartbeats" in watch.last_error
        await eventually(lambda: watch.healthy)


async def test_a_process_that_is_gone_leaves_no_consumer_behind(kit: Kit, party: Party) -> None:
    async with connected(kit.url) as connection:
        watch, _ = make_watch(connection, party.bucket.name)
        await watch.start()
        assert len(await party.consumers()) == 1
        await connection.close()
        await eventually(lambda: not watch.healthy)
        with pytest.raises(ConnectionFailed):
            await watch.resync()

    async def none_left() -> bool:
        return await party.consumers() == []

    await eventually(none_left, 5 * HEARTBEAT_S + 2.0)
    await watch.stop()


@pytest.mark.slow
async def test_the_leader_of_the_bucket_dies_in_a_cluster(nats_cluster: Cluster, stream_name: str) -> None:
    async with connected(nats_cluster.urls[0]) as own:
        api = JetStreamApi(own)
        bucket = await Bucket.open(api, stream_name, replicas=3)
        for n in range(10):
            await bucket.put(f"ids.w{n}", b"a", revision=0)
        watch, seen = make_watch(own, stream_name)
        await watch.start()
        leader = (await api.call(f"STREAM.INFO.{bucket.stream}"))["cluster"]["leader"]
        await nats_cluster.kill([server.name for server in nats_cluster.servers].index(leader))

        async def written() -> bool:
            try:
                await bucket.put("ids.next", b"b", revision=0)
            except WrongRevision:
                return True
            except PartiError:
                return False
            return True

        await eventually(written, 30)
        await eventually(lambda: "ids.next" in seen.state, 15)
        await eventually(lambda: watch.healthy, 15)
        assert len(seen.reports) == 11
        assert seen.resets == []
        await watch.stop()


# ── lost frames ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_delivery_lost_on_its_way_is_noticed_by_the_next_one(
    kit: Kit, party: Party, nats_server: Server
) -> None:
    async with (
        proxy_to(nats_server.port) as proxy,
        watching(proxy.url, party.bucket.name, heartbeat_s=5.0) as (watch, seen, _),
    ):
        proxy.lose(lambda line: b".ids.lost " in line)
        await party.put("ids.lost", "a")
        await eventually(lambda: proxy.lost == 1)
        proxy.lose(None)
        await party.put("ids.next", "b")
        await eventually(lambda: seen.state == {"ids.lost": b"a", "ids.next": b"b"})
        assert "missing" in watch.last_error
        assert len(seen.reports) == 2


async def test_a_delivery_lost_with_none_after_it_is_noticed_by_the_heartbeat(
    kit: Kit, party: Party, nats_server: Server
) -> None:
    async with (
        proxy_to(nats_server.port) as proxy,
        watching(proxy.url, party.bucket.name) as (watch, seen, _),
    ):
        proxy.lose(lambda line: b".ids.lost " in line)
        await party.put("ids.lost", "a")
        await eventually(lambda: proxy.lost == 1)
        proxy.lose(None)
        await eventually(lambda: seen.state == {"ids.lost": b"a"}, 2 * HEARTBEAT_S + 1.0)
        assert "1 deliveries are missing" in watch.last_error


async def test_a_state_that_arrives_with_holes_is_not_taken_for_whole(
    kit: Kit, party: Party, nats_server: Server
) -> None:
    await party.fill("ids.w", 50)
    lost: set[int] = set()

    def first_two_times(line: bytes) -> bool:
        if b".ids.w49 " not in line or len(lost) == 2:
            return False
        lost.add(len(lost))
        return True

    async with proxy_to(nats_server.port) as proxy, connected(proxy.url) as connection:
        watch, seen = make_watch(connection, party.bucket.name)
        proxy.lose(first_two_times)
        await watch.start()
        assert (len(lost), seen.synced, len(seen.state), len(seen.reports)) == (2, 1, 50, 50)
        await watch.stop()


async def test_a_watch_from_which_nothing_comes_any_more_is_made_again(
    kit: Kit, party: Party, nats_server: Server
) -> None:
    def belongs_to_the_watch(line: bytes) -> bool:
        # Its inbox has two tokens, that of an API request one more.
        subject = line.split(b" ")[1] if b"MSG " in line else b""
        return subject.startswith(b"$KV.") or (subject.startswith(b"_INBOX.") and subject.count(b".") == 1)

    async with (
        proxy_to(nats_server.port) as proxy,
        watching(proxy.url, party.bucket.name) as (watch, seen, _),
    ):
        proxy.lose(belongs_to_the_watch)
        await eventually(lambda: not watch.healthy)
        assert "heartbeats" in watch.last_error
        await party.put("ids.w0", "a")
        proxy.lose(None)
        await eventually(lambda: seen.state == {"ids.w0": b"a"})
        assert proxy.connections == 1


# ── another bucket under the same name ────────────────────────────────────────────────────────────────────────────


async def test_a_bucket_made_anew_is_a_reset(kit: Kit, party: Party) -> None:
    await party.fill("ids.w", 30)
    async with watching(kit.url, party.bucket.name) as (watch, seen, connection):
        await party.drop()
        await eventually(lambda: not watch.healthy and "stream not found" in watch.last_error)
        asked = connection.client.stats["out_msgs"]
        since_s = time.monotonic()
        await eventually(lambda: time.monotonic() > since_s + 1.0)
        assert connection.client.stats["out_msgs"] - asked < 20, "asks seldom while there is none"
        assert len(seen.reports) == 30, "a bucket that is gone is not a set of deleted keys"
        bucket = await Bucket.open(party.api, party.bucket.name, replicas=1)
        revision = await bucket.put("ids.w7", b"new", revision=0)
        assert revision == 1
        await eventually(lambda: seen.state == {"ids.w7": b"new"})
        assert seen.resets == [(await bucket.info()).created]
        await eventually(lambda: watch.healthy)
        await bucket.put("ids.w8", b"new", revision=0)
        await eventually(lambda: len(seen.state) == 2)


async def test_a_bucket_made_anew_between_two_looks_is_a_reset(kit: Kit, party: Party) -> None:
    await party.fill("ids.w", 30)
    async with watching(kit.url, party.bucket.name) as (_, seen, _):
        await party.drop()
        bucket = await Bucket.open(party.api, party.bucket.name, replicas=1)
        await bucket.put("ids.w7", b"new", revision=0)
        await eventually(lambda: seen.state == {"ids.w7": b"new"})
        assert seen.resets == [(await bucket.info()).created]


async def test_a_watch_waits_for_a_bucket_that_does_not_exist_yet(kit: Kit) -> None:
    name = f"b{kit.root}"
    watch, seen = make_watch(kit.connection, name)
    starting = asyncio.create_task(watch.start())
    await eventually(lambda: "stream not found" in watch.last_error)
    assert not starting.done()
    bucket = await Bucket.open(kit.api, name, replicas=1)
    await bucket.put("ids.w0", b"a", revision=0)
    await asyncio.wait_for(starting, 5)
    await eventually(lambda: seen.state == {"ids.w0": b"a"})
    assert seen.resets == []
    await watch.stop()


async def test_a_start_that_is_given_up_leaves_nothing_running(kit: Kit) -> None:
    watch, _ = make_watch(kit.connection, f"b{kit.root}")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(watch.start(), 0.1)
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "parti-watch"]


async def test_a_bucket_restored_from_an_older_copy_is_a_reset(
    nats_server_factory: Callable[..., Server], stream_name: str, tmp_path: Path
) -> None:
    store, copy = tmp_path / "store", tmp_path / "copy"
    server = nats_server_factory(store_dir=store)
    async with party_on(server.url, stream_name) as party:
        await party.put("ids.w0", "old")
        await server.kill()
        shutil.copytree(store, copy)
        await server.restart()
        await party.connection.wait_connected(5)
        created = (await party.bucket.info()).created
        async with watching(server.url, stream_name) as (_, seen, _):
            await party.put("ids.w0", "new")
            await party.put("ids.w1", "new")
            await eventually(lambda: len(seen.state) == 2)
            await server.kill()
            shutil.rmtree(store)
            shutil.copytree(copy, store)
            await server.restart()
            await eventually(lambda: seen.resets == [created])
            await eventually(lambda: seen.state == {"ids.w0": b"old"})


async def test_a_start_without_permission_says_so(
    nats_server_factory: Callable[..., Server], stream_name: str
) -> None:
    server = nats_server_factory(
        config="""authorization { users: [
            { user: all, password: p },
            { user: some, password: p, permissions: { publish: { deny: ["$JS.API.CONSUMER.>"] } } } ] }"""
    )
    url = server.url.replace("://", "://all:p@")
    async with party_on(url, stream_name), connected(server.url.replace("://", "://some:p@")) as connection:
        watch, _ = make_watch(connection, stream_name)
        with pytest.raises(PermissionDenied, match="CONSUMER"):
            await asyncio.wait_for(watch.start(), 5)
