"""Messages that carry when they were sent and their number, at a steady rate, each acknowledged by its stream."""

from __future__ import annotations

import asyncio
import contextlib
import time

from benchmarks.lean_readers import STAMP, connected
from nats.aio.client import Client

from parti.jetstream.wire import Wire

PAYLOAD_BYTES = 256
WINDOW = 4_096
"""Unacknowledged messages at most: above, the server would drop what it cannot store in time."""
_PAD = bytes(PAYLOAD_BYTES - STAMP.size) + b"\r\n"
_TICK_S = 0.001
_SAMPLE_NS = 20_000_000
_STORE_LIMIT_S = 30.0

Sample = tuple[int, int, int]
"""A moment (ns since 1970), and how many messages had been sent and acknowledged by then."""


class Load:
    """A publisher on one connection. Messages are numbered through; they visit the subjects in a scattered order."""

    def __init__(self) -> None:
        self.sent = 0
        self._stored = self._refused = 0
        self._running = False
        self._task: asyncio.Task[None] | None = None
        self._samples: list[Sample] = []
        self._client: Client | None = None

    async def connect(self, url: str, subjects: list[str]) -> None:
        """Begin anew on another server."""
        await self.close()
        self._client = await connected(url)
        self._wire = Wire(self._client)
        inbox = self._wire.new_inbox()
        self._wire.subscribe(inbox, self._acknowledged)
        self._heads = [b"PUB %b %b %d\r\n" % (s.encode(), inbox.encode(), PAYLOAD_BYTES) for s in subjects]
        self.sent = self._stored = self._refused = 0

    def _acknowledged(self, _subject: bytes, _reply: bytes, header: bytes | None, payload: bytes) -> None:
        self._stored += 1
        if header or b'"error"' in payload:
            self._refused += 1

    def _send(self, number: int, subject: int | None = None) -> None:
        """Send the next so many messages, scattered or all on one subject."""
        heads, count, stamp = self._heads, len(self._heads), time.time_ns()
        parts: list[bytes] = []
        for n in range(self.sent, self.sent + number):
            parts += (heads[n * 7919 % count if subject is None else subject], STAMP.pack(stamp, n), _PAD)
        self.sent += number
        self._wire.write(b"".join(parts))

    def start(self, rate: float) -> None:
        """Send at that rate until `stop`."""
        self._samples, self._running = [], True
        self._task = asyncio.get_running_loop().create_task(self._run(rate))

    async def _run(self, rate: float) -> None:
        first, began, sampled_ns = self.sent, time.perf_counter(), 0
        while self._running:
            due = first + int(rate * (time.perf_counter() - began)) - self.sent
            if (room := min(due, WINDOW - (self.sent - self._stored))) > 0:
                self._send(room)
            if (now_ns := time.time_ns()) - sampled_ns >= _SAMPLE_NS:
                self._samples.append((now_ns, self.sent, self._stored))
                sampled_ns = now_ns
            await asyncio.sleep(_TICK_S)

    async def stop(self) -> list[Sample]:
        """Stop and wait until all is stored; returns what was sent and stored by when since `start`."""
        self._running = False
        if self._task:
            await self._task
        await self._all_stored()
        self._samples.append((time.time_ns(), self.sent, self._stored))
        return self._samples

    async def burst(self, number: int, limit_s: float) -> None:
        """Send so many as fast as they can be stored, or as many as that takes in within a time."""
        end, until_s = self.sent + number, time.monotonic() + limit_s
        while self.sent < end and time.monotonic() < until_s:
            room = min(WINDOW - (self.sent - self._stored), end - self.sent, 1_000)
            if room > 0:
                self._send(room)
            await asyncio.sleep(0)
        await self._all_stored()

    def probe(self, subjects: list[int]) -> None:
        """One message on each of these subjects at once."""
        for subject in subjects:
            self._send(1, subject)

    def count(self) -> tuple[int, int, int]:
        """Messages sent, answered by a stream, and refused by it."""
        return self.sent, self._stored, self._refused

    async def close(self) -> None:
        """Stop and close the connection."""
        self._running = False
        if self._client:
            await self._client.close()

    async def _all_stored(self) -> None:
        with contextlib.suppress(TimeoutError):  # refused or late: the count says it
            async with asyncio.timeout(_STORE_LIMIT_S):
                while self._stored < self.sent:  # noqa: ASYNC110 - a count that the socket moves
                    await asyncio.sleep(0.002)
