"""The state store on a real server: any size comes back byte for byte, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.integration.conftest import Kit
from tests.integration.proxy import proxy_to
from tests.pace import unhindered_s

from parti.config import Settings
from parti.embedded import Cluster, Server
from parti.errors import ApiError, ConfigError, PartiError, StateCorrupt, StateRemoved
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.kv import Bucket
from parti.jetstream.state_store import CHUNK_BYTES, StateStore
from parti.model.partition import Partition
from parti.model.state import StatePointer, chunk_subject
from parti.worker.state import StateKeeper
from parti.worker.state_exchange import SavedState

ROOT = Path(__file__).parents[2]
QUICK: dict[str, Any] = {"chunk_bytes": 1000, "stall_s": 10.0}
ANSWER = re.compile(rb"H?MSG \S+ \S+( \d+)+\r\n")


@contextlib.asynccontextmanager
async def connected(*urls: str) -> AsyncIterator[Connection]:
    connection = await Connection.open(Settings(nats=urls, reconnect_wait_s=0.05), name="test")
    try:
        yield connection
    finally:
        await connection.close()


@pytest.fixture
async def store(kit: Kit) -> AsyncIterator[StateStore]:
    """A store with chunks of 1,000 bytes on the shared server."""
    store = await StateStore.open(kit.connection, f"s{kit.root}", replicas=1, **QUICK)
    yield store
    await kit.delete_stream(store.stream)


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def some_bytes(size: int) -> bytes:
    """Bytes in which no two chunks are alike."""
    return b"".join(n.to_bytes(4, "big") for n in range((size + 3) // 4))[:size]


async def save(
    store: StateStore, data: bytes, partition: str = "p", fence: int = 1, position: int = 1
) -> StatePointer:
    return await store.put(partition, pieces(data), fence=fence, position=position)


async def read(store: StateStore, pointer: StatePointer) -> bytes:
    return b"".join([chunk async for chunk in store.get(pointer)])


async def read_into(seen: list[bytes], chunks: AsyncIterator[bytes]) -> None:
    async for chunk in chunks:
        seen.append(chunk)


async def chunks_stored(store: StateStore, api: JetStreamApi) -> int:
    return (await api.stream_info(store.stream)).messages


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 2000, 50_001])
async def test_a_state_of_any_size_comes_back_as_it_was(store: StateStore, kit: Kit, size: int) -> None:
    data = some_bytes(size)
    pointer = await store.put("p", pieces(data), fence=3, position=17, stream_created="then", worker="w")
    assert (pointer.size, pointer.chunks) == (size, -(-size // 1000))
    assert pointer.digest == hashlib.sha256(data).hexdigest()
    assert (pointer.partition, pointer.fence, pointer.position) == ("p", 3, 17)
    assert (pointer.stream_created, pointer.worker, pointer.stream) == ("then", "w", store.stream)
    assert await chunks_stored(store, kit.api) == pointer.chunks
    assert await read(store, pointer) == data


@pytest.mark.parametrize("cut", [1, 7, 999, 1000, 1001, 10_000])
async def test_how_a_snapshot_is_cut_does_not_matter(store: StateStore, cut: int) -> None:
    data = some_bytes(3500)
    parts = [data[at : at + cut] for at in range(0, len(data), cut)]
    pointer = await store.put("p", pieces(*parts, b""), fence=1, position=1)
    assert pointer.chunks == 4
    assert await read(store, pointer) == data


@pytest.mark.parametrize("partition", ["a.b", "*", "Straße 7", "x=2E"])
async def test_any_partition_id_will_do(store: StateStore, partition: str) -> None:
    assert await read(store, await save(store, b"abc", partition)) == b"abc"


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("damage", ["changed", "shorter", "longer", "empty"])
async def test_a_damaged_chunk_is_found_before_the_last_one_is_handed_over(
    store: StateStore, kit: Kit, number: int, damage: str
) -> None:
    data = some_bytes(4000)
    pointer = await save(store, data)
    old = data[number * 1000 : (number + 1) * 1000]
    new = {"changed": old[:500] + b"X" + old[501:], "shorter": old[:-1], "longer": old + b"X", "empty": b""}[damage]
    await kit.api.publish(chunk_subject(pointer.subject, number), new)
    seen: list[bytes] = []
    with pytest.raises(StateCorrupt, match="partition 'p' at position 1 is damaged"):
        await read_into(seen, store.get(pointer))
    assert len(seen) < 4


async def test_a_single_damaged_chunk_is_never_handed_over(store: StateStore, kit: Kit) -> None:
    pointer = await save(store, b"good")
    await kit.api.publish(chunk_subject(pointer.subject, 0), b"evil")
    with pytest.raises(StateCorrupt):
        await anext(store.get(pointer))


async def test_a_pointer_that_lies_is_found_out(store: StateStore) -> None:
    pointer = await save(store, some_bytes(2500))
    for lie in ({"chunks": 2}, {"chunks": 2, "size": 2000}, {"size": 2501}, {"digest": "00" * 32}):
        with pytest.raises(StateCorrupt):
            await read(store, msgspec.structs.replace(pointer, **lie))
    empty = await save(store, b"")
    with pytest.raises(StateCorrupt):
        await read(store, msgspec.structs.replace(empty, size=1))


@pytest.mark.parametrize("number", [0, 2, 3])
async def test_a_missing_chunk_is_told_apart_from_a_damaged_one(store: StateStore, kit: Kit, number: int) -> None:
    pointer = await save(store, some_bytes(4000))
    await kit.api.call(f"STREAM.PURGE.{store.stream}", {"filter": chunk_subject(pointer.subject, number)})
    with pytest.raises(StateRemoved, match=f"chunk {number} of the state of partition 'p'"):
        await read(store, pointer)


async def test_a_snapshot_that_fails_half_way_leaves_nothing_behind(store: StateStore, kit: Kit) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield some_bytes(20_000)
        assert await chunks_stored(store, kit.api) > 0
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        await store.put("p", broken(), fence=1, position=1)
    assert await chunks_stored(store, kit.api) == 0


async def test_of_two_snapshots_each_comes_back_until_it_is_removed(store: StateStore, kit: Kit) -> None:
    first, second = await save(store, some_bytes(5000)), await save(store, some_bytes(3000), position=2)
    assert await read(store, first) == some_bytes(5000)
    assert await store.remove(first) == 5
    assert await read(store, second) == some_bytes(3000)
    assert await chunks_stored(store, kit.api) == 3
    with pytest.raises(StateRemoved, match="read the pointer again"):
        await read(store, first)
    assert await store.remove(first) == 0


async def test_nothing_is_removed_for_a_pointer_without_state(store: StateStore, kit: Kit) -> None:
    pointer = await save(store, b"abc")
    assert await store.remove(StatePointer(partition="p", at=pointer.at)) == 0
    assert await chunks_stored(store, kit.api) == 1


async def test_a_snapshot_that_is_removed_while_it_is_read_ends_in_an_error(store: StateStore) -> None:
    pointer = await save(store, some_bytes(20_000))
    reading = store.get(pointer)
    assert await anext(reading) == some_bytes(1000)
    await store.remove(pointer)
    with pytest.raises(StateRemoved):
        await read_into([], reading)


async def test_older_snapshots_are_removed_and_no_others(store: StateStore) -> None:
    orphan = await save(store, b"orphan of an earlier owner", fence=4, position=90)
    before = await save(store, b"before", fence=5, position=10)
    keep = await save(store, some_bytes(2500), fence=5, position=20)
    others = [
        await save(store, b"begun by this owner since, at the same position", fence=5, position=20),
        await save(store, b"begun by this owner since", fence=5, position=30),
        await save(store, b"of the next owner", fence=6, position=5),
        await save(store, b"another partition", partition="p.q", fence=1, position=1),
        await save(store, b"another partition", partition="q", fence=1, position=1),
    ]
    assert await store.remove_older("p", keep) == 2
    for pointer in (keep, *others):
        assert len(await read(store, pointer)) == pointer.size
    for pointer in (orphan, before):
        with pytest.raises(StateRemoved):
            await read(store, pointer)


async def test_the_sweep_takes_what_nothing_points_at(store: StateStore, kit: Kit) -> None:
    known = [await save(store, some_bytes(3000), partition) for partition in ("a", "b.c", "*")]
    for partition in ("a", "d"):
        await save(store, some_bytes(2000), partition)
    assert await store.sweep(known) == 0  # They may be snapshots on their way to a pointer.
    assert await store.sweep(known, idle_s=0) == 2
    assert await chunks_stored(store, kit.api) == 9
    for pointer in known:
        assert await read(store, pointer) == some_bytes(3000)
    assert await store.sweep(known, idle_s=0) == 0


async def test_the_sweep_finds_what_a_process_left_that_died_in_the_middle(store: StateStore, kit: Kit) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield some_bytes(1000)

    putting = asyncio.create_task(store.put("p", endless(), fence=1, position=1))
    while await chunks_stored(store, kit.api) < 10:  # noqa: ASYNC110 - told by the server alone
        await asyncio.sleep(0.01)
    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting
    assert await store.sweep([], idle_s=0) == 1
    assert await chunks_stored(store, kit.api) == 0


async def test_the_first_chunk_is_stored_before_any_other_is_sent(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By it the sweep finds what is left of a snapshot: without it the rest would stay for ever."""
    events: list[tuple[str, str]] = []
    publish = store._api.publish

    async def watched(subject: str, payload: bytes, **options: Any) -> int:
        number = subject.rpartition(".")[2]
        events.append(("sent", number))
        seq = await publish(subject, payload, **options)
        events.append(("stored", number))
        return seq

    monkeypatch.setattr(store._api, "publish", watched)
    await save(store, some_bytes(9000))
    assert events[:2] == [("sent", "0"), ("stored", "0")]
    assert sorted(number for event, number in events if event == "stored") == [str(n) for n in range(9)]


