"""Publishes odd messages through bare PUB and HPUB lines on a socket of its own: no client library would send them.

What the server acknowledges is noted like the messages of the other publishers. A message that was on its way when
the server was killed is not sent again: it may be stored or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from chaos.notes import PUBLISHED
from chaos.odd_messages import KINDS, OddMessage, make_odd

_AGAIN_S = 0.2
_ANSWERS_S = 5.0
_INBOX = "_INBOX.odd"
_CONNECT = {
    "verbose": False,
    "pedantic": False,
    "headers": True,
    "no_responders": True,
    "lang": "raw",
    "version": "0",
}


class OddPublisher:
    """Sends odd messages of all kinds, one after the other, to some partitions."""

    def __init__(self, port: int, directory: Path, partitions: Sequence[str], *, rate: float, seed: int) -> None:
        self.stored: Counter[str] = Counter()
        """Acknowledged by the server, by kind."""
        self.refused: Counter[str] = Counter()
        """What the server said instead."""
        self._port = port
        self._partitions = partitions
        self._pause_s = 1 / rate
        self._chance = random.Random(seed)
        self._file = os.open(directory / f"odd{PUBLISHED}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._count = 0
        self._waiting: dict[int, tuple[str, str, int]] = {}
        """Kind, partition and time of what was sent and is not answered."""
        self._stopping = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Send no more, wait a little for the last answers, and raise what went wrong."""
        self._stopping.set()
        await self._task
        os.close(self._file)

    async def _run(self) -> None:
        while not self._stopping.is_set():
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await self._connected()
            self._waiting.clear()
            await self._rest(_AGAIN_S)

    async def _connected(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        listening = asyncio.create_task(self._listen(reader, writer))
        try:
            writer.write(b"CONNECT %s\r\nSUB %s.* 1\r\n" % (json.dumps(_CONNECT).encode(), _INBOX.encode()))
            while not self._stopping.is_set() and not listening.done():
                self._send(writer)
                await writer.drain()
                await self._rest(self._pause_s)
            deadline_s = time.monotonic() + _ANSWERS_S
            while self._waiting and not listening.done() and time.monotonic() < deadline_s:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            writer.close()

    async def _rest(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    def _send(self, writer: asyncio.StreamWriter) -> None:
        kind = list(KINDS)[self._count % len(KINDS)]
        partition = self._chance.choice(self._partitions)
        self._count += 1
        self._waiting[self._count] = (kind, partition, time.time_ns())
        writer.write(publish_line(partition, make_odd(kind, self._chance), f"{_INBOX}.{self._count}"))

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            words = line.split()
            if words[:1] == [b"PING"]:
                writer.write(b"PONG\r\n")
            elif words[:1] == [b"-ERR"]:
                self.refused[line.decode(errors="replace").strip()] += 1
            elif words[:1] in ([b"MSG"], [b"HMSG"]):
                payload = await reader.readexactly(int(words[-1]) + 2)
                # Nobody was there: a header block, and no payload.
                answer = json.loads(payload) if words[0] == b"MSG" else {"error": "no stream was there"}
                self._take(int(words[1].rpartition(b".")[2]), answer)

    def _take(self, number: int, answer: dict[str, object]) -> None:
        if (sent := self._waiting.pop(number, None)) is None:
            return
        kind, partition, sent_ns = sent
        if "error" in answer:
            self.refused[f"{kind}: {answer['error']}"] += 1
            return
        self.stored[kind] += 1
        os.write(self._file, f"{answer['seq']} {partition} {sent_ns} {time.time_ns()}\n".encode())


def publish_line(partition: str, message: OddMessage, reply: str) -> bytes:
    """The bytes that publish a message."""
    subject = b"chaos." + partition.encode() + b"." + message.token
    head, body = message.header, message.payload
    if head:
        sizes = b"%d %d" % (len(head), len(head) + len(body))
        return b"HPUB %s %s %s\r\n%s%s\r\n" % (subject, reply.encode(), sizes, head, body)
    return b"PUB %s %s %d\r\n%s\r\n" % (subject, reply.encode(), len(body), body)
