"""States of handlers from owner to owner on a real server: what counts, who may write it, and what is never used."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from tests.integration.conftest import Kit
from tests.integration.proxy import proxy_to

from parti.config import Settings
from parti.embedded import Server
from parti.errors import LeaseLost, RequestTimeout, StateCorrupt, StateFailed, StateFenced, StateUnavailable
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.kv import Bucket, Entry
from parti.jetstream.state_store import StateStore
from parti.model.fleet import decode
from parti.model.partition import Partition
from parti.model.state import StatePointer, chunk_subject, state_key
from parti.worker.state import PointerStore, StateKeeper
from parti.worker.state_exchange import AsyncSavedState, SavedState

P = Partition("etch1.c3", "dc.etch1.c3", {"tool": "etch1", "chamber": "c3"})


class Plain:
    """A handler whose state is in `data`; notes what it was given."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = data
        self.restored: list[bytes | None] = []
        self.positions: list[int] = []

    def __call__(self, message: Any) -> None: ...

    def snapshot(self, partition: Partition) -> bytes:
        assert partition == P
        return self.data

    def restore(self, partition: Partition, state: SavedState | None) -> None:
        assert partition == P
        self.data = state.read() if state else b""
        self.restored.append(self.data if state else None)
        if state:
            self.positions.append(state.position)


class Coroutines(Plain):
    """The same with coroutines and an async iterator."""

    async def snapshot(self, partition: Partition) -> AsyncIterator[bytes]:  # type: ignore[override]
        for at in range(0, len(self.data), 700):
            yield self.data[at : at + 700]

    async def restore(self, partition: Partition, state: AsyncSavedState | None) -> None:  # type: ignore[override]
        self.data = b"".join([chunk async for chunk in state]) if state else b""
        self.restored.append(self.data if state else None)


class Setup:
    """A store with small chunks and a bucket on the shared server."""

    def __init__(self, kit: Kit, store: StateStore, bucket: Bucket) -> None:
        self.api = kit.api
        self.store = store
        self.bucket = bucket
        self._keepers: list[StateKeeper] = []

    def keeper(self, handler: Any, pointers: PointerStore | None = None) -> StateKeeper:
        self._keepers.append(StateKeeper(handler, self.store, pointers or self.bucket))
        return self._keepers[-1]

    async def pointer(self) -> StatePointer | None:
        entry = await self.bucket.get(state_key(P.id))
        return decode(entry.value, StatePointer) if entry else None

    async def chunks(self) -> int:
        """How many are stored when all keepers have cleared up."""
        for keeper in self._keepers:
            await keeper.settle()
        return (await self.api.stream_info(self.store.stream)).messages

    async def damage(self, number: int) -> None:
        pointer = await self.pointer()
        assert pointer
        await self.api.publish(chunk_subject(pointer.subject, number), b"X")


@pytest.fixture
async def setup(kit: Kit) -> AsyncIterator[Setup]:
    store = await StateStore.open(kit.connection, f"b{kit.root}", replicas=1, chunk_bytes=1000, stall_s=5.0)
    setup = Setup(kit, store, await Bucket.open(kit.api, f"b{kit.root}", replicas=1))
    yield setup
    await setup.chunks()
    await kit.delete_stream(store.stream)


STATE = bytes(range(256)) * 20


@pytest.mark.parametrize("kind", [Plain, Coroutines])
async def test_the_next_owner_begins_with_the_state_and_at_its_position(setup: Setup, kind: type[Plain]) -> None:
    old, new = kind(STATE), kind()
    saved = await setup.keeper(old).save(P, position=42, fence=7, worker="worker-0", stream_created="then")
    assert await setup.keeper(new).load(P, fence=8, stream_created="then") == 42
    assert new.data == STATE
    pointer = await setup.pointer()
    assert pointer
    assert (pointer.fence, pointer.subject, pointer.worker) == (8, saved.subject, "worker-0")


async def test_a_partition_that_never_had_a_state_begins_with_none(setup: Setup) -> None:
    new = Plain(b"of another partition")
    assert await setup.keeper(new).load(P, fence=1) is None
    assert new.restored == [None]