async def test_a_snapshot_that_stood_still_for_so_long_that_it_may_be_swept_is_not_used(
    store: StateStore, kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parti.jetstream.state_store.MAX_PAUSE_S", 0.0)
    with pytest.raises(StateRemoved, match="take it again"):
        await save(store, some_bytes(5000))
    assert await chunks_stored(store, kit.api) == 0


async def test_many_snapshots_at_once_do_not_mix(store: StateStore) -> None:
    states = {f"p{n}": some_bytes(1500 + n) + b"%d" % n for n in range(40)}
    pointers = await asyncio.gather(*(save(store, data, name) for name, data in states.items()))
    assert await asyncio.gather(*(read(store, p) for p in pointers)) == list(states.values())


async def test_workers_that_start_together_all_open_the_store(kit: Kit) -> None:
    stores = await asyncio.gather(*(StateStore.open(kit.connection, f"s{kit.root}", replicas=1) for _ in range(8)))
    pointer = await save(stores[0], b"abc")
    assert await read(stores[7], pointer) == b"abc"
    await kit.delete_stream(stores[0].stream)


@pytest.mark.parametrize(
    "config", [{"subjects": ["other.>"]}, {"allow_direct": False}, {"retention": "workqueue"}], ids=str
)
async def test_a_stream_of_that_name_that_cannot_serve_is_refused(kit: Kit, config: dict[str, Any]) -> None:
    name = f"s{kit.root}"
    given = {"name": f"{name}-state", "subjects": [f"{name}.state.>"], "storage": "memory", "allow_direct": True}
    given |= {"subjects": [f"{name}.other.>"]} if "subjects" in config else config
    await kit.api.call(f"STREAM.CREATE.{name}-state", given)
    with pytest.raises(ConfigError, match="cannot keep states"):
        await StateStore.open(kit.connection, name, replicas=1)
    await kit.delete_stream(f"{name}-state")


async def test_subjects_that_another_stream_takes_are_a_clear_mistake(kit: Kit) -> None:
    with pytest.raises(ConfigError, match="belong to another stream"):
        await StateStore.open(kit.connection, kit.root, replicas=1)


async def test_a_full_stream_refuses_the_new_state_and_keeps_the_old_ones(store: StateStore, kit: Kit) -> None:
    config = await kit.api.stream_config(store.stream)
    await kit.api.call(f"STREAM.UPDATE.{store.stream}", {**config, "max_bytes": 20_000})
    pointer = await save(store, some_bytes(5000))
    with pytest.raises(ApiError, match="maximum bytes exceeded"):
        await save(store, some_bytes(50_000), position=2)
    assert await read(store, pointer) == some_bytes(5000)
    assert await chunks_stored(store, kit.api) == 5


# -- faults ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("crash", [False, True], ids=["restart", "crash"])
async def test_a_server_that_restarts_in_the_middle_of_a_snapshot(
    nats_server_factory: Callable[..., Server], crash: bool
) -> None:
    server = nats_server_factory()

    async def interrupted() -> AsyncIterator[bytes]:
        for number in range(20):
            yield some_bytes(10_000)
            if number == 10:
                if crash:
                    await server.kill()
                restarting.append(asyncio.create_task(server.restart()))

    restarting: list[asyncio.Task[None]] = []
    async with connected(server.url) as connection:
        store = await StateStore.open(connection, "s", replicas=1, **QUICK)
        pointer = await store.put("p", interrupted(), fence=1, position=1)
        await restarting[0]
        assert await read(store, pointer) == some_bytes(10_000) * 20
        assert await chunks_stored(store, JetStreamApi(connection)) == 200


@pytest.mark.parametrize("crash", [False, True], ids=["restart", "crash"])
async def test_a_server_that_restarts_while_a_state_is_read(
    nats_server_factory: Callable[..., Server], crash: bool
) -> None:
    server = nats_server_factory()
    async with connected(server.url) as connection:
        store = await StateStore.open(connection, "s", replicas=1, **QUICK)
        pointer = await save(store, some_bytes(200_000))
        seen = b""
        restarting: asyncio.Task[None] | None = None
        async for chunk in store.get(pointer):
            seen += chunk
            if len(seen) == 100_000:
                if crash:
                    await server.kill()
                restarting = asyncio.create_task(server.restart())
        assert seen == some_bytes(200_000)
        assert restarting is not None
        await restarting


async def test_chunks_whose_acknowledgements_get_lost_are_stored_once(nats_server: Server, kit: Kit) -> None:
    async with proxy_to(nats_server.port) as proxy, connected(proxy.url) as connection:
        store = await StateStore.open(connection, f"s{kit.root}", replicas=1, **QUICK)
        api = JetStreamApi(kit.connection)
        answers = 0

        def the_thirtieth_is_lost(line: bytes) -> bool:
            nonlocal answers
            # Nothing but an answer: with no other on its way, the INFO of the next connection is what comes then.
            if not ANSWER.fullmatch(line):
                return False
            answers += 1
            if answers != 30:
                return False
            proxy.cut()
            return True

        proxy.lose(the_thirtieth_is_lost)
        pointer = await save(store, some_bytes(100_000))
        assert proxy.lost == 1
        assert proxy.connections == 2
        assert await chunks_stored(store, api) == 100
        assert await read(store, pointer) == some_bytes(100_000)
        await kit.delete_stream(store.stream)


async def test_an_outage_that_lasts_too_long_is_an_error_in_time(nats_server_factory: Callable[..., Server]) -> None:
    server = nats_server_factory()
    async with connected(server.url) as connection:
        store = await StateStore.open(connection, "s", replicas=1, chunk_bytes=1000, stall_s=0.3)
        pointer = await save(store, b"abc")
        await server.kill()
        began_s = unhindered_s()
        with pytest.raises(PartiError, match="not connected"):
            await save(store, b"def")
        with pytest.raises(PartiError, match="not connected"):
            await read(store, pointer)
        assert unhindered_s() - began_s < 15


@pytest.mark.slow
async def test_a_cluster_that_loses_a_node_in_the_middle(nats_cluster: Cluster) -> None:
    async def interrupted() -> AsyncIterator[bytes]:
        for number in range(20):
            yield some_bytes(10_000)
            if number == 10:
                await nats_cluster.kill(leader)

    async with connected(*nats_cluster.urls) as connection:
        store = await StateStore.open(connection, "s", replicas=3, chunk_bytes=1000)
        api = JetStreamApi(connection)
        info = await api.call(f"STREAM.INFO.{store.stream}")
        leader = [server.name for server in nats_cluster.servers].index(info["cluster"]["leader"])
        pointer = await store.put("p", interrupted(), fence=1, position=1)
        assert await read(store, pointer) == some_bytes(10_000) * 20
        # A replica that answers before it has the chunk must not be believed.
        for position in range(2, 22):
            pointer = await save(store, some_bytes(5000), position=position)
            assert await read(store, pointer) == some_bytes(5000)


# -- larger than memory ------------------------------------------------------------------------------------------

LARGE_PIECES, PIECE = 1_600, 64 * 1024
GROWTH_LIMIT_KB = 20_000


class Large:
    """A handler with a state of 100 MB that is never in memory as a whole."""

    def __init__(self) -> None:
        self.read = 0
        self.digest = hashlib.sha256()

    def snapshot(self, _: Partition) -> Iterable[bytes]:
        return self.pieces()

    @staticmethod
    def pieces() -> Iterator[bytes]:
        for number in range(LARGE_PIECES):
            yield number.to_bytes(8, "big") * (PIECE // 8)

    def restore(self, _: Partition, state: SavedState) -> None:
        for chunk in state:
            self.read += len(chunk)
            self.digest.update(chunk)


def memory_kb(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0])


def new_peak_kb() -> int:
    """Forget the largest size so far; returns the present one."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory_kb("VmRSS")


async def move_large_state(url: str, name: str) -> None:
    """Save and load a large state; prints how much more memory that took at its peak than what was used before."""
    handler, partition = Large(), Partition("p", "t.p", {})
    async with connected(url) as connection:
        bucket = await Bucket.open(JetStreamApi(connection), name, replicas=1)
        store = await StateStore.open(connection, name, replicas=1)
        keeper = StateKeeper(handler, store, bucket)
        before_kb = new_peak_kb()
        pointer = await keeper.save(partition, position=7, fence=1)
        assert pointer.chunks == LARGE_PIECES * PIECE // CHUNK_BYTES
        assert await keeper.load(partition, fence=2) == 7
        await keeper.settle()
        grown_kb = memory_kb("VmHWM") - before_kb
        assert handler.read == LARGE_PIECES * PIECE
        assert handler.digest.hexdigest() == pointer.digest
    print(grown_kb)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
async def test_a_state_larger_than_the_memory_that_it_takes(nats_server: Server, kit: Kit) -> None:
    code = (
        "import asyncio; from tests.integration.test_state_store import move_large_state as move; "
        f"asyncio.run(move({nats_server.url!r}, 'b{kit.root}'))"
    )
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    await kit.delete_stream(f"b{kit.root}-state")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < GROWTH_LIMIT_KB
