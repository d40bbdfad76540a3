"""Backlogs on the real server: in order, complete, and never "no more" unless the leader says so."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from tests.integration.conftest import Kit, becomes_pending, eventually
from tests.integration.proxy import Proxy, proxy_to
from tests.pace import unhindered_s

from parti.config import Settings
from parti.embedded import Cluster, Server
from parti.embedded.monitor import ask
from parti.errors import ApiError, NotFound, PartiError
from parti.jetstream.api import JetStreamApi, StreamInfo
from parti.jetstream.backlog import BacklogReader, DirectBatch, Page
from parti.jetstream.connection import Connection
from parti.jetstream.direct import Stored
from parti.jetstream.wire import Wire, pub

SILENCE = "parti.jetstream.backlog._SILENCE_S"


class Reading:
    """A reader on a connection of its own choice."""

    def __init__(self, connection: Connection, stream: StreamInfo, *, tell: bool = True) -> None:
        self.connection = connection
        self.api = JetStreamApi(connection)
        self.wire = Wire(connection.client)
        self.stream = stream
        self.reader = BacklogReader(self.api, self.wire, stream, connection=connection if tell else None)

    async def read(self, subject: str, seq: int = 1, *, up_to: int = 0, batch: int = 100, **more: int) -> Page:
        return await self.reader.read(subject, seq, up_to=up_to or self.stream.last_seq, batch=batch, **more)

    async def read_all(self, subject: str, seq: int = 1, *, up_to: int = 0, batch: int = 100) -> list[Stored]:
        """Page by page to the end, as a worker does it: what fails is tried again."""
        found: list[Stored] = []
        deadline = time.monotonic() + 20
        while True:
            assert time.monotonic() < deadline, f"no end after {len(found)} messages"
            try:
                page = await self.read(subject, seq, up_to=up_to, batch=batch)
            except PartiError:
                await asyncio.sleep(0.05)
                continue
            found += page.messages
            if page.exhausted:
                return found
            seq = found[-1].seq + 1 if found else seq


async def reading(kit: Kit, *, direct: bool | None = None) -> Reading:
    """A reader on the kit's connection; `direct` makes it believe what the stream allows."""
    info = await kit.api.stream_info(kit.stream)
    if direct is not None:
        info = dataclasses.replace(info, allow_direct=direct)
    return Reading(kit.connection, info)


@asynccontextmanager
async def through(proxy: Proxy, stream: StreamInfo, *, tell: bool = True) -> AsyncIterator[Reading]:
    """A reader whose connection goes through the proxy."""
    settings = Settings(nats=(proxy.url,), reconnect_wait_s=0.02)
    connection = await Connection.open(settings, name="cut")
    try:
        yield Reading(connection, stream, tell=tell)
    finally:
        await connection.close()


async def publish_raw(wire: Wire, subject: str, header: bytes, data: bytes = b"") -> None:
    """Publish a header block as it is, well-formed or not, and wait until it is stored."""
    stored: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    inbox = wire.new_inbox()
    sid = wire.subscribe(inbox, lambda _subject, _reply, _header, payload: stored.set_result(payload))
    size = len(header)
    wire.write(b"HPUB %b %b %d %d\r\n" % (subject.encode(), inbox.encode(), size, size + len(data)))
    wire.write(b"%b%b\r\n" % (header, data))
    async with asyncio.timeout(5):
        assert "seq" in json.loads(await stored)
    wire.unsubscribe(sid)


def subscriptions(server: Server, connection: Connection) -> int:
    """How many the server counts for this connection."""
    found = ask(server.monitor_port, f"/connz?cid={connection.server_info['client_id']}")
    assert found
    return int(found["connections"][0]["subscriptions"])


def seqs_of(messages: list[Stored] | tuple[Stored, ...]) -> list[int]:
    return [stored.seq for stored in messages]


