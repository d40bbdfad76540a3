"""A worker's way to the server, which a test can silence for a while or cut for good."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

_LOOPBACK = "127.0.0.1"
_CHUNK = 65536


class Link:
    """A port on loopback that leads to a server; made by `await Link.open(port)`.

    A worker that reaches the server through it and no other way can be taken off the net without a word to it:
    `silence` holds back what either side says, as the kernel does for a process that is stopped, and `cut` ends
    every connection and refuses new ones, as when a process is killed. What was on its way then is gone.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._flows = asyncio.Event()
        self._flows.set()
        self._cut = False
        self._serving: set[asyncio.Task[None]] = set()
        self._ends: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    @classmethod
    async def open(cls, port: int) -> Link:
        """Listen on a free port, and lead whoever connects to the server on `port`."""
        link = cls(port)
        link._server = await asyncio.start_server(link._serve, _LOOPBACK, 0)
        return link

    @property
    def url(self) -> str:
        """What a worker connects to."""
        assert self._server
        return f"nats://{_LOOPBACK}:{self._server.sockets[0].getsockname()[1]}"

    def silence(self, silent: bool) -> None:
        """Hold back everything, both ways, until `silence(False)`; nothing is lost by it."""
        if silent:
            self._flows.clear()
        else:
            self._flows.set()

    def cut(self) -> None:
        """End all connections now and refuse new ones, for good."""
        self._cut = True
        for end in self._ends:
            end.transport.abort()

    async def close(self) -> None:
        """Cut, and give the port back."""
        self.cut()
        if self._server:
            self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._serving.add(task)
        self._ends.add(writer)
        try:
            if not self._cut:
                await self._join(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # the server is gone, or this link is: either way the worker sees a connection that ended
        finally:
            writer.transport.abort()
            self._ends.discard(writer)
            self._serving.discard(task)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(_LOOPBACK, self._port)
        self._ends.add(far_writer)
        try:
            await until_one_ends(self._pump(reader, far_writer), self._pump(far_reader, writer))
        finally:
            far_writer.transport.abort()
            self._ends.discard(far_writer)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(_CHUNK):
            await self._flows.wait()
            if self._cut:
                return
            sink.write(data)
            await sink.drain()


async def until_one_ends(*flows: Coroutine[Any, Any, None]) -> None:
    """Run the ways of a connection until the first one ends, however it does, and cancel the others."""
    pumps = [asyncio.ensure_future(flow) for flow in flows]
    try:
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