async def test_an_empty_state_is_a_state(setup: Setup) -> None:
    await setup.keeper(Plain(b"")).save(P, position=9, fence=1)
    new = Plain()
    assert await setup.keeper(new).load(P, fence=2) == 9
    assert new.restored == [b""]


async def test_only_the_newest_checkpoint_is_kept(setup: Setup) -> None:
    handler = Plain()
    keeper = setup.keeper(handler)
    await keeper.load(P, fence=3)
    for position in range(1, 6):
        handler.data = STATE + b"%d" % position
        await keeper.save(P, position=position, fence=3)
    assert await setup.chunks() == 6
    new = Plain()
    assert await setup.keeper(new).load(P, fence=4) == 5
    assert new.data == STATE + b"5"


async def test_after_a_crash_the_last_checkpoint_counts_and_what_was_begun_is_cleared(setup: Setup) -> None:
    await setup.keeper(Plain(STATE)).save(P, position=10, fence=1)

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield STATE

    dying = asyncio.create_task(setup.store.put(P.id, endless(), fence=1, position=20))
    while await setup.chunks() < 20:  # noqa: ASYNC110 - told by the server alone
        await asyncio.sleep(0.01)
    dying.cancel()
    await asyncio.gather(dying, return_exceptions=True)
    new = Plain()
    assert await setup.keeper(new).load(P, fence=2) == 10
    assert new.data == STATE
    assert await setup.chunks() == 6


async def test_a_replaced_owner_cannot_save_and_leaves_nothing_behind(setup: Setup) -> None:
    old, new = Plain(STATE), Plain()
    await setup.keeper(old).save(P, position=10, fence=1)
    await setup.keeper(new).load(P, fence=2)
    with pytest.raises(StateFenced, match=r"'etch1\.c3' .*fence token 2, ours is 1"):
        await setup.keeper(old).save(P, position=20, fence=1)
    with pytest.raises(StateFenced):
        await setup.keeper(old).load(P, fence=1)
    pointer = await setup.pointer()
    assert pointer
    assert pointer.position == 10
    assert await setup.chunks() == 6


@pytest.mark.parametrize("saved_before", [True, False])
async def test_an_owner_that_is_replaced_while_it_saves_changes_nothing(setup: Setup, saved_before: bool) -> None:
    """Also where there was no state yet: the next owner began with none, and that is what stands."""

    class Slow(Plain):
        async def snapshot(self, partition: Partition) -> bytes:  # type: ignore[override]
            assert await setup.keeper(new).load(P, fence=2) == (10 if saved_before else None)
            return b"late"

    new = Plain()
    if saved_before:
        await setup.keeper(Plain(STATE)).save(P, position=10, fence=1)
    with pytest.raises(StateFenced):
        await setup.keeper(Slow()).save(P, position=20, fence=1)
    pointer = await setup.pointer()
    assert pointer
    assert (pointer.fence, pointer.position) == (2, 10 if saved_before else 0)
    assert await setup.chunks() == (6 if saved_before else 0)


async def test_a_snapshot_that_raises_leaves_the_state_before(setup: Setup) -> None:
    class Broken(Plain):
        def snapshot(self, partition: Partition) -> Iterator[bytes]:  # type: ignore[override]
            yield STATE
            raise OSError("disk gone")

    keeper = setup.keeper(Plain(STATE))
    await keeper.save(P, position=10, fence=1)
    with pytest.raises(StateFailed, match=r"snapshot of partition 'etch1\.c3' failed: OSError: disk gone"):
        await setup.keeper(Broken()).save(P, position=20, fence=1)
    new = Plain()
    assert await setup.keeper(new).load(P, fence=2) == 10
    assert new.data == STATE


@pytest.mark.parametrize("kind", [Plain, Coroutines])
async def test_a_restore_that_raises_is_an_error_and_the_state_stays(setup: Setup, kind: type[Plain]) -> None:
    class Broken(kind):  # type: ignore[misc, valid-type]
        def restore(self, partition: Partition, state: Any) -> Any:
            raise ValueError("unknown version")

    await setup.keeper(Plain(STATE)).save(P, position=10, fence=1)
    with pytest.raises(StateFailed, match=r"restore of partition 'etch1\.c3' failed: ValueError: unknown version"):
        await setup.keeper(Broken()).load(P, fence=2)
    new = Plain()
    assert await setup.keeper(new).load(P, fence=3) == 10
    assert new.data == STATE