# ── what is read ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("storage", ["memory", "file"])
@pytest.mark.parametrize("direct", [True, False])
async def test_every_message_of_one_subject_in_order(kit: Kit, storage: str, direct: bool) -> None:
    await kit.delete_stream()
    await kit.create_stream(storage=storage, allow_direct=direct)
    sent = await kit.publish(["a", "b", "c"], each=50, data=b"payload")
    read = await reading(kit)
    for batch in (1, 7, 50, 1000):
        found = await read.read_all(kit.subject("b"), batch=batch)
        assert seqs_of(found) == sent["b"]
    assert {(stored.subject, stored.data, stored.header) for stored in found} == {
        (kit.subject("b"), b"payload", None)
    }
    assert seqs_of(await read.read_all(kit.subject("b"), sent["b"][20] + 1)) == sent["b"][21:]
    assert await read.read(kit.subject("nobody")) == Page((), exhausted=True)


@pytest.mark.parametrize("retention", ["interest", "workqueue"])
async def test_reading_takes_nothing_out_of_the_stream(kit: Kit, retention: str) -> None:
    await kit.delete_stream()
    await kit.create_stream(retention=retention)
    owner = {"name": "owner", "durable_name": "owner", "ack_policy": "explicit", "filter_subject": kit.subject("a")}
    await kit.api.put_consumer(kit.stream, owner, action="create")
    sent = await kit.publish(["a"], each=30)
    read = await reading(kit)
    assert seqs_of(await read.read_all(kit.subject("a"), batch=8)) == sent["a"]
    assert (await kit.api.stream_info(kit.stream)).messages == 30
    await becomes_pending(kit.api, kit.stream, {"owner": 30})


async def test_a_direct_read_and_the_leaders_say_the_same(kit: Kit) -> None:
    await kit.publish(["a", "b"], each=20)
    direct = await (await reading(kit)).read_all(kit.subject("a"))
    leaders = await (await reading(kit, direct=False)).read_all(kit.subject("a"))
    assert direct == leaders
    assert len(direct) == 20


async def test_a_wildcard_reads_its_subjects_in_stream_order(kit: Kit) -> None:
    sent = await kit.publish(["a.1", "b.1", "a.2"], each=20)
    read = await reading(kit)
    found = await read.read_all(kit.subject("a.*"), batch=7)
    assert seqs_of(found) == sorted(sent["a.1"] + sent["a.2"])
    assert {stored.subject for stored in found} == {kit.subject("a.1"), kit.subject("a.2")}
    assert len(await read.read_all(f"{kit.root}.>")) == 60


async def test_gaps_left_by_deletes_and_purges_are_no_holes(kit: Kit) -> None:
    sent = (await kit.publish(["a", "b"], each=40))["a"]
    for seq in sent[10:20]:
        await kit.api.call(f"STREAM.MSG.DELETE.{kit.stream}", {"seq": seq})
    await kit.api.call(f"STREAM.PURGE.{kit.stream}", {"seq": sent[5]})
    read = await reading(kit)
    assert seqs_of(await read.read_all(kit.subject("a"), batch=8)) == sent[5:10] + sent[20:]
    await kit.api.call(f"STREAM.PURGE.{kit.stream}", {"filter": kit.subject("a")})
    assert await read.read(kit.subject("a")) == Page((), exhausted=True)


@pytest.mark.parametrize("direct", [True, False])
async def test_nothing_above_the_bound_is_read(kit: Kit, direct: bool) -> None:
    sent = (await kit.publish(["a", "b"], each=30))["a"]
    read = await reading(kit, direct=direct)
    for up_to in (sent[9], sent[9] + 1):
        page = await read.read(kit.subject("a"), up_to=up_to)
        assert (seqs_of(page.messages), page.exhausted) == (sent[:10], True)
    assert await read.read(kit.subject("a"), sent[3] + 1, up_to=sent[4] - 1) == Page((), exhausted=True)
    assert await read.read(kit.subject("a"), 9, up_to=8) == Page((), exhausted=True)
    full = await read.read(kit.subject("a"), up_to=sent[9] - 1, batch=9)
    assert (seqs_of(full.messages), full.exhausted) == (sent[:9], False)  # nobody has looked beyond
    assert await read.read(kit.subject("a"), sent[8] + 1, up_to=sent[9] - 1) == Page((), exhausted=True)


