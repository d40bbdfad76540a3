"""The lean protocol reader against nats-py's own, on the same bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nats.errors import ProtocolError
from nats.protocol.parser import Parser
from tests.trials import examples_of

from parti.errors import ConnectionFailed
from parti.jetstream.blocking import BlockingClient
from parti.jetstream.protocol import Sink
from parti.jetstream.wire import LeanParser, PlainParser

Call = tuple[Any, ...]
OURS = frozenset({b"2", b"4", b"6", b"8", b"10"})


@dataclass
class Recorder:
    """Stands in for a nats-py client: writes down what a parser tells it."""

    calls: list[Call] = field(default_factory=list)
    _ps: Any = None

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        self.calls.append(("msg", sid, bytes(subject), bytes(reply), bytes(data), headers))

    async def _process_ping(self) -> None:
        self.calls.append(("ping",))

    async def _process_pong(self) -> None:
        self.calls.append(("pong",))

    async def _process_err(self, text: str) -> None:
        self.calls.append(("err", text))

    async def _process_info(self, info: dict[str, Any]) -> None:
        self.calls.append(("info", info))

    def sink(self, sid: bytes) -> Sink:
        def sink(subject: bytes, reply: bytes, header: bytes | None, payload: bytes) -> None:
            self.calls.append(("msg", int(sid), subject, reply, payload, header))

        return sink


def lean(recorder: Recorder, chunks_done: list[int] | None = None) -> LeanParser:
    """Make a lean parser that serves every other subscription itself."""
    recorder._ps = Parser(recorder)
    done = chunks_done if chunks_done is not None else []
    return LeanParser(recorder, {sid: recorder.sink(sid) for sid in OURS}, lambda: done.append(1))


async def feed(parser: Any, chunks: list[bytes]) -> None:
    for chunk in chunks:
        await parser.parse(chunk)


word = st.text("abcXYZ019_-$*>", min_size=1, max_size=6)
subject = st.lists(word, min_size=1, max_size=4).map(".".join).map(str.encode)
reply = st.one_of(st.just(b""), subject)
sid = st.integers(1, 12).map(lambda n: b"%d" % n)
protocol_words = st.sampled_from(
    [
        b"\r\n",
        b"\r",
        b"\n",
        b"MSG a 1 3\r\nabc\r\n",
        b"HMSG a 1 2 3\r\n",
        b"PING\r\n",
        b"+OK\r\n",
        b"-ERR 'x'\r\n",
        b" ",
    ]
)
payload = st.lists(protocol_words | st.binary(max_size=12), max_size=4).map(b"".join)
header = st.lists(st.tuples(word, st.text("abc :,", max_size=8)), max_size=3).map(
    lambda pairs: b"NATS/1.0\r\n" + b"".join(f"{k}: {v}\r\n".encode() for k, v in pairs) + b"\r\n"
)


@st.composite
def msg(draw: st.DrawFn) -> bytes:
    body, answer = draw(payload), draw(reply)
    parts = [b"MSG", draw(subject), draw(sid), *([answer] if answer else []), b"%d" % len(body)]
    return b" ".join(parts) + b"\r\n" + body + b"\r\n"


@st.composite
def hmsg(draw: st.DrawFn) -> bytes:
    block = draw(header | st.sampled_from([b"NATS/1.0 100 Idle Heartbeat\r\n\r\n", b"NATS/1.0 503\r\n\r\n"]))
    body, answer = draw(payload), draw(reply)
    sizes = [b"%d" % len(block), b"%d" % (len(block) + len(body))]
    parts = [b"HMSG", draw(subject), draw(sid), *([answer] if answer else []), *sizes]
    return b" ".join(parts) + b"\r\n" + block + body + b"\r\n"


control = st.one_of(
    st.sampled_from([b"PING\r\n", b"PONG\r\n", b"+OK\r\n", b"-ERR 'Authorization Violation'\r\n"]),
    st.text("abc ", min_size=1, max_size=10).map(lambda t: f"-ERR '{t}'\r\n".encode()),
    st.dictionaries(word, st.integers() | word, max_size=3).map(lambda d: f"INFO {json.dumps(d)}\r\n".encode()),
)


@st.composite
def chunked(draw: st.DrawFn) -> list[bytes]:
    data = b"".join(draw(st.lists(st.one_of(msg(), hmsg(), control), max_size=12)))
    if draw(st.integers(0, 4)) == 0:
        return [data[i : i + 1] for i in range(len(data))]
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=12)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@settings(deadline=None, max_examples=examples_of(400))
@given(chunked())
def test_the_same_calls_come_out_in_the_same_order(chunks: list[bytes]) -> None:
    expected, got = Recorder(), Recorder()
    asyncio.run(feed(Parser(expected), chunks))
    asyncio.run(feed(lean(got), chunks))
    assert got.calls == expected.calls


@settings(deadline=None, max_examples=examples_of(100))
@given(chunked())
def test_the_plain_fallback_makes_the_same_calls(chunks: list[bytes]) -> None:
    expected, got = Recorder(), Recorder()
    asyncio.run(feed(Parser(expected), chunks))
    got._ps = Parser(got)
    asyncio.run(feed(PlainParser(got, {sid: got.sink(sid) for sid in OURS}, lambda: None), chunks))
    assert got.calls == expected.calls


@settings(deadline=None, max_examples=examples_of(150))
@given(chunked())
def test_the_blocking_client_of_spark_sees_the_same_messages(chunks: list[bytes]) -> None:
    """Its connection is a socket whose other end plays the server; pings are answered, refusals end it."""
    expected = Recorder()
    asyncio.run(feed(Parser(expected), chunks))
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(b"".join(chunks))
        theirs.shutdown(socket.SHUT_WR)
        seen: list[Call] = []
        with BlockingClient(ours, {}, b"") as client, contextlib.suppress(ConnectionFailed):
            while (one := client.next_delivery(1.0)) is not None:
                seen.append(("msg", one.sid, one.subject.encode(), one.reply.encode(), one.data, one.header))
    messages: list[Call] = []
    for call in expected.calls:
        if call[0] == "err" and not call[1].strip("' ").lower().startswith("permissions violation"):
            break
        messages += [call] if call[0] == "msg" else []
    assert seen == messages


@settings(deadline=None, max_examples=examples_of(150))
@given(chunked(), st.data())
def test_after_a_reset_in_the_middle_nothing_of_the_old_connection_is_left(
    chunks: list[bytes], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(chunks)))
    fresh = b"PING\r\nMSG a 2 3\r\nnew\r\nMSG a 1 r 2\r\nok\r\n"
    expected, got = Recorder(), Recorder()
    theirs, ours = Parser(expected), lean(got)
    for parser in (theirs, ours):
        asyncio.run(feed(parser, chunks[:cut]))
        parser.reset()
        asyncio.run(feed(parser, [fresh]))
    assert got.calls == expected.calls
    assert got.calls[-3:] == [("ping",), ("msg", 2, b"a", b"", b"new", None), ("msg", 1, b"a", b"r", b"ok", None)]


@pytest.mark.parametrize("sid_", [b"1", b"2"])
async def test_a_large_payload_in_many_chunks(sid_: bytes) -> None:
    body = bytes(range(256)) * 16_384
    data = b"MSG big %b reply %d\r\n%b\r\nPING\r\n" % (sid_, len(body), body)
    got, chunks_done = Recorder(), list[int]()
    await feed(lean(got, chunks_done), [data[i : i + 1000] for i in range(0, len(data), 1000)])
    assert got.calls == [("msg", int(sid_), b"big", b"reply", body, None), ("ping",)]
    assert len(chunks_done) == (sid_ in OURS)


async def test_only_chunks_with_a_message_for_a_sink_are_announced_and_once_each() -> None:
    got, done = Recorder(), list[int]()
    parser = lean(got, done)
    await parser.parse(b"PING\r\nMSG a 1 1\r\nx\r\n")
    assert done == []
    await parser.parse(b"MSG a 2 1\r\nx\r\nMSG a 2 1\r\ny\r\nPI")
    assert done == [1]
    await parser.parse(b"NG\r\n")
    assert done == [1]


async def test_a_sink_that_raises_stops_neither_the_connection_nor_the_other_messages() -> None:
    got, done = Recorder(), list[int]()

    def broken(subject: bytes, reply: bytes, header: bytes | None, payload: bytes) -> None:
        raise RuntimeError("sink")

    got._ps = Parser(got)
    parser = LeanParser(got, {b"2": broken, b"4": got.sink(b"4")}, lambda: done.append(1))
    await parser.parse(b"MSG a 2 1\r\nx\r\nMSG a 4 1\r\ny\r\nMSG a 1 1\r\nz\r\n")
    assert got.calls == [("msg", 4, b"a", b"", b"y", None), ("msg", 1, b"a", b"", b"z", None)]
    assert done == [1]


async def test_a_sink_removed_by_an_earlier_message_of_the_same_chunk_gets_nothing_more() -> None:
    got = Recorder(_ps=None)
    got._ps = Parser(got)
    sinks: dict[bytes, Sink] = {}
    seen: list[bytes] = []

    def once(subject: bytes, reply: bytes, header: bytes | None, payload: bytes) -> None:
        seen.append(payload)
        del sinks[b"2"]

    sinks[b"2"] = once
    await LeanParser(got, sinks, lambda: None).parse(b"MSG a 2 1\r\nx\r\nMSG a 2 1\r\ny\r\n")
    assert seen == [b"x"]
    assert got.calls == [("msg", 2, b"a", b"", b"y", None)]


@pytest.mark.parametrize(
    "line",
    [
        b"MSG\r\n",
        b"MSG a\r\n",
        b"MSG a 1\r\n",
        b"MSG a 1 x\r\n",
        b"MSG a one 2\r\nok\r\n",
        b"MSG a 1 r 2x\r\n",
        b"HMSG a 1 x 2\r\n\r\n\r\n",
        b"MUMBLE\r\n",
        b"H\r\n",
        b"FOO bar\r\n",
    ],
)
async def test_malformed_lines_raise(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        await lean(Recorder()).parse(line + b"PING\r\n")


@pytest.mark.timeout(10)
@pytest.mark.parametrize("size", [b"-1", b"-2", b"-13", b"-16", b"-100", b"-99999"])
async def test_a_negative_size_is_malformed_and_never_loops(size: bytes) -> None:
    with pytest.raises(ProtocolError):
        await lean(Recorder()).parse(b"PING\r\nMSG a 1 " + size + b"\r\nPING\r\n")


async def test_a_header_longer_than_its_message_is_malformed() -> None:
    with pytest.raises(ProtocolError):
        await lean(Recorder()).parse(b"HMSG a 2 14 2\r\nok\r\nPING\r\nPING\r\nPING\r\n")


async def test_a_header_that_fitted_the_message_before_is_malformed_where_it_is_longer_than_its_own() -> None:
    head = b"NATS/1.0\r\n\r\n"
    good = b"HMSG a 2 12 15\r\n" + head + b"abc\r\n"
    got = Recorder()
    with pytest.raises(ProtocolError):
        await lean(got).parse(good + b"HMSG a 2 12 3\r\n" + head + b"abc\r\n")
    assert got.calls == [("msg", 2, b"a", b"", b"abc", head)]


async def test_a_line_that_never_ends_is_refused() -> None:
    parser = lean(Recorder())
    with pytest.raises(ProtocolError):
        await feed(parser, [b"M" + b"x" * 300_000] * 5)
