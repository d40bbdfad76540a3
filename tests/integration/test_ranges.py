"""What the range reader promises: every message of a range once, in order, gaps told, nothing left behind."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.integration.proxy import proxy_to
from tests.integration.streams import Reading, Stream, block, read_all
from tests.pace import unhindered_s

from parti.embedded import Cluster, Server
from parti.embedded.monitor import ask
from parti.errors import ApiError, NotFound, PermissionDenied, StreamNotFound
from parti.jetstream import direct_ranges, pulled_ranges, ranges
from parti.jetstream.protocol import Scanner
from parti.jetstream.ranges import RangeReader, Wanted
from parti.jetstream.target import Target
from parti.model.headers import parse_all_headers
from parti.model.safe_text import text_of

RETENTIONS = ("limits", "workqueue", "interest")


@pytest.fixture
def stream(nats_server: Server, stream_name: str) -> Iterator[Stream]:
    one = Stream(Target(servers=(nats_server.url,)), stream_name)
    yield one
    one.remove()


def make(stream: Stream, retention: str, **config: Any) -> None:
    """A stream of this retention that keeps what is published to it."""
    stream.create(retention=retention, **config)
    if retention == "interest":
        body = {"stream_name": stream.name, "config": {"durable_name": "keeps", "ack_policy": "explicit"}}
        with stream.client() as client:
            client.api(f"CONSUMER.CREATE.{stream.name}.keeps", body)


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few thousand messages are many requests and many chunks."""
    monkeypatch.setattr(pulled_ranges, "_PULL", 100)
    monkeypatch.setattr(direct_ranges, "_BATCH", 100)
    monkeypatch.setattr(pulled_ranges, "_CHUNK_ROWS", 200)
    monkeypatch.setattr(ranges, "_PAUSE_S", 0.01)


# ── what is there ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("retention", RETENTIONS)
def test_whole_range_and_parts_of_it(stream: Stream, retention: str) -> None:
    make(stream, retention)
    stream.fill(500, subjects=("a", "b.c"))
    before = stream.consumers()
    whole = stream.read()
    assert whole.seqs == list(range(1, 501))
    assert whole.payloads == [b"%d" % i for i in range(500)]
    assert whole.subjects == [f"{stream.root}.{'b.c' if i % 2 else 'a'}".encode() for i in range(500)]
    assert whole.headers == [None] * 500
    assert whole.missing == []
    assert stream.read(100, 101).seqs == [100]
    assert stream.read(77, 333).seqs == list(range(77, 333))
    assert stream.read(500, 501).seqs == [500]
    assert (stream.read(200, 200).seqs, stream.read(200, 100).seqs) == ([], [])
    assert stream.consumers() == before
    assert stream.info()["state"]["messages"] == 500


@pytest.mark.parametrize("retention", RETENTIONS)
def test_messages_of_every_form_arrive_as_they_were_sent(stream: Stream, retention: str) -> None:
    make(stream, retention)
    text = b"MSG a 1 $JS.ACK.x 5\r\nhello\r\nPING\r\n-ERR 'Authorization Violation'\r\n"
    forged = block("Nats-Subject: forged", "Nats-Sequence: 9", "Nats-Stream: other", "Nats-Time-Stamp: never")
    sent: list[tuple[str, bytes, bytes | None]] = [
        ("empty", b"", None),
        ("text", text, None),
        ("large", random.Random(1).randbytes(1_000_000), None),
        ("header", b"x", block("A: 1", "a: 2", "A: 3", "B:no space", "Empty:")),
        ("junk", b"\x00\xff", block("no colon here", ": no name", b"Bin: \xff\xfe")),
        ("forged", b"y", forged),
        ("only-header", b"", block("A: 1")),
        ("text-header", text, block("A: MSG x 1 0")),
        ("large-header", bytes(900_000), block("Long: " + "v" * 50_000)),
        ("last", b"\r\n", None),
    ]
    stream.publish(sent)
    found = stream.read()
    assert found.subjects == [f"{stream.root}.{subject}".encode() for subject, _, _ in sent]
    assert found.payloads == [payload for _, payload, _ in sent]
    assert found.headers == [header for _, _, header in sent]
    assert found.seqs == list(range(1, len(sent) + 1))