async def test_a_restore_that_raises_without_a_state_is_an_error_too(setup: Setup) -> None:
    class Broken(Plain):
        def restore(self, partition: Partition, state: Any) -> None:
            raise ValueError("no room")

    with pytest.raises(StateFailed, match="no room"):
        await setup.keeper(Broken()).load(P, fence=1)


class Stubborn(Plain):
    """Takes whatever it gets for a state, and keeps errors to itself."""

    def restore(self, partition: Partition, state: SavedState | None) -> None:
        with contextlib.suppress(Exception):
            for chunk in state or ():
                self.data += chunk


class Wrapping(Plain):
    """Makes an error of its own out of every other."""

    def restore(self, partition: Partition, state: SavedState | None) -> None:
        try:
            super().restore(partition, state)
        except Exception as error:
            raise ValueError("cannot restore") from error


class Lazy(Plain):
    """Reads the first piece only."""

    def restore(self, partition: Partition, state: SavedState | None) -> None:
        self.data = next(state) if state else b""


@pytest.mark.parametrize("kind", [Plain, Coroutines, Stubborn, Wrapping, Lazy])
async def test_a_damaged_state_is_an_error_whatever_the_handler_makes_of_it(setup: Setup, kind: type[Plain]) -> None:
    await setup.keeper(Plain(STATE)).save(P, position=10, fence=1)
    await setup.damage(5)
    with pytest.raises(StateCorrupt, match=r"partition 'etch1\.c3' at position 10 is damaged"):
        await setup.keeper(kind()).load(P, fence=2)


async def test_a_state_of_which_the_handler_reads_a_part_is_good(setup: Setup) -> None:
    await setup.keeper(Plain(STATE)).save(P, position=10, fence=1)
    new = Lazy()
    assert await setup.keeper(new).load(P, fence=2) == 10
    assert new.data == STATE[:1000]


async def test_a_lost_state_is_an_error_and_not_an_empty_one(setup: Setup) -> None:
    pointer = await setup.keeper(Plain(STATE)).save(P, position=10, fence=1)
    await setup.store.remove(pointer)
    new = Plain()
    with pytest.raises(StateCorrupt, match="it is lost"):
        await setup.keeper(new).load(P, fence=2)
    assert new.restored == []


async def test_an_unreadable_pointer_is_an_error_and_not_an_empty_state(setup: Setup) -> None:
    await setup.bucket.put(state_key(P.id), b"{", revision=0)
    new = Plain()
    for attempt in (setup.keeper(new).load(P, fence=2), setup.keeper(new).save(P, position=1, fence=2)):
        with pytest.raises(StateCorrupt, match=r"delete the key 'state\.etch1\.c3'"):
            await attempt
    assert new.restored == []


async def test_a_deleted_pointer_means_no_state(setup: Setup) -> None:
    await setup.keeper(Plain(STATE)).save(P, position=10, fence=1)
    entry = await setup.bucket.get(state_key(P.id))
    assert entry
    await setup.bucket.delete(state_key(P.id), revision=entry.revision)
    new = Plain()
    assert await setup.keeper(new).load(P, fence=2) is None
    await setup.keeper(new).save(P, position=1, fence=2)
    assert await setup.keeper(new).load(P, fence=3) == 1


async def test_the_state_of_a_stream_that_was_made_anew_is_not_used(setup: Setup) -> None:
    await setup.keeper(Plain(STATE)).save(P, position=10_000, fence=1, stream_created="then")
    new = Plain()
    keeper = setup.keeper(new)
    assert await keeper.load(P, fence=2, stream_created="now") is None
    assert new.restored == [None]
    await keeper.save(P, position=3, fence=2, stream_created="now")
    assert await setup.chunks() == 0
    assert await setup.keeper(Plain()).load(P, fence=3, stream_created="now") == 3


