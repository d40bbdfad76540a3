"""Messages of the model that end by themselves: TTLs, and the markers that they leave."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from parti.sim.messages import SECOND_NS, RefusalError, duration
from parti.sim.timers import Timer

if TYPE_CHECKING:
    from parti.sim.streams import Stream

_MIN_LOOK_NS = SECOND_NS // 4
"""The server looks for expired messages four times a second at most."""


def ttl_of(headers: Mapping[str, str]) -> int:
    """The message's life in whole seconds; 0 when it has no end."""
    text = headers.get("Nats-TTL")
    if not text:
        return 0
    number = text[:-1] if text.endswith("s") else text
    if not number.isdigit():
        raise NotImplementedError(f"the model reads a TTL of whole seconds only, not {text!r}")
    if int(number) < 1 and text.endswith("s"):
        raise RefusalError(400, 10165, "invalid per-message TTL")
    return int(number)


class Expiry:
    """Ends the messages of one stream in time; up to a quarter of a second late, as the server does."""

    __slots__ = ("_due", "_stream", "_timer", "marker_ttl_s")

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.marker_ttl_s = 0
        self._due: list[tuple[int, int]] = []
        self._timer = Timer(stream.server.timers, self._look)

    def add(self, seq: int, ttl_s: int) -> None:
        """End a message that was just stored after so many seconds."""
        if self.marker_ttl_s and self._stream.per_subject != 1 and ttl_s < self.marker_ttl_s:
            raise NotImplementedError("the model has no TTL below the marker's on a stream with history")
        heappush(self._due, (self._stream.server.now_ns + ttl_s * SECOND_NS, seq))
        self._plan()

    def restart(self) -> None:
        """Go on after a restart of the server, which forgets its timers."""
        self._timer = Timer(self._stream.server.timers, self._look)
        self._plan()

    def stop(self) -> None:
        """Do nothing more: the stream is deleted."""
        self._timer.set(0)
        self._due.clear()

    def _plan(self) -> None:
        if self._due:
            due_ns = max(self._due[0][0], self._stream.server.now_ns + _MIN_LOOK_NS)
            if not self._timer.due_ns or due_ns < self._timer.due_ns:
                self._timer.set(due_ns)

    def _look(self) -> None:
        """Delete what has outlived its TTL, leaving markers where the stream wants them."""
        stream, now_ns, expired = self._stream, self._stream.server.now_ns, []
        while self._due and self._due[0][0] <= now_ns:
            expired.append(heappop(self._due)[1])
        for seq in sorted(expired):
            message = stream.messages.get(seq)
            if message is None:
                continue
            header = message.header or b""
            marker = b"\r\nNats-Marker-Reason:" in header or b"\r\nKV-Operation: PURGE\r\n" in header
            if self.marker_ttl_s and not marker and len(stream.by_subject[message.subject]) == 1:
                self._leave_marker(message.subject)
            else:
                stream.remove(seq)
        self._plan()

    def _leave_marker(self, subject: str) -> None:
        ttl = duration(self.marker_ttl_s)
        header = f"NATS/1.0\r\nNats-Marker-Reason: MaxAge\r\nNats-TTL: {ttl}\r\nNats-Rollup: sub\r\n\r\n".encode()
        message = self._stream.store(subject, header, b"")
        if message is not None:
            self.add(message.seq, self.marker_ttl_s)
            self._stream.purge(subject, keep=1)
            self._stream.announce(message)