@pytest.mark.parametrize("retention", RETENTIONS)
def test_subjects_that_are_not_utf8_are_no_obstacle(stream: Stream, retention: str) -> None:
    make(stream, retention)
    stream.publish([("a", b"1", None), (b"n\xff", b"2", None), ("b", b"3", None)])
    found = stream.read()
    assert (found.seqs, found.payloads) == ([1, 2, 3], [b"1", b"2", b"3"])
    assert text_of(found.subjects[1]) == f"{stream.root}.n\\xff"


@pytest.mark.parametrize("retention", RETENTIONS)
def test_payloads_can_be_left_out(stream: Stream, retention: str) -> None:
    make(stream, retention)
    header = block("A: 1", "Nats-Msg-Size: forged")
    stream.publish([("a", b"x" * 1000, None), ("b", b"y" * 1000, header), ("c", b"", None)])
    found = stream.read(payload=False)
    assert found.seqs == [1, 2, 3]
    assert found.payloads == [b"", b"", b""]
    assert found.headers == [None, header, None]


@pytest.mark.parametrize("retention", RETENTIONS)
def test_a_header_block_of_one_byte_does_not_kill_the_server_when_payloads_are_left_out(
    stream: Stream, retention: str
) -> None:
    make(stream, retention)
    stream.publish([("a", b"x", b"1"), ("b", b"y", None)])
    found = stream.read(payload=False)
    assert found.seqs == [1, 2]
    assert found.payloads == [b"", b""]


def test_large_messages_keep_their_number_and_order(stream: Stream) -> None:
    """More bytes than one request may bring: the server ends requests early."""
    stream.create()
    stream.fill(40, size=1_000_000)
    found = stream.read()
    assert found.seqs == list(range(1, 41))
    assert [int(payload[: payload.index(b".")]) for payload in found.payloads] == list(range(40))


def test_work_queue_without_direct_gets(stream: Stream) -> None:
    stream.create(retention="workqueue", allow_direct=False)
    stream.publish([("a", b"%d" % i, block(f"N: {i}") if i % 2 else None) for i in range(300)])
    stream.delete(5, 6)
    found = stream.read(3)
    assert found.seqs == [3, 4, *range(7, 301)]
    assert found.missing == [(5, 7)]
    assert parse_all_headers(found.headers[1] or b"") == {"N": ["3"]}
    assert found.stamps_us == sorted(found.stamps_us)


def test_a_queue_that_is_worked_off_meanwhile_is_left_alone(stream: Stream) -> None:
    make(stream, "workqueue")
    stream.fill(100)
    config = {"durable_name": "worker", "ack_policy": "explicit"}
    with stream.client() as client:
        client.api(f"CONSUMER.CREATE.{stream.name}.worker", {"stream_name": stream.name, "config": config})
        before = client.api(f"CONSUMER.INFO.{stream.name}.worker")
        assert stream.read().seqs == list(range(1, 101))
        after = client.api(f"CONSUMER.INFO.{stream.name}.worker")
    for key in ("delivered", "ack_floor", "num_pending", "num_ack_pending"):
        assert before[key] == after[key]
    assert stream.info()["state"]["messages"] == 100


def test_mirror(stream: Stream) -> None:
    stream.create()
    stream.fill(100, subjects=("a", "b"))
    copy = Stream(stream.target, f"{stream.name}-m", stream.root)
    copy.call("STREAM.CREATE", {"name": copy.name, "mirror": {"name": stream.name}, "storage": "memory"})
    try:
        _until(lambda: copy.last == 100)
        assert copy.read().seqs == list(range(1, 101))
        assert copy.read(subjects=["b"]).seqs == list(range(2, 101, 2))
    finally:
        copy.remove()


