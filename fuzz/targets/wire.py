"""Server bytes: the protocol readers of workers and of Spark's tasks, with any bytes and any borders of chunks."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from nats.protocol.parser import Parser

from fuzz.feed import Feed
from fuzz.target import Target, WrongError
from parti.errors import PartiError
from parti.jetstream.blocking import BlockingClient
from parti.jetstream.protocol import Sink
from parti.jetstream.wire import LeanParser

_OURS = frozenset({b"2", b"4", b"6", b"8"})
_CONTROL: tuple[tuple[bytes, tuple[Any, ...] | None], ...] = (
    (b"PING\r\n", ("ping",)),
    (b"PONG\r\n", ("pong",)),
    (b"+OK\r\n", None),
    (b"-ERR 'x'\r\n", ("err", "'x'")),
    (b'INFO {"server_id":"a"}\r\n', ("info", {"server_id": "a"})),
)
_SUBJECTS = (b"a", b"a.b", b"\xff.\xfe", b"$JS.ACK.S.C.1.2.3.4.5", b"x" * 200, b"a\x0b7\x0c8", b"\x00\x1b[2J", b"*.>")
_Call: TypeAlias = "tuple[Any, ...]"
_loop = asyncio.new_event_loop()


@dataclass
class _Recorder:
    """Stands in for a nats-py client: notes what a parser tells it."""

    calls: list[_Call] = field(default_factory=list)
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
        """What takes the messages of one subscription."""

        def sink(subject: bytes, reply: bytes, header: bytes | None, payload: bytes) -> None:
            self.calls.append(("msg", int(sid), subject, reply, payload, header))

        return sink


def _lean(chunks: Sequence[bytes]) -> tuple[list[_Call], str]:
    recorder = _Recorder()
    recorder._ps = Parser(recorder)
    parser = LeanParser(recorder, {sid: recorder.sink(sid) for sid in _OURS}, lambda: None)
    return recorder.calls, _feed(parser, chunks)


def _feed(parser: Any, chunks: Sequence[bytes]) -> str:
    """Whether something ended the reading; `MendedClient` then takes the connection for broken, whatever it was."""

    async def feed() -> None:
        for chunk in chunks:
            await parser.parse(chunk)

    try:
        _loop.run_until_complete(feed())
    except Exception:
        return "refused"
    return ""


def one(data: bytes) -> None:
    """Any bytes in any chunks, a stream of valid messages, or the blocking client."""
    feed = Feed(data)
    kind = feed.byte() % 4
    if kind == 0:
        _valid(feed)
    elif kind == 1:
        _blocking(feed.rest())
    else:
        _any(feed)


def _any(feed: Feed) -> None:
    """The borders of chunks change nothing, and what is not the protocol is refused."""
    body = Feed(feed.rest())
    pieces = body.byte() % 8
    places = [body.number() for _ in range(pieces)]
    text = body.rest()
    cuts = sorted(place % (len(text) + 1) for place in places)
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    if _lean(chunks) != _lean([text]):
        raise WrongError("the borders of chunks change what is read")


def _valid(feed: Feed) -> None:
    """What a server sends is read as it was sent: any bytes in subjects, headers and payloads."""
    parts, expected = list[bytes](), list[_Call]()
    while feed and len(parts) < 20:
        subject, sid = feed.pick(_SUBJECTS), 1 + feed.byte() % 9
        reply, kind = feed.pick((b"", b"r.1", b"r.\xff")), feed.byte() % 3
        body = feed.chunk()
        line, block = b" ".join([subject, b"%d" % sid, *([reply] if reply else [])]), None
        if kind == 0:
            control, call = feed.pick(_CONTROL)
            parts.append(control)
            expected += [call] if call else []
            continue
        if kind == 1:
            parts.append(b"MSG %b %d\r\n%b\r\n" % (line, len(body), body))
        else:
            block = b"NATS/1.0\r\n" + feed.chunk() + b"\r\n\r\n"
            sizes = b"%d %d" % (len(block), len(block) + len(body))
            parts.append(b"HMSG %b %b\r\n%b\r\n" % (line, sizes, block + body))
        expected.append(("msg", sid, subject, reply, body, block))
    found = _lean(feed.cuts(b"".join(parts)))
    if found != (expected, ""):
        raise WrongError("what a server sends is read as something else")


def _blocking(text: bytes) -> None:
    """The client of Spark's tasks gives out messages and ends with an error of ours."""
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(text[:60_000])
        theirs.shutdown(socket.SHUT_WR)
        try:
            with BlockingClient(ours, {}, b"") as client:
                while client.next_delivery(1.0) is not None:
                    pass
        except PartiError:
            pass


def seeds() -> list[bytes]:
    """Each kind of line, whole and in pieces."""
    head = b"NATS/1.0\r\nA: b\r\n\r\n"
    lines = [
        *(line for line, _ in _CONTROL),
        b"MSG a 2 3\r\nabc\r\n",
        b"MSG a 1 r 3\r\nabc\r\n",
        b"MSG a 2 0\r\n\r\n",
        b"HMSG a 2 %d %d\r\n%babc\r\n" % (len(head), len(head) + 3, head),
        b"HMSG a 1 r 28 28\r\nNATS/1.0 409 Server Shutd\r\n\r\n\r\n",
        b"-ERR 'Permissions Violation for Publish to \"a.b\"'\r\n",
    ]
    whole = b"".join(lines)
    return [
        *(bytes((kind,)) + b"\0" + line for line in lines for kind in (2, 1)),
        b"\2\3\0\5\0\x20\0\x60" + whole,
        b"\1" + whole,
        *(b"\0" + bytes(range(n, n + 60)) for n in (0, 60, 120, 180)),
    ]


TARGET = Target("wire", one, seeds)