@pytest.mark.parametrize("direct", [True, False])
async def test_a_page_is_bounded_by_bytes_and_holds_at_least_one(kit: Kit, direct: bool) -> None:
    sent = (await kit.publish(["a"], each=6, data=bytes(900_000)))["a"]
    read = await reading(kit, direct=direct)
    page = await read.read(kit.subject("a"), max_bytes=1)
    assert (seqs_of(page.messages), page.exhausted) == (sent[:1], False)
    assert len((await read.read(kit.subject("a"), max_bytes=2_000_000)).messages) == 3
    found = await read.read_all(kit.subject("a"))
    assert seqs_of(found) == sent
    assert {len(stored.data) for stored in found} == {900_000}


async def test_headers_come_back_as_they_were_published(kit: Kit) -> None:
    read = await reading(kit)
    forged = (
        b"NATS/1.0\r\nNats-Stream: X\r\nNats-Subject: forged\r\nNats-Sequence: 99\r\nNats-Time-Stamp: never\r\n"
        b"Nats-Num-Pending: 0\r\nNats-Last-Sequence: 98\r\n\r\n"
    )
    blocks = [
        b"NATS/1.0\r\nA: b\r\nA: c\r\n\r\n",
        forged,
        b"NATS/1.0 204 EOB\r\nNats-Num-Pending: 0\r\nNats-Last-Sequence: 0\r\n\r\n",
        b"NATS/1.0 404 Message Not Found\r\n\r\n",
        b"NATS/1.0 503\r\n\r\n",
        b"NATS/1.0\r\n\r\n",
        b"NATS/1.0\r\nno end: of the block",
        b"NATS/1.0\r\nno end: of the block\r\n",
        b"NATS/1.0\r\nlast: one\r\n\r\n",
    ]
    for data in (b"", b"data"):
        for block in blocks:
            await publish_raw(read.wire, kit.subject("a"), block, data)
        await kit.publish(["a"], data=data)
    last = (await kit.api.stream_info(kit.stream)).last_seq
    leaders = [await kit.api.next_on_subject(kit.stream, kit.subject("a"), seq) for seq in range(1, last + 1)]
    found = await read.read_all(kit.subject("a"), up_to=last)
    assert [bare(stored) for stored in found] == [bare(stored) for stored in leaders if stored]
    assert len(found) == 2 * (len(blocks) + 1)
    assert found[1].header == forged
    assert found[6].header == blocks[6]


def bare(stored: Stored) -> Stored:
    """The server does not tell a block without headers from no block."""
    return dataclasses.replace(stored, header=None) if stored.header == b"NATS/1.0\r\n\r\n" else stored


async def test_many_backlogs_are_read_at_the_same_time(kit: Kit, nats_server: Server) -> None:
    partitions = [f"p{number}" for number in range(20)]
    sent = await kit.publish(partitions, each=50)
    read = await reading(kit)
    before = subscriptions(nats_server, kit.connection)
    found = await asyncio.gather(*(read.read_all(kit.subject(p), batch=16) for p in partitions))
    assert {p: seqs_of(messages) for p, messages in zip(partitions, found, strict=True)} == sent
    await kit.connection.flush()
    assert subscriptions(nats_server, kit.connection) == before


async def test_a_stream_that_no_longer_allows_direct_reads_is_read_all_the_same(kit: Kit) -> None:
    sent = await kit.publish(["a", "b"], each=10)
    read = await reading(kit)
    config = await kit.api.stream_config(kit.stream)
    await kit.api.call(f"STREAM.UPDATE.{kit.stream}", {**config, "allow_direct": False})
    assert seqs_of(await read.read_all(kit.subject("a"))) == sent["a"]


# ── what is not there ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("direct", [True, False])
async def test_a_deleted_stream_is_not_exhausted(kit: Kit, direct: bool) -> None:
    await kit.publish(["a"], each=5)
    read = await reading(kit, direct=direct)
    await kit.delete_stream()
    with pytest.raises(NotFound):
        await read.read(kit.subject("a"))
    await kit.create_stream()
    await kit.publish(["b"], each=9)
    with pytest.raises(NotFound, match="made anew"):
        await read.read(kit.subject("a"))


