"""A TCP proxy in front of a NATS server that cuts connections or loses what the server sends."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable

from parti.testing.link import until_one_ends

LOOPBACK = "127.0.0.1"
Loses = Callable[[bytes], bool]
"""Given the first line of what the server says (`MSG ...`, `PONG`), says whether it gets lost."""

_MESSAGE = re.compile(rb"H?MSG .* (\d+)\r\n", re.IGNORECASE)


class Proxy:
    """Forwards connections on loopback to one server until told otherwise.

    TCP loses no bytes within a connection, so the faults are those that really happen: a connection is cut with
    data on its way (`cut`), nobody answers (`refuse`), or single messages, or all, never come although the connection
    lives, as when a route inside a cluster breaks or a server hangs (`lose`), or nothing reaches the server although
    it is heard (`deafen`).
    """

    def __init__(self, port: int) -> None:
        self._upstream_port = port
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._loses: Loses | None = None
        self._refusing = False
        self._deaf = False
        self.connections = 0
        self.lost = 0

    @property
    def url(self) -> str:
        assert self._server
        return f"nats://{LOOPBACK}:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Abort every connection now; what is on its way, either way, is gone."""
        for writer in list(self._open):
            writer.transport.abort()

    def refuse(self, refusing: bool = True) -> None:
        """Cut, and hang up on whoever connects until `refuse(False)`."""
        self._refusing = refusing
        if refusing:
            self.cut()

    def lose(self, loses: Loses | None) -> None:
        """From now on drop what `loses` chooses of what the server says, whole; None: drop nothing more."""
        self._loses = loses

    def deafen(self, deaf: bool = True) -> None:
        """Keep what clients say from the server, until `deafen(False)` or for ever; it is not sent later."""
        self._deaf = deaf

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, LOOPBACK, 0)

    async def stop(self) -> None:
        assert self._server
        self._server.close()
        self.cut()
        await self._server.wait_closed()
        while self._open:  # noqa: ASYNC110 - the ends of aborted connections notice within a turn of the loop
            await asyncio.sleep(0.001)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        try:
            up_reader, up_writer = await asyncio.open_connection(LOOPBACK, self._upstream_port)
        except OSError:
            writer.transport.abort()
            return
        self.connections += 1
        both = {writer, up_writer}
        self._open |= both
        try:
            await until_one_ends(self._upwards(reader, up_writer), self._copy_messages(up_reader, writer))
        finally:
            for end in both:
                end.transport.abort()
            self._open -= both

    async def _upwards(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            if not self._deaf:
                sink.write(data)
                await sink.drain()

    async def _copy_messages(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while line := await source.readline():
            match = _MESSAGE.fullmatch(line)
            body = await source.readexactly(int(match[1]) + 2) if match else b""
            if self._loses and self._loses(line):
                self.lost += 1
                continue
            sink.write(line + body)
            await sink.drain()


@contextlib.asynccontextmanager
async def proxy_to(port: int) -> AsyncIterator[Proxy]:
    """A proxy to a server on loopback for the length of a `with` block."""
    proxy = Proxy(port)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()
