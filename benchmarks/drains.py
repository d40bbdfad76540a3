"""Draining a consumer as fast as the server gives, in each way to acknowledge: what `acks` and `check` share.

A file stream holds messages on many subjects in turn; a memory mirror of it holds the same ones under the same
sequences. A drain makes a fresh durable pull consumer on one of the two, reads all it has through parti's protocol
reader with overlapping pulls and no logic, and says what it took.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from parti.config import Settings
from parti.embedded import Server
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.wire import Wire, pub

STREAM, MIRROR, PATTERN = "ACKS", "ACKS_HOT", "acks.*"
PAYLOAD = b"x" * 256
FILTERS = 80
MAX_ACK_PENDING = 2_000
BATCH = MAX_ACK_PENDING * 2 // 5
PULLS = 2
_WRITE_AT_ONCE = 2_000
_LIMIT_S = 120.0


class Acks(enum.StrEnum):
    """How what was read is acknowledged."""

    SINGLE = "explicit, a write for each"
    JOINED = "explicit, a write for each chunk"
    ALL = "all, one ack for each chunk"
    NONE = "none"

    @property
    def policy(self) -> str:
        """The consumer's `ack_policy`."""
        return {Acks.ALL: "all", Acks.NONE: "none"}.get(self, "explicit")


@dataclass(frozen=True, slots=True)
class Drained:
    """What reading `messages` took."""

    messages: int
    seconds: float
    reader_cpu_s: float
    server_cpu_s: float

    def __add__(self, other: Drained) -> Drained:
        return Drained(
            self.messages + other.messages,
            self.seconds + other.seconds,
            self.reader_cpu_s + other.reader_cpu_s,
            self.server_cpu_s + other.server_cpu_s,
        )

    @property
    def msg_per_s(self) -> float:
        """Messages a second."""
        return self.messages / self.seconds

    @property
    def reader_us(self) -> float:
        """Microseconds of the reader's CPU for each message."""
        return self.reader_cpu_s / self.messages * 1e6

    @property
    def server_us(self) -> float:
        """Microseconds of the server's CPU for each message."""
        return self.server_cpu_s / self.messages * 1e6


@dataclass(frozen=True, slots=True)
class Source:
    """A filled file stream and its mirror, on a server of their own."""

    url: str
    server_pid: int
    api: JetStreamApi
    messages: int
    subjects: int

    def filters(self, count: int, block: int) -> list[str]:
        """The subjects of the block-th worker of those that have `count` each."""
        first = block * count % self.subjects
        return [f"acks.{(first + number) % self.subjects}" for number in range(count)]


@contextlib.asynccontextmanager
async def filled(messages: int, subjects: int) -> AsyncIterator[Source]:
    """Start a server and fill it; whole rounds over the subjects, so that each has as many messages."""
    messages -= messages % subjects
    async with Server() as server:
        connection = await connect(server.url)
        api, wire = JetStreamApi(connection, timeout_s=30.0), Wire(connection.client)
        await api.call(f"STREAM.CREATE.{STREAM}", {"name": STREAM, "subjects": [PATTERN], "storage": "file"})
        mirror = {"name": MIRROR, "storage": "memory", "mirror": {"name": STREAM}}
        await api.call(f"STREAM.CREATE.{MIRROR}", mirror)
        await publish(wire, api, messages, subjects)
        await until_stored(api, MIRROR, messages)
        try:
            yield Source(server.url, server.pid, api, messages, subjects)
        finally:
            await connection.close()


async def connect(url: str) -> Connection:
    """A connection to one server."""
    return await Connection.open(Settings(nats=(url,)), name="acks")


async def publish(wire: Wire, api: JetStreamApi, count: int, subjects: int) -> None:
    """Write messages on the subjects in turn.

    The last one of each block waits for the stream, so that its queue stays short, and the count is checked: a drain
    of fewer messages than expected would wait for ever.
    """
    for begin in range(0, count, _WRITE_AT_ONCE):
        *numbers, last = range(begin, min(count, begin + _WRITE_AT_ONCE))
        wire.write(b"".join(pub(b"acks.%d" % (number % subjects), PAYLOAD) for number in numbers))
        await api.publish(f"acks.{last % subjects}", PAYLOAD, timeout_s=30.0)
    stored = (await api.stream_info(STREAM)).last_seq
    if stored != count:
        raise RuntimeError(f"the stream has {stored:,} messages, expected {count:,}")


async def until_stored(api: JetStreamApi, stream: str, last_seq: int) -> None:
    """Wait until the stream has that message."""
    async with asyncio.timeout(_LIMIT_S):
        while (await api.stream_info(stream)).last_seq < last_seq:  # noqa: ASYNC110 - a server's count
            await asyncio.sleep(0.02)


