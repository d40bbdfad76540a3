"""Header blocks: of publishers, of the server behind them, of answers, and acknowledgement subjects."""

from __future__ import annotations

from fuzz.feed import Feed
from fuzz.hostile import MANY_DIGITS
from fuzz.target import Target
from parti.core.pull_status import next_step
from parti.jetstream.chunks import sequence_of
from parti.jetstream.direct import DirectAnswer, Stored
from parti.jetstream.letters import letter_of
from parti.model.headers import parse_all_headers, parse_headers, parse_reply, split_pin, status_of
from parti.model.message import Message, Ownership
from parti.model.partition import Partition

_OWNER = Ownership(Partition("p", "a.p", {"k": "p"}), "S", "w-0")
_REPLY = b"$JS.ACK.S.C.1.2.3.1763467200000000000.5"
_SERVERS_LINES = (
    b"\r\nNats-Stream: S\r\nNats-Subject: %b\r\nNats-Sequence: %d\r\nNats-Time-Stamp: 2026-11-18T12:00:00.5Z\r\n"
    b"Nats-Num-Pending: 0\r\nNats-Last-Sequence: 0\r\n\r\n"
)


def one(data: bytes) -> None:
    """Read the same block as everything that reads one."""
    feed = Feed(data)
    kind = feed.byte() % 4
    if kind == 0:
        _reply(feed.rest())
        return
    if kind == 1:
        subject = feed.chunk().replace(b"\r", b"").replace(b"\n", b"") or b"a.p"
        block = feed.rest()
        _direct(block + _SERVERS_LINES % (subject, 1))
        return
    block = feed.rest()
    parse_all_headers(block)
    parse_headers(block)
    split_pin(block)
    next_step(*status_of(block))
    message = Message("a.p", b"", 1, _OWNER, _REPLY, block)
    _ = (message.headers, message.context, repr(message))
    _direct(block)
    _letter(block)


def _reply(reply: bytes) -> None:
    try:
        parse_reply(reply)
        sequence_of(reply)
    except ValueError:
        return


def _direct(block: bytes) -> None:
    answer = DirectAnswer("S", 1, 10)
    try:
        answer.take(block, b"payload")
    except UnicodeDecodeError:  # its readers know that a subject need not be UTF-8
        return
    for found in answer.messages:
        _letter(found.header or b"")


def _letter(block: bytes) -> None:
    letter = letter_of(Stored(1, "parti.dlq.S.a.p", b"", block, Message("", b"", 0, _OWNER).received_at))
    _ = (letter.origin_seq, letter.attempts, letter.error, letter.subject, letter.own_headers, letter.partition)


def seeds() -> list[bytes]:
    """Blocks as publishers, servers and parti write them."""
    blocks = [
        b"NATS/1.0\r\nA: b\r\nA: c\r\n\r\n",
        b"NATS/1.0\r\nNats-Pin-Id: forged\r\nNats-Pin-Id: xyz\r\n\r\n",
        b"NATS/1.0 409 Server Shutdown\r\n\r\n",
        b"NATS/1.0 204 EOB\r\nNats-Num-Pending: 0\r\nNats-Last-Sequence: 0\r\n\r\n",
        b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 1\r\n\r\n",
        b"NATS/1.0\r\nParti-Stream: S\r\nParti-Sequence: 7\r\nParti-Attempts: 3\r\nParti-Error: E: x\r\n\r\n",
        b"NATS/1.0\r\nParti-Sequence: " + MANY_DIGITS.encode() + b"\r\n\r\n",
        b"NATS/1.0" + _SERVERS_LINES % (b"a.p", 1),
    ]
    replies = [_REPLY, b"$JS.ACK._.hash.S.C.1.2.3.4.5", b"$JS.ACK.d.hash.S.C.1.2.3.4.5.mark"]
    return [
        *(b"\2" + block for block in blocks),
        *(b"\1\3a.p" + block for block in blocks),
        *(b"\0" + reply for reply in replies),
    ]


TARGET = Target("headers", one, seeds)
