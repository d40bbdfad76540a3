"""The answer to a batched direct get, checked while it comes in. Standard library and `parti.model.safe_text` only.

Each message of a batch names the one before it, and the status at the end names the last one: whatever was lost on
the way shows, and the answer ends before it. The server's own header lines come last, whatever lines of the same
names a publisher wrote before them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from parti.model.safe_text import text_of

_BARE = b"NATS/1.0"
_MESSAGE = re.compile(
    rb"(.*)\r\nNats-Stream: ([^\r]+)\r\nNats-Subject: ([^\r]+)\r\nNats-Sequence: (\d{1,20})\r\n"
    rb"Nats-Time-Stamp: ([^\r]+)\r\nNats-Num-Pending: \d+\r\nNats-Last-Sequence: (\d{1,20})\r\n\r\n",
    re.DOTALL,
)
_END = re.compile(rb"NATS/1\.0 204 [^\r]*\r\nNats-Num-Pending: (\d{1,20})\r\nNats-Last-Sequence: (\d{1,20})\r\n\r\n")
_STATUS = re.compile(rb"NATS/1\.0 (\d{3})([^\r\n]*)\r\n\r\n")


@dataclass(frozen=True, slots=True)
class Stored:
    """A message as it lies in the stream."""

    seq: int
    subject: str
    data: bytes
    header: bytes | None
    stored_at: datetime


class DirectAnswer:
    """What one batched direct get has brought so far.

    `messages` is gap-free at any moment. `done`: nothing that comes later could be used; `on_done` is called once.
    """

    def __init__(self, stream: str, seq: int, up_to: int, on_done: Callable[[], None] = lambda: None) -> None:
        self._stream = stream.encode()
        self._seq = seq
        self._up_to = up_to
        self._last = 0
        self._on_done = on_done
        self.messages: list[Stored] = []
        self.done = False
        self.heard = 0
        self.at_end = False
        """Whoever answered has no more, up to the bound."""
        self.trouble = ""
        """Why the answer was given up before its end."""
        self.by_mirror = False
        """A mirror of the stream has answered: to ask again may bring the stream's own answer."""

    def take(self, header: bytes | None, payload: bytes) -> None:
        """Take in one message of the answer."""
        self.heard += 1
        if self.done:
            return
        if match := _MESSAGE.fullmatch(header or b""):
            self._take_message(match, payload)
        else:
            self._take_status(header or b"")

    def give_up(self, trouble: str) -> None:
        """End the answer here; what came so far is good."""
        if not self.done:
            self.trouble = trouble
            self._finish()

    def _take_message(self, match: re.Match[bytes], payload: bytes) -> None:
        block, stream, subject, seq_text, stamp, before = match.groups()
        seq = int(seq_text)
        if stream != self._stream:
            # Mirrors answer too, and keep what their own limits let them keep.
            self.by_mirror = True
            self.give_up(f"answered by the mirror {stream.decode()}")
        elif int(before) != self._last or seq < self._seq:
            self.give_up(f"message {seq} follows {int(before)}, not {self._last}")
        elif seq > self._up_to:
            self._end()
        else:
            header = block + b"\r\n\r\n" if block != _BARE else None
            try:
                stored_at = datetime.fromisoformat(stamp.decode())
            except ValueError:
                self.give_up(f"message {seq} has no time that can be read")
                return
            self.messages.append(Stored(seq, text_of(subject), payload, header, stored_at))
            # Last: a message that could not be decoded raises above, and then is a hole like any other.
            self._last, self._seq = seq, seq + 1

    def _take_status(self, header: bytes) -> None:
        if match := _END.fullmatch(header):
            pending, last = int(match[1]), int(match[2])
            if last != self._last:
                self.give_up(f"the batch ended with message {last}, the last that came was {self._last}")
            elif pending:
                self._finish()
            else:
                self._end()
        elif match := _STATUS.fullmatch(header):
            if match[1] == b"404":
                self._end()
            else:
                self.give_up((match[1] + match[2]).decode(errors="replace"))
        else:
            # Also a stored header block without its end: the server cuts it and writes its own lines into it.
            self.give_up(f"message after {self._last} cannot be read from a direct get")

    def _end(self) -> None:
        self.at_end = True
        self._finish()

    def _finish(self) -> None:
        self.done = True
        self._on_done()