async def drain(source: Source, stream: str, filters: list[str], acks: Acks, name: str) -> Drained:
    """Read everything that a fresh durable consumer with these filters has, then delete it."""
    config = {
        "name": name,
        "durable_name": name,
        "deliver_policy": "all",
        "ack_policy": acks.policy,
        "filter_subjects": filters,
        "ack_wait": int(60e9),
        "max_waiting": 256,
        **({} if acks is Acks.NONE else {"max_ack_pending": MAX_ACK_PENDING}),
    }
    connection = await connect(source.url)
    wanted = (await source.api.put_consumer(stream, config, action="create")).pending
    reader = Reader(Wire(connection.client), stream, name, acks, wanted)
    server_cpu_s, reader_cpu_s, started_s = cpu_of(source.server_pid), time.process_time(), time.perf_counter()
    reader.start()
    async with asyncio.timeout(_LIMIT_S):
        await reader.done.wait()
    seconds = time.perf_counter() - started_s
    await connection.flush(30.0)  # the last acknowledgements belong to it
    drained = Drained(wanted, seconds, time.process_time() - reader_cpu_s, cpu_of(source.server_pid) - server_cpu_s)
    await until_settled(source.api, stream, name)
    await connection.close()
    await source.api.delete_consumer(stream, name)
    return drained


async def drain_mirror(source: Source, acks: Acks, consumers: int, name: str) -> Drained:
    """Drain the mirror through several consumers, one after the other, each with 80 other subjects."""
    parts = [
        await drain(source, MIRROR, source.filters(FILTERS, number), acks, f"{name}-{number}")
        for number in range(consumers)
    ]
    return sum(parts[1:], start=parts[0])


async def until_settled(api: JetStreamApi, stream: str, name: str) -> None:
    """Wait until the server has taken in every acknowledgement: a drain that left some behind measured nothing."""
    async with asyncio.timeout(10.0):
        while True:
            info = await api.consumer_info(stream, name)
            if not info.ack_pending and not info.pending:
                return
            await asyncio.sleep(0.02)


class Reader:
    """Overlapping pulls of one consumer until `wanted` messages have come."""

    def __init__(self, wire: Wire, stream: str, name: str, acks: Acks, wanted: int) -> None:
        self._wire = wire
        self._acks = acks
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}".encode()
        self._body = json.dumps({"batch": BATCH, "expires": int(30e9), "idle_heartbeat": int(5e9)}).encode()
        self._left = wanted
        self._out: list[bytes] = []
        self._newest = b""
        self.done = asyncio.Event()

    def start(self) -> None:
        """Send the pulls."""
        self._wire.on_chunk(self._chunk_done)
        make = {Acks.SINGLE: self._single_sink, Acks.JOINED: self._joined_sink}.get(self._acks, self._newest_sink)
        for _ in range(PULLS):
            inbox = self._wire.new_inbox()
            again = pub(self._subject, self._body, inbox.encode())
            self._wire.subscribe(inbox, make(again))
            self._wire.write(again)

    # One sink for each way, with nothing in it that the others need: a branch would be paid for by all.

    def _single_sink(self, again: bytes) -> Callable[[bytes, bytes, bytes | None, bytes], None]:
        left = BATCH

        def sink(_subject: bytes, reply: bytes, _header: bytes | None, _payload: bytes) -> None:
            nonlocal left
            if not reply:
                return
            self._wire.write(b"PUB %b 4\r\n+ACK\r\n" % reply)
            self._left -= 1
            left -= 1
            if not left:
                left = BATCH
                self._out.append(again)

        return sink

    def _joined_sink(self, again: bytes) -> Callable[[bytes, bytes, bytes | None, bytes], None]:
        left = BATCH

        def sink(_subject: bytes, reply: bytes, _header: bytes | None, _payload: bytes) -> None:
            nonlocal left
            if not reply:
                return
            self._out.append(b"PUB %b 4\r\n+ACK\r\n" % reply)
            self._left -= 1
            left -= 1
            if not left:
                left = BATCH
                self._out.append(again)

        return sink

    def _newest_sink(self, again: bytes) -> Callable[[bytes, bytes, bytes | None, bytes], None]:
        left = BATCH

        def sink(_subject: bytes, reply: bytes, _header: bytes | None, _payload: bytes) -> None:
            nonlocal left
            if not reply:
                return
            self._newest = reply
            self._left -= 1
            left -= 1
            if not left:
                left = BATCH
                self._out.append(again)

        return sink

    def _chunk_done(self) -> None:
        # Deliveries of one connection come in order, so the newest one is the floor when everything is finished.
        if self._acks is Acks.ALL and self._newest:
            self._out.append(b"PUB %b 4\r\n+ACK\r\n" % self._newest)
            self._newest = b""
        if self._out:
            self._wire.write(b"".join(self._out))
            self._out.clear()
        if not self._left:
            self.done.set()


def cpu_of(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
