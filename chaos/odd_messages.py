"""Odd messages that a publisher may send at any time: what they look like, and how the handlers answer them.

The last token of a subject names the kind; ordinary messages have `PLAIN` there, or nothing. A handler refuses most
kinds with an error that quotes what it was given, as handlers do: each such message must become a dead letter, and
its partition must go on.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

PLAIN = "plain"
ODD_TEMPLATE = "chaos.{p}.{kind}"
"""A partition spans all kinds, so that odd messages stand in the same order as the others."""
_HEADER_BYTES = (64_000, 65_530)
"""From what leaves little room for more to what leaves none: the server takes 65,535 in all."""
_SUBJECT_BYTES = (4_000, 4_070)
"""The server takes 4,096 for the whole line, with a reply subject and the size."""
_SUBJECT_START = len("chaos.p9999.")


@dataclass(frozen=True, slots=True)
class OddMessage:
    """A message as raw bytes."""

    token: bytes
    """The last token of its subject: the kind, perhaps with something after a dash."""
    header: bytes
    """The whole header block; empty: none."""
    payload: bytes


def make_odd(kind: str, chance: random.Random) -> OddMessage:
    """Make a message of a kind out of `KINDS`."""
    return KINDS[kind](chance)


def refuse(subject: str, headers: Mapping[str, str], data: bytes) -> None:
    """Raise what a handler raises for an odd message; return for all others."""
    kind = subject.rpartition(".")[2].partition("-")[0]
    match kind:
        case "text":
            data.decode()
        case "surrogate":
            raise ValueError(f"no such customer: {json.loads(data)['customer']}")
        case "headers":
            raise ValueError(f"too many headers: {len(headers)}, the last is {list(headers)[-1]}")
        case "subject" | "bytes":
            raise ValueError(f"no route for {subject}")
        case "control":
            raise ValueError(f"odd source: {headers.get('X-Source')}")


def _block(*lines: bytes) -> bytes:
    return b"NATS/1.0\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


def _text(chance: random.Random) -> OddMessage:
    """A payload that is not UTF-8."""
    return OddMessage(b"text", b"", b"\xff\xfe\x80" + chance.randbytes(40))


def _surrogate(chance: random.Random) -> OddMessage:
    """JSON with half of a surrogate pair, which is no text that could be written anywhere."""
    half = chance.choice([b"\\ud800", b"\\udfff", b"a\\udc80b"])
    return OddMessage(b"surrogate", b"", b'{"customer":"%s"}' % half)


def _headers(chance: random.Random) -> OddMessage:
    """Headers that leave no room for those of a dead letter."""
    lines = [b"X-Filler-%d: %s" % (n, b"x" * 980) for n in range(60)]
    missing = chance.choice(_HEADER_BYTES) - len(_block(*lines, b"X-Last: "))
    return OddMessage(b"headers", _block(*lines, b"X-Last: " + b"y" * missing), b"{}")


def _subject(chance: random.Random) -> OddMessage:
    """A subject that leaves no room for a prefix before it."""
    token = b"subject-".ljust(chance.choice(_SUBJECT_BYTES) - _SUBJECT_START, b"s")
    return OddMessage(token, b"", b"{}")


def _bytes(chance: random.Random) -> OddMessage:
    """A subject that is not UTF-8."""
    return OddMessage(b"bytes-" + chance.choice([b"\xff\xfe", b"\xc3(", b"\xed\xa0\x80"]), b"", b"{}")


def _unknown(chance: random.Random) -> OddMessage:
    """Headers that nobody knows; handled like any other message."""
    names = [b"Nats-Nobody-Knows", b"Parti-Sequence-Of-Mine", b"x y", b"\xc3\xa9t\xc3\xa9", b"Empty"]
    return OddMessage(
        b"unknown", _block(*(b"%s: %d" % (name, chance.randrange(9)) for name in names), b"Empty:"), b""
    )


def _control(chance: random.Random) -> OddMessage:
    """Header values with control characters, which a terminal would obey."""
    value = chance.choice([b"\x1b[2J\x1b[31mred", b"a\x00b\x07c", b"\x7f\x9b31m", b"\xe2\x80\xaegnp.exe"])
    return OddMessage(b"control", _block(b"X-Source: " + value), b"{}")


KINDS: dict[str, Callable[[random.Random], OddMessage]] = {
    "text": _text,
    "surrogate": _surrogate,
    "headers": _headers,
    "subject": _subject,
    "bytes": _bytes,
    "unknown": _unknown,
    "control": _control,
}