async def test_without_fences_a_state_that_is_replaced_while_it_is_read_is_read_anew(setup: Setup) -> None:
    class Reader(Plain):
        async def restore(self, partition: Partition, state: AsyncSavedState | None) -> None:  # type: ignore[override]
            assert state
            first = await anext(state)
            if not self.restored:
                self.restored.append(first)
                await setup.keeper(Plain(b"newer")).save(P, position=20, fence=0)
            self.data = first + await state.read()

    await setup.keeper(Plain(STATE * 4)).save(P, position=10, fence=0)
    reader = Reader()
    assert await setup.keeper(reader).load(P, fence=0) == 20
    assert reader.data == b"newer"


async def test_an_owner_that_is_replaced_while_it_loads_is_told(setup: Setup) -> None:
    class Reader(Plain):
        async def restore(self, partition: Partition, state: AsyncSavedState | None) -> None:  # type: ignore[override]
            assert state
            await anext(state)
            other = setup.keeper(Plain(b"newer"))
            await other.load(P, fence=3)
            await other.save(P, position=20, fence=3)
            await state.read()

    await setup.keeper(Plain(STATE * 4)).save(P, position=10, fence=1)
    with pytest.raises(StateFenced):
        await setup.keeper(Reader()).load(P, fence=2)


async def test_a_cancelled_load_ends_a_restore_in_its_thread(setup: Setup) -> None:
    class Blocked(Plain):
        def restore(self, partition: Partition, state: SavedState | None) -> None:
            assert state
            next(state)
            reading.set()
            goes_on.wait(10)
            try:
                state.read()
            except Exception as error:
                ended.append(error)
            done.set()

    reading, goes_on, done = threading.Event(), threading.Event(), threading.Event()
    ended: list[Exception] = []
    await setup.keeper(Plain(STATE)).save(P, position=10, fence=1)
    loading = asyncio.create_task(setup.keeper(Blocked()).load(P, fence=2))
    assert await asyncio.to_thread(reading.wait, 5)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    goes_on.set()
    assert await asyncio.to_thread(done.wait, 5)
    assert [type(error) for error in ended] == [StateFailed]


async def test_no_more_run_at_once_than_allowed(setup: Setup) -> None:
    class Counted(Plain):
        def snapshot(self, partition: Partition) -> bytes:
            with lock:
                running.append(partition)
                counts.append(len(running))
            alone.wait(0.1)
            with lock:
                running.remove(partition)
            return b"x"

    running: list[Partition] = []
    counts: list[int] = []
    lock, alone = threading.Lock(), threading.Event()
    keeper = StateKeeper(Counted(), setup.store, setup.bucket, at_once=2)
    partitions = [Partition(f"p{n}", f"t.p{n}", {}) for n in range(6)]
    await asyncio.gather(*(keeper.save(p, position=1, fence=1) for p in partitions))
    await keeper.settle()
    assert max(counts) == 2


# -- faults ------------------------------------------------------------------------------------------------------


class Unsure:
    """A bucket whose next writes take effect, or do not, without an answer."""

    def __init__(self, bucket: Bucket, *effects: bool) -> None:
        self._bucket = bucket
        self._effects = list(effects)

    async def get(self, key: str) -> Entry | None:
        return await self._bucket.get(key)

    async def put(self, key: str, value: bytes, *, revision: int) -> int:
        if not self._effects:
            return await self._bucket.put(key, value, revision=revision)
        if self._effects.pop(0):
            await self._bucket.put(key, value, revision=revision)
        raise RequestTimeout("no answer")


@pytest.mark.parametrize("effects", [(True,), (False,), (False, False, True), (False, False, False)], ids=str)
async def test_pointers_whose_writes_get_no_answer_are_written_once(setup: Setup, effects: tuple[bool, ...]) -> None:
    await setup.keeper(Plain(STATE), Unsure(setup.bucket, *effects)).save(P, position=10, fence=1)
    new = Plain()
    assert await setup.keeper(new, Unsure(setup.bucket, *effects)).load(P, fence=2) == 10
    assert new.data == STATE
    assert await setup.chunks() == 6


async def test_a_pointer_that_cannot_be_written_leaves_the_state_before(setup: Setup) -> None:
    await setup.keeper(Plain(b"before")).save(P, position=10, fence=1)
    with pytest.raises(StateUnavailable, match=r"'etch1\.c3'"):
        await setup.keeper(Plain(STATE), Unsure(setup.bucket, *[False] * 9)).save(P, position=20, fence=1)
    new = Plain()
    assert await setup.keeper(new).load(P, fence=2) == 10
    assert new.data == b"before"