# ── what is gone ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
def test_every_gap_is_told_exactly(stream: Stream, retention: str) -> None:
    make(stream, retention)
    stream.fill(30)
    stream.purge(seq=4)
    stream.delete(10, 11, 15, 29, 30)
    assert stream.last == 30
    whole = stream.read()
    assert whole.seqs == [*range(4, 10), *range(12, 15), *range(16, 29)]
    assert whole.missing == [(1, 4), (10, 12), (15, 16), (29, 31)]
    # A range that ends inside a gap, begins inside one, or is one.
    assert stream.read(8, 11).missing == [(10, 11)]
    assert stream.read(11, 14).missing == [(11, 12)]
    assert stream.read(10, 12).missing == [(10, 12)]
    assert stream.read(10, 12).seqs == []
    assert stream.read(1, 3).missing == [(1, 3)]
    assert stream.read(28, 31).missing == [(29, 31)]
    assert stream.read(12, 15).missing == []
    assert stream.consumers() == []


@pytest.mark.parametrize("retention", RETENTIONS)
def test_purged_range_is_missing_as_a_whole(stream: Stream, retention: str) -> None:
    make(stream, retention)
    stream.fill(20)
    stream.purge()
    found = stream.read(5)
    assert (found.seqs, found.missing) == ([], [(5, 21)])


def test_expired_messages_are_told(stream: Stream) -> None:
    stream.create(max_age=500_000_000)
    stream.fill(10)
    _until(lambda: stream.info()["state"]["messages"] == 0)
    stream.fill(5)
    found = stream.read(8)
    assert (found.seqs, found.missing) == ([11, 12, 13, 14, 15], [(8, 11)])


@pytest.mark.usefixtures("small_steps")
def test_messages_deleted_while_they_are_read_are_told(stream: Stream) -> None:
    stream.create(storage="file")
    stream.fill(4_000)
    reader = stream.reader()
    found = Reading()
    for number, chunk in enumerate(reader.chunks()):
        found.add(chunk)
        if number == 0:
            stream.purge(seq=3_901)
    assert found.seqs == sorted(set(found.seqs))
    gone = [seq for start, end in reader.missing for seq in range(start, end)]
    assert gone
    assert sorted(found.seqs + gone) == list(range(1, 4_001))
    assert stream.consumers() == []


def test_a_stream_that_is_shorter_than_planned_is_an_error(stream: Stream) -> None:
    stream.create()
    stream.fill(10)
    with pytest.raises(ApiError, match=r"ends at 10 and was expected to reach 14.*older copy"):
        stream.read(5, 15)
    assert stream.consumers() == []


# ── filters ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("retention", RETENTIONS)
@pytest.mark.parametrize(
    ("subjects", "expected"),
    [
        (["rare"], {50, 150}),
        (["rare", "seldom"], {20, 50, 120, 150}),
        (["common.*"], set(range(1, 201)) - {20, 50, 120, 150}),
        (["common.1", "common.2", "rare"], {s for s in range(1, 201) if s % 5 in (1, 2)} | {50, 150}),
        (["common.1", "common.*"], set(range(1, 201)) - {20, 50, 120, 150}),
        (["common.1", "*.1"], {s for s in range(1, 201) if s % 5 == 1}),
        (["common.*", "*.1", ">"], set(range(1, 201))),
        (["nothing"], set()),
        (["common"], set()),
    ],
)
def test_filters(stream: Stream, retention: str, subjects: list[str], expected: set[int]) -> None:
    make(stream, retention)
    names = {50: "rare", 150: "rare", 20: "seldom", 120: "seldom"}
    stream.publish([(names.get(seq, f"common.{seq % 5}"), b"", None) for seq in range(1, 201)])
    before = stream.consumers()
    began_s = unhindered_s()
    found = stream.read(subjects=subjects)
    assert found.seqs == sorted(expected)
    assert found.missing == []
    assert stream.read(40, 140, subjects=subjects).seqs == sorted(seq for seq in expected if 40 <= seq < 140)
    assert unhindered_s() - began_s < 1
    assert stream.consumers() == before


