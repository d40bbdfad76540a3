"""A publisher that sends what nats-py refuses: raw lines of the protocol on a socket of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

ESCAPES = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202e"
"""Clears a screen, sets the title of a window, changes a colour, turns the direction of writing."""


class RawPublisher:
    """Publishes bytes as they are; each call returns once the server has read them."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def pub(self, subject: bytes, data: bytes = b"x") -> None:
        await self._send(b"PUB %b %d\r\n%b\r\n" % (subject, len(data), data))

    async def hpub(self, subject: bytes, headers: Iterable[tuple[bytes, bytes]], data: bytes = b"x") -> None:
        lines = b"".join(b"%b: %b\r\n" % pair for pair in headers)
        block = b"NATS/1.0\r\n%b\r\n" % lines
        await self._send(b"HPUB %b %d %d\r\n%b%b\r\n" % (subject, len(block), len(block) + len(data), block, data))

    async def _send(self, data: bytes) -> None:
        self._writer.write(data + b"PING\r\n")
        await self._writer.drain()
        async with asyncio.timeout(10):
            while (line := await self._reader.readline()) == b"PING\r\n":  # the server asks as well
                self._writer.write(b"PONG\r\n")
        assert line == b"PONG\r\n", line


@asynccontextmanager
async def raw_publisher(url: str) -> AsyncIterator[RawPublisher]:
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    try:
        assert (await reader.readline()).startswith(b"INFO ")
        writer.write(b"CONNECT %b\r\n" % json.dumps({"verbose": False, "headers": True}).encode())
        publisher = RawPublisher(reader, writer)
        yield publisher
    finally:
        writer.close()
        await writer.wait_closed()
