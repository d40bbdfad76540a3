"""The one reader of the NATS client protocol, for workers and for Spark's tasks. Standard library only.

It takes whole messages out of a buffer and calls a sink for each, without an object in between: about 2 us a message
where nats-py takes 8 to 30. It knows messages and lines; what to do with a line, and with a message that nobody here
has subscribed, is its user's business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

Sink: TypeAlias = Callable[[bytes, bytes, bytes | None, bytes], None]
"""Takes subject, reply, header block or None, and payload of one message. Must not block."""

_MAX_LINE = 1 << 20
_MAX_SIZE = 1 << 40


class MalformedError(Exception):
    """The bytes are not the NATS protocol."""


class Stray(NamedTuple):
    """What no sink takes: a line (with its end; then there is no `sid`), or a message."""

    line: bytes
    sid: bytes = b""
    subject: bytes = b""
    reply: bytes = b""
    header: bytes | None = None
    payload: bytes = b""


class Scanner:
    """Reads one buffer after the other; `sinks`, by subscription id as in the protocol, may change meanwhile.

    After `scan`, everything before `pos` has been dealt with. If a sink raises, so does `scan`, with `pos` behind the
    message; call it again to go on.
    """

    __slots__ = ("called", "need", "pos", "sinks")

    def __init__(self, sinks: dict[bytes, Sink]) -> None:
        self.sinks = sinks
        self.pos = 0
        self.need = 0
        """How many bytes from `pos` on the message takes that is not there as a whole; 0 when that is not known."""
        self.called = False
        """A sink was called since this was set to False."""

    def scan(self, buf: bytes) -> Stray | None:
        """Go on at `pos` to the next stray, which is returned, or to the end of the last whole message: None."""
        pos, end_of_buf, find, sinks = self.pos, len(buf), buf.find, self.sinks
        self.need = 0
        # Most messages are as long as the one before, and a pin makes their headers equally long: to compare digits
        # takes a fifth of the time that it takes to read them.
        size = head_size = 0
        digits = head_digits = b"0"
        while pos < end_of_buf:
            eol = find(b"\r\n", pos)
            if eol < 0:
                _check_unended(end_of_buf - pos)
                break
            op = buf[pos]
            if op not in (77, 72):  # neither MSG nor HMSG
                self.pos = eol + 2
                return Stray(buf[pos : eol + 2])
            # At spaces only: a subject may hold vertical tabs and form feeds, and `split()` would cut there.
            args = buf[pos:eol].split(b" ")
            begin, header = eol + 2, None
            try:
                if args[-1] != digits:
                    size, digits = _size(args[-1], _MAX_SIZE), args[-1]
                end = begin + size
                if len(args) == (4 if op == 77 else 5):
                    args.insert(3, b"")  # no reply
                if op == 77:
                    _, subject, sid, reply, _ = args
                else:
                    _, subject, sid, reply, head, _ = args
                    if head != head_digits or head_size > size:
                        head_size, head_digits = _size(head, size), head
                    header = buf[begin : begin + head_size]
                    begin += head_size
            except (ValueError, IndexError) as error:
                raise MalformedError("malformed MSG") from error
            if end + 2 > end_of_buf:
                self.need = end + 2 - pos
                break
            self.pos = pos = end + 2
            sink = sinks.get(sid)
            if sink is None:
                return Stray(b"", sid, subject, reply, header, buf[begin:end])
            self.called = True
            sink(subject, reply, header, buf[begin:end])
        return None


def _size(digits: bytes, most: int) -> int:
    size = int(digits)
    if not 0 <= size <= most:
        raise ValueError("size out of range")
    return size


def _check_unended(length: int) -> None:
    if length > _MAX_LINE:
        raise MalformedError("protocol line too long")