def test_the_server_searches_for_the_few_and_the_reader_for_the_many(stream: Stream) -> None:
    stream.create()
    stream.publish([("rare" if seq % 50 == 0 else "common", b"", None) for seq in range(1, 501)])
    few, many = stream.read(subjects=["rare"]), stream.read(subjects=["common"])
    assert (few.server_filters, many.server_filters) == (True, False)
    assert (len(few.seqs), len(many.seqs)) == (10, 490)
    stream.delete(10, 50, 60)
    # Where the server searches nobody knows of what is gone; where the reader does, all of it is told.
    assert stream.read(subjects=["rare"]).missing == []
    assert stream.read(subjects=["common"]).missing == [(10, 11), (50, 51), (60, 61)]


def test_subjects_outside_of_the_stream_are_just_not_there(stream: Stream) -> None:
    stream.create()
    stream.fill(10)
    wanted = Wanted(stream=stream.name, created=stream.created, start=1, end=11, subjects=("elsewhere.x",))
    assert read_all(RangeReader(stream.target, wanted)).seqs == []


def test_silence_of_the_server_is_no_loss(nats_server_factory: Callable[..., Server], stream_name: str) -> None:
    """While the reader searches for itself, what is not wanted and not yet here is not gone."""
    server = nats_server_factory()
    stream = Stream(Target(servers=(server.url,)), stream_name)
    stream.create()
    stream.fill(30_000, subjects=("a",) * 9_000 + ("b",) * 21_000, size=100)
    reader = stream.reader(subjects=["a"])
    found = Reading()
    for number, chunk in enumerate(reader.chunks()):
        found.add(chunk)
        assert not reader.server_filters
        if number == 0:
            os.kill(server.pid, signal.SIGSTOP)
            thaw = threading.Timer(1.5, os.kill, (server.pid, signal.SIGCONT))
            thaw.start()
    thaw.join()
    assert found.seqs == list(range(1, 9_001))
    assert reader.missing == []


# ── trouble ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("retention", ["limits", "workqueue"])
def test_stream_made_anew_while_it_is_read(stream: Stream, retention: str) -> None:
    make(stream, retention)
    stream.fill(3_000)
    chunks = stream.reader().chunks()
    next(chunks)
    stream.remove()
    make(stream, retention)
    stream.fill(3_000)
    with pytest.raises(NotFound, match="deleted and made anew"):
        for _ in chunks:
            pass
    assert stream.consumers() == []


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("retention", ["limits", "workqueue"])
def test_stream_deleted_while_it_is_read(stream: Stream, retention: str) -> None:
    make(stream, retention)
    stream.fill(3_000)
    chunks = stream.reader().chunks()
    next(chunks)
    stream.remove()
    with pytest.raises(StreamNotFound, match="does not exist"):
        for _ in chunks:
            pass