async def test_a_write_that_arrives_long_after_it_was_given_up_is_replaced_by_the_next(setup: Setup) -> None:
    class Late(Unsure):
        async def put(self, key: str, value: bytes, *, revision: int) -> int:
            if not held:
                held.append((key, value, revision))
            elif len(held) == 1 and value != held[0][1]:
                held.append(held[0])
                await self._bucket.put(held[0][0], held[0][1], revision=held[0][2])
            return await super().put(key, value, revision=revision)

    held: list[tuple[str, bytes, int]] = []
    late = Late(setup.bucket, *[False] * 5)
    keeper = setup.keeper(Plain(STATE), late)
    with pytest.raises(StateUnavailable):
        await keeper.save(P, position=10, fence=1)
    await keeper.save(P, position=20, fence=1)
    pointer = await setup.pointer()
    assert pointer
    assert pointer.position == 20
    assert await setup.chunks() == 6


@pytest.mark.parametrize("fence", [0, 2])
async def test_a_bucket_that_only_looks_empty_is_not_believed(setup: Setup, fence: int) -> None:
    """While a server restarts, a stream may be "not found" for a moment, and a read finds nothing."""

    class Forgetful(Unsure):
        reads = 0

        async def get(self, key: str) -> Entry | None:
            self.reads += 1
            return None if self.reads == 1 else await super().get(key)

    await setup.keeper(Plain(STATE)).save(P, position=10, fence=fence and 1)
    new = Plain()
    assert await setup.keeper(new, Forgetful(setup.bucket)).load(P, fence=fence) == 10
    assert new.restored == [STATE]


async def test_a_lost_lease_is_told_as_such(setup: Setup) -> None:
    class Ended(Unsure):
        async def put(self, key: str, value: bytes, *, revision: int) -> int:
            raise LeaseLost("the lease has ended")

    with pytest.raises(LeaseLost):
        await setup.keeper(Plain(STATE), Ended(setup.bucket)).save(P, position=1, fence=1)
    assert await setup.pointer() is None


async def test_a_connection_that_breaks_again_and_again_changes_nothing(nats_server: Server, setup: Setup) -> None:
    name = setup.bucket.name
    settings: Callable[[str], Settings] = lambda url: Settings(nats=(url,), reconnect_wait_s=0.05)  # noqa: E731
    async with proxy_to(nats_server.port) as proxy:
        connection = await Connection.open(settings(proxy.url), name="test")
        messages = 0

        def every_fortieth_cuts(_: bytes) -> bool:
            nonlocal messages
            messages += 1
            if messages % 40:
                return False
            proxy.cut()
            return True

        try:
            store = StateStore(connection, name, chunk_bytes=1000, stall_s=10.0)
            keeper = StateKeeper(Plain(STATE * 20), store, Bucket(JetStreamApi(connection), name))
            new = Plain()
            proxy.lose(every_fortieth_cuts)
            await keeper.save(P, position=10, fence=1)
            other = StateKeeper(new, store, Bucket(JetStreamApi(connection), name))
            assert await other.load(P, fence=2) == 10
            await other.settle()
        finally:
            proxy.lose(None)
            await connection.close()
        assert new.data == STATE * 20
        assert proxy.connections > 3
        assert await setup.chunks() == len(STATE) * 20 // 1000 + 1


async def test_a_server_that_is_gone_is_named_with_the_partition(nats_server_factory: Callable[..., Server]) -> None:
    server = nats_server_factory()
    connection = await Connection.open(Settings(nats=(server.url,)), name="test")
    try:
        store = await StateStore.open(connection, "s", replicas=1, stall_s=0.2)
        bucket = await Bucket.open(JetStreamApi(connection, timeout_s=0.2), "s", replicas=1)
        keeper = StateKeeper(Plain(STATE), store, bucket)
        await server.kill()
        with pytest.raises(StateUnavailable, match=r"state of partition 'etch1\.c3' could not be saved"):
            await keeper.save(P, position=1, fence=1)
        with pytest.raises(StateUnavailable, match=r"state of partition 'etch1\.c3' could not be loaded"):
            await keeper.load(P, fence=1)
    finally:
        await connection.close()