async def test_a_page_of_two_streams_of_one_name_is_not_handed_over(kit: Kit) -> None:
    await kit.publish(["a"], each=50)
    read = await reading(kit, direct=False)
    task = asyncio.create_task(read.read(kit.subject("a")))
    await asyncio.sleep(0)  # under way: the first message is asked for
    read.reader.follow(dataclasses.replace(read.stream, created="later"))
    with pytest.raises(NotFound, match="made anew"):
        await task
    await kit.delete_stream()
    await kit.create_stream()
    sent = await kit.publish(["a"], each=3)
    read.reader.follow(await kit.api.stream_info(kit.stream))
    assert seqs_of((await read.read(kit.subject("a"), up_to=3)).messages) == sent["a"]


async def test_a_stream_that_ends_before_the_bound_is_not_exhausted(kit: Kit) -> None:
    sent = await kit.publish(["a"], each=5)
    read = await reading(kit)
    page = await read.read(kit.subject("a"), up_to=6)
    assert (seqs_of(page.messages), page.exhausted) == (sent["a"], False)
    with pytest.raises(ApiError, match="ends at 5"):
        await read.read(kit.subject("a"), 6, up_to=6)
    await kit.publish(["b"])
    assert await read.read(kit.subject("a"), 6, up_to=6) == Page((), exhausted=True)


# ── what gets lost on the way ─────────────────────────────────────────────────────────────────────────────────


def nth_answer(number: int, then: Callable[[], bool]) -> Callable[[bytes], bool]:
    """Calls `then` when the server says its `number`-th message with headers, and loses what it returns True for."""
    seen = 0

    def loses(line: bytes) -> bool:
        nonlocal seen
        seen += line.startswith(b"HMSG")
        return line.startswith(b"HMSG") and seen == number and then()

    return loses