def test_stream_made_anew_before_it_is_read(stream: Stream) -> None:
    stream.create()
    stream.fill(10)
    wanted = stream.wanted()
    stream.remove()
    stream.create()
    stream.fill(10)
    with pytest.raises(NotFound, match="deleted and made anew"):
        read_all(RangeReader(stream.target, wanted))


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("retention", ["limits", "workqueue"])
def test_a_reader_that_is_given_up_leaves_no_consumer(stream: Stream, retention: str) -> None:
    make(stream, retention)
    stream.fill(3_000)
    chunks = stream.reader().chunks()
    next(chunks)
    assert len(stream.consumers()) == (retention == "limits")
    chunks.close()
    assert stream.consumers() == []


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("retention", ["limits", "workqueue"])
def test_killed_and_restarted_server(
    nats_server_factory: Callable[..., Server], stream_name: str, retention: str
) -> None:
    server = nats_server_factory()
    stream = Stream(Target(servers=(server.url,)), stream_name)
    make(stream, retention, storage="file")
    stream.fill(4_000, size=200)
    stream.delete(2_000, 3_999)
    reader = stream.reader()
    found = Reading()
    for number, chunk in enumerate(reader.chunks()):
        found.add(chunk)
        if number in (0, 2):
            server.kill_sync()
            server.restart_sync()
    assert found.seqs == [seq for seq in range(1, 4_001) if seq not in (2_000, 3_999)]
    assert [int(payload[: payload.index(b".")]) + 1 for payload in found.payloads] == found.seqs
    assert reader.missing == [(2_000, 2_001), (3_999, 4_000)]
    assert stream.consumers() == []


@pytest.mark.usefixtures("small_steps")
async def test_connections_that_break_again_and_again(stream: Stream) -> None:
    stream.create()
    stream.fill(2_000, size=100)
    loop = asyncio.get_running_loop()
    found = Reading()
    async with proxy_to(int(stream.target.servers[0].rpartition(":")[2])) as proxy:
        reader = RangeReader(Target(servers=(proxy.url,)), stream.wanted(), name="test")

        async def cut() -> None:
            proxy.cut()

        def read() -> None:
            for chunk in reader.chunks():
                found.add(chunk)
                asyncio.run_coroutine_threadsafe(cut(), loop).result()

        await asyncio.to_thread(read)
        assert proxy.connections >= 6
    assert found.seqs == list(range(1, 2_001))
    assert reader.missing == []


@pytest.mark.slow
@pytest.mark.usefixtures("small_steps")
def test_killed_leader_of_a_replicated_stream(nats_cluster: Cluster, stream_name: str) -> None:
    """The end of the range is gone, so that only a leader can tell that nothing more comes."""
    stream = Stream(Target(servers=tuple(nats_cluster.urls)), stream_name)
    stream.create(num_replicas=3, storage="file")
    stream.fill(4_000, size=50)
    stream.delete(3_999, 4_000)
    reader = stream.reader()
    found = Reading()
    for number, chunk in enumerate(reader.chunks()):
        found.add(chunk)
        if number == 0:
            leader = stream.info()["cluster"]["leader"]
            nats_cluster.kill_sync([server.name for server in nats_cluster.servers].index(leader))
    assert found.seqs == list(range(1, 3_999))
    assert reader.missing == [(3_999, 4_001)]


def test_permission_to_pull_denied(nats_server_factory: Callable[..., Server], stream_name: str) -> None:
    users = """
    authorization { users: [
      { user: all, password: p },
      { user: few, password: p, permissions: { publish: { deny: ["$JS.API.CONSUMER.MSG.NEXT.>"] } } } ] }
    """
    server = nats_server_factory(config=users)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOME_PASSWORD", "p")
        owner = Target(servers=(server.url,), user="all", password_env="SOME_PASSWORD")
        stream = Stream(owner, stream_name)
        stream.create()
        stream.fill(10)
        guest = Target(servers=(server.url,), user="few", password_env="SOME_PASSWORD")
        began_s = unhindered_s()
        with pytest.raises(PermissionDenied, match=r"publish to '\$JS.API.CONSUMER.MSG.NEXT"):
            read_all(RangeReader(guest, stream.wanted(), name="test"))
        assert unhindered_s() - began_s < 2
        assert stream.consumers() == []


@pytest.mark.usefixtures("small_steps")
def test_who_reads_too_slowly_to_answer_pings_is_cut_off_and_goes_on(
    nats_server_factory: Callable[..., Server], stream_name: str
) -> None:
    server = nats_server_factory(config='ping_interval: "500ms"\nping_max: 1')
    stream = Stream(Target(servers=(server.url,)), stream_name)
    stream.create()
    stream.fill(3_000, size=100)
    reader = stream.reader()
    found = Reading()
    for number, chunk in enumerate(reader.chunks()):
        found.add(chunk)
        if number == 1:
            _until(lambda: _stale_connections(server) >= 2)
    assert found.seqs == list(range(1, 3_001))
    assert reader.missing == []
    assert stream.consumers() == []


