"""Dead letters: any message can be made one that the server takes, and what is stored can be read and shown."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from fuzz.feed import Feed
from fuzz.target import Target, WrongError
from fuzz.targets.records import EXAMPLES
from fuzz.targets.screen import screen
from parti.cli.control import open_console, print_json
from parti.cli.letters import letter_json, list_json, payload_json, print_letter, print_list
from parti.core.dead_letter import Letter
from parti.core.retry import describe
from parti.jetstream.dead_letters import DeadLetterStream
from parti.jetstream.direct import Stored
from parti.jetstream.letters import letter_of
from parti.model.letter_mark import LetterMark
from parti.model.message import Message, Ownership
from parti.model.partition import Partition
from parti.telemetry.health import Health

_MAX_PAYLOAD = 1 << 20
_MOST_LINE = 4096
_MOST_HEADER = 65_535
"""What nats-server takes: of a control line by default, and of the headers of a stored message at all."""
_REPLY = b"$JS.ACK.S.C.1.2.3.1763467200000000000.5"
_loop = asyncio.new_event_loop()


class _RefusedError(BaseException):
    """The server would not store it; no Exception, because `send` would then try again for ever."""


class _Api:
    """A server that takes what nats-server takes, written as nats-py writes it."""

    subject = b""
    block = b""
    payload = b""

    async def publish(
        self, subject: str, payload: bytes, *, headers: Mapping[str, str] | None = None, timeout_s: float = 5.0
    ) -> int:
        lines = [f"{name.strip()}: {value.strip()}\r\n" for name, value in (headers or {}).items()]
        try:
            block = "NATS/1.0\r\n" + "".join(lines) + "\r\n" if headers else ""
            self.subject, self.block = subject.encode(), block.encode()
        except UnicodeEncodeError as error:
            raise _RefusedError(f"it cannot be written: {error}") from error
        if any(line.count("\n") > 1 or "\r" in line[:-2] for line in lines):
            raise _RefusedError("a header is two lines")
        self.payload = payload
        sizes = b"%d %d" % (len(self.block), len(self.block) + len(payload))
        line = b"HPUB %b %b %b\r\n" % (self.subject, b"_INBOX." + b"x" * 40, sizes)
        if len(line) > _MOST_LINE:
            raise _RefusedError(f"a control line of {len(line):,} bytes")
        if len(self.block) > _MOST_HEADER:
            raise _RefusedError(f"headers of {len(self.block):,} bytes")
        if len(self.block) + len(payload) > _MAX_PAYLOAD:
            raise _RefusedError(f"a message of {len(self.block) + len(payload):,} bytes")
        if any(byte in b" \t\r\n\0" for byte in self.subject) or not all(self.subject.split(b".")):
            raise _RefusedError("a subject that is none")
        return 1


def one(data: bytes) -> None:
    """Build a letter, store it, read it, show it; or show one that somebody else has stored."""
    feed = Feed(data)
    kind = feed.byte() % 3
    if kind == 0:
        block, payload = _stored_by_others(feed)
    else:
        block, payload = _built(feed)
    _show(letter_of(Stored(3, "parti.dlq.S.a", payload, block, datetime.now(UTC) - timedelta(1))), payload)


def _stored_by_others(feed: Feed) -> tuple[bytes, bytes]:
    return b"NATS/1.0\r\n" + feed.chunk() + feed.rest() + b"\r\n\r\n", feed.chunk()


def _built(feed: Feed) -> tuple[bytes, bytes]:
    omit_large, reason = feed.flag(), describe(ValueError(feed.text()))
    payload = feed.chunk()
    if feed.byte() > 250:
        payload = b"x" * (_MAX_PAYLOAD - feed.byte() * 8)
        omit_large = True
    raw = feed.chunk() * (1 + feed.byte() % 20)
    # A server takes any bytes in a subject but these.
    tokens = [token for token in raw.translate(None, b" \t\r\n\0").split(b".") if token]
    subject = (b".".join(tokens) or b"a")[:4000].rstrip(b".").decode("utf-8", "replace")
    header = b"NATS/1.0\r\n" + feed.chunk() + feed.rest() + b"\r\n\r\n"
    header *= 1 + 40 * (feed.byte() > 200)
    owner = Ownership(Partition(subject, subject, {}), "S", "w-0")
    message = Message(subject, payload, 7, owner, _REPLY, header[:65_000], 1.7e9, 3)
    api = _Api()
    letters = DeadLetterStream(
        cast("Any", api), Health(), subject="parti.dlq", max_payload=_MAX_PAYLOAD, omit_large=omit_large
    )
    try:
        _loop.run_until_complete(letters.send(message, reason))
    except _RefusedError as error:
        raise WrongError(f"the server would refuse a dead letter: {str(error).partition(' of ')[0]}") from error
    letter = letter_of(Stored(3, "", api.payload, api.block, datetime.now(UTC)))
    if letter.stream != "S" or letter.origin_seq != 7 or letter.attempts != 3:
        raise WrongError("a dead letter does not say where it comes from")
    return api.block, api.payload


def _show(letter: Letter, payload: bytes) -> None:
    mark: LetterMark = EXAMPLES[LetterMark]
    _ = (letter.origin_seq, letter.attempts, letter.own_headers)
    kind = zlib.crc32(payload + letter.error.encode("utf-8", "replace")) % 3
    with screen():  # one view of each letter: rich takes longer than all the rest
        if kind == 0:
            print_list(open_console(), "parti-dlq", [letter, letter], {3: mark}, 1)
        elif kind == 1:
            print_letter(open_console(), letter, payload, mark, 2000)
        else:
            print_json(list_json("parti-dlq", [letter], {}, 5))
            print_json({**letter_json(letter, mark), **payload_json(payload, 200)})


def seeds() -> list[bytes]:
    """Letters of ordinary messages, built and stored."""
    blocks = [
        b"Parti-Stream: S\r\nParti-Sequence: 7\r\nParti-Attempts: 3\r\nParti-Error: ValueError: x\r\n",
        b"A: b\r\nContent-Type: text/plain",
        b"Nats-Msg-Id: x\r\nParti-Worker: w-0\r\nParti-Published: 2026-11-18T12:00:00+00:00",
    ]
    built = [bytes((1, flag, kind, 5, 3)) + b"abc\0\3a.b\0" for flag in (0, 1) for kind in range(8)]
    return [
        *(b"\0\0" + block for block in blocks),
        *(each + b"\0" + block for each in built for block in blocks),
        *(bytes((1, 1, 7, 0, 0, 255, 9)) + block for block in blocks),
        *(bytes((1, 1, 7, 0, 0, 0, 230, number, 15, 19)) for number in range(31)),
    ]


TARGET = Target("letters", one, seeds)