@pytest.mark.parametrize("number", [1, 2, 6, 10, 11])
async def test_a_lost_message_ends_the_page_before_it(
    kit: Kit, nats_server: Server, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The eleventh is the status at the end of the batch."""
    monkeypatch.setattr(SILENCE, 0.1)
    sent = (await kit.publish(["a", "b"], each=10))["a"]
    stream = await kit.api.stream_info(kit.stream)
    async with proxy_to(nats_server.port) as proxy, through(proxy, stream) as read:
        proxy.lose(nth_answer(number, lambda: True))
        page = await read.read(kit.subject("a"))
        assert proxy.lost == 1
        if number == 1:
            assert (seqs_of(page.messages), page.exhausted) == (sent, True)  # from the leader
        else:
            assert (seqs_of(page.messages), page.exhausted) == (sent[: number - 1], False)
        assert seqs_of(await read.read_all(kit.subject("a"), page.messages[-1].seq + 1)) == sent[number - 1 :] * (
            number > 1
        )


@pytest.mark.parametrize("tell", [True, False])
@pytest.mark.parametrize("number", [1, 400])
async def test_a_connection_cut_in_the_middle_of_a_page(
    kit: Kit, nats_server: Server, number: int, tell: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SILENCE, 20.0 if tell else 0.2)  # told of the break, a reader does not wait for silence
    sent = (await kit.publish(["a"], each=1000, data=bytes(2000)))["a"]
    stream = await kit.api.stream_info(kit.stream)
    async with proxy_to(nats_server.port) as proxy, through(proxy, stream, tell=tell) as read:

        def cut() -> bool:
            proxy.cut()
            return True

        proxy.lose(nth_answer(number, cut))
        started_s = unhindered_s()
        found = await read.read_all(kit.subject("a"), batch=1000)
        assert seqs_of(found) == sent
        assert proxy.connections >= 2
        assert unhindered_s() - started_s < 10
        await read.connection.flush()
        assert subscriptions(nats_server, read.connection) == 1  # the connection's own inbox


async def test_a_read_without_a_connection_says_so(kit: Kit, nats_server: Server) -> None:
    sent = (await kit.publish(["a"], each=10))["a"]
    stream = await kit.api.stream_info(kit.stream)
    async with proxy_to(nats_server.port) as proxy, through(proxy, stream) as read:
        proxy.refuse()
        await eventually(lambda: not read.connection.client.is_connected)
        with pytest.raises(PartiError):
            await read.read(kit.subject("a"))
        proxy.refuse(False)
        assert seqs_of(await read.read_all(kit.subject("a"))) == sent


async def test_a_cancelled_read_leaves_no_subscription(kit: Kit, nats_server: Server) -> None:
    await kit.publish(["a"], each=10)
    stream = await kit.api.stream_info(kit.stream)
    async with proxy_to(nats_server.port) as proxy, through(proxy, stream) as read:
        proxy.lose(lambda line: line.startswith(b"HMSG"))
        task = asyncio.create_task(read.read(kit.subject("a")))
        await eventually(lambda: proxy.lost > 0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await read.connection.flush()
        assert subscriptions(nats_server, read.connection) == 1


# ── replicas that lag, hang or are none ───────────────────────────────────────────────────────────────────────


class Replica:
    """Answers direct gets of a stream that does not, as a replica does that knows only some of the messages."""

    def __init__(self, read: Reading, known: list[Stored] | None) -> None:
        self._known = known
        self._wire = read.wire
        self._stream = read.stream.name
        self.asked = 0
        self._sid = self._wire.subscribe(f"$JS.API.DIRECT.GET.{self._stream}", self._answer)

    def stop(self) -> None:
        self._wire.unsubscribe(self._sid)

    def _answer(self, _subject: bytes, reply: bytes, _header: bytes | None, payload: bytes) -> None:
        self.asked += 1
        if self._known is None:
            return
        seq = json.loads(payload)["seq"]
        found = [stored for stored in self._known if stored.seq >= seq]
        if not found:
            self._say(reply, b"NATS/1.0 404 Message Not Found\r\n\r\n")
            return
        last = 0
        for index, stored in enumerate(found):
            block = (
                f"NATS/1.0\r\nNats-Stream: {self._stream}\r\nNats-Subject: {stored.subject}\r\nNats-Sequence: "
                f"{stored.seq}\r\nNats-Time-Stamp: {stored.stored_at.isoformat()}\r\nNats-Num-Pending: "
                f"{len(found) - index - 1}\r\nNats-Last-Sequence: {last}\r\n\r\n"
            )
            self._say(reply, block.encode(), stored.data)
            last = stored.seq
        self._say(reply, b"NATS/1.0 204 EOB\r\nNats-Num-Pending: 0\r\nNats-Last-Sequence: %d\r\n\r\n" % last)

    def _say(self, reply: bytes, header: bytes, data: bytes = b"") -> None:
        size = len(header)
        self._wire.write(b"HPUB %b %d %d\r\n%b%b\r\n" % (reply, size, size + len(data), header, data))


@pytest.mark.parametrize("known", [0, 1, 7, 10])
async def test_a_replica_that_lags_is_not_believed_when_it_says_no_more(
    kit: Kit, known: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SILENCE, 60.0)  # it must be heard, and be overruled
    await kit.delete_stream()
    await kit.create_stream(allow_direct=False)
    sent = (await kit.publish(["a", "b"], each=10))["a"]
    all_of_them = await (await reading(kit)).read_all(kit.subject("a"))
    read = await reading(kit, direct=True)
    replica = Replica(read, all_of_them[:known])
    try:
        found = await read.read_all(kit.subject("a"))
    finally:
        replica.stop()
    assert seqs_of(found) == sent
    assert found == all_of_them
    assert replica.asked


async def test_a_full_page_of_a_replica_that_lags_is_not_the_end(kit: Kit) -> None:
    await kit.delete_stream()
    await kit.create_stream(allow_direct=False)
    sent = (await kit.publish(["a", "b"], each=10))["a"]
    known = (await (await reading(kit)).read_all(kit.subject("a")))[:5]
    read = await reading(kit, direct=True)
    replica = Replica(read, known)
    try:
        page = await read.read(kit.subject("a"), batch=5)
    finally:
        replica.stop()
    assert (seqs_of(page.messages), page.exhausted) == (sent[:5], False)
    assert replica.asked == 1


async def test_a_replica_that_hangs_is_avoided_for_a_while(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SILENCE, 0.1)
    await kit.delete_stream()
    await kit.create_stream(allow_direct=False)
    sent = (await kit.publish(["a", "b"], each=200))["a"]
    read = await reading(kit, direct=True)
    replica = Replica(read, None)
    try:
        found = await read.read_all(kit.subject("a"))
    finally:
        replica.stop()
    assert seqs_of(found) == sent
    assert replica.asked == 1


async def test_a_mirror_that_keeps_less_is_not_believed(kit: Kit) -> None:
    sent = (await kit.publish(["a", "b"], each=50))["a"]
    mirror = f"M{kit.stream}"[:40]
    config = {"storage": "memory", "mirror": {"name": kit.stream}, "mirror_direct": True, "max_msgs": 20}
    await kit.api.call(f"STREAM.CREATE.{mirror}", {"name": mirror, **config})
    read = await reading(kit)
    try:
        await eventually(lambda: mirror_answers(read, kit.subject("a")))
        for _ in range(20):
            assert seqs_of(await read.read_all(kit.subject("a"))) == sent
    finally:
        await kit.delete_stream(mirror)


async def mirror_answers(read: Reading, subject: str) -> bool:
    """Whether a bare direct get was taken by a mirror, which holds less."""
    return "mirror" in (await ask_directly(read, subject, 1)).trouble


async def ask_directly(read: Reading, subject: str, seq: int) -> DirectBatch:
    """One direct get, and nobody asked whether it is all."""
    answer = DirectBatch(read.stream.name, seq, 1 << 60)
    inbox = read.wire.new_inbox()
    sid = read.wire.subscribe(inbox, answer.sink)
    body = json.dumps({"seq": seq, "batch": 100, "next_by_subj": subject}).encode()
    read.wire.write(pub(f"$JS.API.DIRECT.GET.{read.stream.name}".encode(), body, inbox.encode()))
    async with asyncio.timeout(5):
        await answer.ended
    read.wire.unsubscribe(sid)
    return answer


# ── a cluster ─────────────────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def on_nodes(cluster: Cluster, name: str) -> AsyncIterator[tuple[list[Reading], int]]:
    """A stream with a copy on each node, a reader on each, and which of them the stream's leader is on."""
    connections = [await Connection.open(Settings(nats=(node.url,)), name="test") for node in cluster.servers]
    try:
        api = JetStreamApi(connections[0])
        config = {"subjects": [f"{name}.>"], "storage": "file", "num_replicas": 3, "allow_direct": True}
        await api.call(f"STREAM.CREATE.{name}", {"name": name, **config})
        leader = (await api.call(f"STREAM.INFO.{name}"))["cluster"]["leader"]
        stream = await api.stream_info(name)
        names = [node.name for node in cluster.servers]
        yield [Reading(connection, stream) for connection in connections], names.index(leader)
    finally:
        for connection in connections:
            await connection.close()


@pytest.mark.slow
async def test_what_was_just_stored_is_read_through_a_copy_that_lags(nats_cluster: Cluster, stream_name: str) -> None:
    """A node answers direct gets from its own copy, and a message is acknowledged before each copy has it."""
    subject, stale, rounds = f"{stream_name}.a", 0, 0
    async with on_nodes(nats_cluster, stream_name) as (nodes, leader):
        follower = nodes[(leader + 1) % 3]
        # Usually some copies lag within a second; on a busy machine all may be as late as the reader.
        deadline = time.monotonic() + 20
        while stale < 3 and time.monotonic() < deadline:
            rounds += 1
            seqs = await asyncio.gather(*(nodes[leader].api.publish(subject, b"x") for _ in range(20)))
            seqs.sort()
            seen, found = await asyncio.gather(
                ask_directly(follower, subject, seqs[0]),
                follower.read_all(subject, seqs[0], up_to=seqs[-1]),
            )
            assert seqs_of(found) == seqs
            stale += len(seen.messages) < len(seqs)
            assert seqs_of(seen.messages) == seqs[: len(seen.messages)]
    assert rounds >= 3


async def test_a_copy_that_hangs_holds_nobody_up(nats_cluster: Cluster, stream_name: str) -> None:
    subject = f"{stream_name}.a"
    async with on_nodes(nats_cluster, stream_name) as (nodes, leader):
        seqs = sorted(await asyncio.gather(*(nodes[leader].api.publish(subject, b"x") for _ in range(200))))
        stopped = (leader + 1) % 3
        pid = nats_cluster.servers[stopped].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            for index, node in enumerate(nodes):
                if index != stopped:
                    found = await node.read_all(subject, up_to=seqs[-1])
                    assert seqs_of(found) == seqs
        finally:
            os.kill(pid, signal.SIGCONT)
        assert seqs_of(await nodes[stopped].read_all(subject, up_to=seqs[-1])) == seqs