# ── the parser ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_parser_does_not_care_how_bytes_are_cut() -> None:
    """What comes out is what was put in, also where payloads look like protocol."""
    generator = random.Random(20)
    for _ in range(150):
        messages, wire, statuses = _conversation(generator)
        parser, lines = _parser()
        chunk, rest, pos = parser._begin_chunk(), b"", 0
        most = generator.choice((1, 7, 100, 5000))
        while pos < len(wire):
            step = generator.randint(1, most)
            data = rest + wire[pos : pos + step]
            pos += step
            rest = data[parser._parse(data) :]
        assert rest == b""
        assert list(zip(chunk.subjects, chunk.replies, chunk.headers, chunk.payloads, strict=True)) == messages
        assert lines == statuses


def _conversation(
    generator: random.Random,
) -> tuple[list[tuple[bytes, bytes, bytes | None, bytes]], bytes, list[bytes]]:
    messages: list[tuple[bytes, bytes, bytes | None, bytes]] = []
    lines: list[bytes] = []
    wire = bytearray()
    pieces = (
        b"MSG a 1 $JS.ACK.x 3\r\n",
        b"\r\n",
        b"PING\r\n",
        b"\r",
        b"\n",
        b"x",
        b"\xff",
        b"HMSG ",
        b"NATS/1.0\r\n",
    )
    for number in range(generator.randint(1, 30)):
        payload = b"".join(generator.choices(pieces, k=generator.randint(0, 6)))
        reply = b"$JS.ACK.S.c.1.%d.%d.1.0" % (number + 1, number + 1)
        kind = generator.randrange(7)
        if kind <= 1:
            wire += b"MSG s.%d 1 %b %d\r\n%b\r\n" % (number, reply, len(payload), payload)
            messages.append((b"s.%d" % number, reply, None, payload))
        elif kind <= 3:
            header = block("A: 1", b"B: " + payload.replace(b"\r\n", b""))
            sizes = (len(header), len(header) + len(payload))
            wire += b"HMSG s.%d 1 %b %d %d\r\n%b%b\r\n" % (number, reply, *sizes, header, payload)
            messages.append((b"s.%d" % number, reply, header, payload))
        elif kind == 4:
            header = b"NATS/1.0 100 Idle Heartbeat\r\n\r\n"
            wire += b"HMSG _INBOX.x 1 %d %d\r\n%b\r\n" % (len(header), len(header), header)
        elif kind == 5:
            # Somebody else's message in our inbox.
            wire += b"MSG _INBOX.x 1 %d\r\n%b\r\n" % (len(payload), payload)
            wire += b"MSG _INBOX.x 1 other.reply %d\r\n%b\r\n" % (len(payload), payload)
        else:
            wire += b"PING\r\n"
            lines.append(b"PING")
    return messages, bytes(wire), lines


def _parser() -> tuple[Any, list[bytes]]:
    lines: list[bytes] = []
    parser = object.__new__(pulled_ranges.PulledRange)
    parser._wanted = Wanted(stream="S", created="", start=1, end=100)
    parser._client = SimpleNamespace(take_line=lines.append, scan=Scanner.scan)  # type: ignore[assignment]
    parser._scanner, parser._sid = Scanner({}), b"1"
    parser._outstanding = 10**6
    return parser, lines


def _stale_connections(server: Server) -> int:
    return int((ask(server.monitor_port, "/varz") or {}).get("stale_connections", 0))


def _until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    for _ in itertools.count():
        if condition():
            return
        assert time.monotonic() < deadline_s, f"did not happen within {timeout_s:g} s"
        time.sleep(0.02)
