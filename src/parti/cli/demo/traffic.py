"""The demo's messages: made, published with acknowledgements, and read back from the stream."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from parti.cli.demo.check import Stored, digest
from parti.errors import ConnectionFailed, PartiError, RequestTimeout
from parti.jetstream.wire import Wire, pub
from parti.model.headers import parse_headers, status_of
from parti.model.partition import Template

_KINDS = ("etch", "cvd", "pvd", "litho", "cmp")
_CHAMBERS = 4
_WINDOW = 2_000
"""Messages on their way to the server and not yet acknowledged."""
_CHUNK = 200
_TICK_S = 0.01
_READ_BATCH = 5_000
_PATIENCE_S = 10.0

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to publish."""

    subject: bytes
    data: bytes


def make_messages(count: int, partitions: int, template: Template) -> list[Outgoing]:
    """Wafers that leave chambers: every partition gets its share, in an order that is mixed but always the same."""
    subjects = [template.partition(_tool_and_chamber(n)).subject.encode() for n in range(partitions)]
    order = [number % partitions for number in range(count)]
    random.Random(count).shuffle(order)
    return [
        Outgoing(subjects[p], b'{"lot": "L%05d", "wafer": %d, "result": "completed"}' % (n // 25, n % 25 + 1))
        for n, p in enumerate(order)
    ]


def _tool_and_chamber(number: int) -> tuple[str, str]:
    tool, chamber = divmod(number, _CHAMBERS)
    return f"{_KINDS[tool % len(_KINDS)]}{tool // len(_KINDS) + 1:02}", f"c{chamber + 1}"


class Publisher:
    """Publishes to a stream and counts what the server has acknowledged."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._inbox = wire.new_inbox()
        wire.subscribe(self._inbox, self._on_ack)
        self._sent = 0
        self._refused = ""
        self._progress = asyncio.Event()
        self.acknowledged = 0

    def _on_ack(self, _subject: bytes, _reply: bytes, header: bytes | None, payload: bytes) -> None:
        if header or b'"error"' in payload:
            self._refused = " ".join((payload or header or b"").decode(errors="replace").split())
        else:
            self.acknowledged += 1
        self._progress.set()

    async def publish(self, messages: Sequence[Outgoing], *, rate: float | None = None) -> None:
        """Send the messages, at `rate` a second or as fast as the server takes them; returns when it has them all.

        Raises `PartiError` when the server refuses one, `ConnectionFailed` or `RequestTimeout` when it is gone.
        """
        chunk = max(1, int(rate * _TICK_S)) if rate else _CHUNK
        clock = asyncio.get_running_loop().time
        started = clock()
        for first in range(0, len(messages), chunk):
            if rate:
                await asyncio.sleep(max(0.0, started + first / rate - clock()))
            await self._wait_until_fewer_than(_WINDOW)
            self._send(messages[first : first + chunk])
        await self._wait_until_fewer_than(1)

    def _send(self, messages: Sequence[Outgoing]) -> None:
        reply = self._inbox.encode()
        if not self._wire.write(b"".join(pub(each.subject, each.data, reply) for each in messages)):
            raise ConnectionFailed("the connection to the server broke while messages were being published")
        self._sent += len(messages)

    async def _wait_until_fewer_than(self, limit: int) -> None:
        while self._sent - self.acknowledged >= limit:
            if self._refused:
                raise PartiError(f"the server refused a message: {self._refused}")
            self._progress.clear()
            await _in_time(self._progress.wait(), "the server stopped acknowledging messages")


async def read_back(wire: Wire, stream: str) -> list[Stored]:
    """Read every message that the stream holds, past all consumers."""
    stored: list[Stored] = []
    end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def take(_subject: bytes, _reply: bytes, header: bytes | None, payload: bytes) -> None:
        fields = parse_headers(header or b"")
        if "Nats-Sequence" in fields:
            subject = fields["Nats-Subject"]
            stored.append(Stored(int(fields["Nats-Sequence"]), subject, digest(subject, payload)))
        elif not end.done():
            end.set_result(f"{status_of(header or b'')[0]} {fields.get('Nats-Num-Pending', '')}")

    inbox = wire.new_inbox()
    sid = wire.subscribe(inbox, take)
    try:
        while True:
            body = {"seq": stored[-1].seq + 1 if stored else 1, "batch": _READ_BATCH, "next_by_subj": ">"}
            wire.write(pub(f"$JS.API.DIRECT.GET.{stream}".encode(), json.dumps(body).encode(), inbox.encode()))
            status = await _in_time(end, "the stream could not be read back")
            if status == "204 0" or status.startswith("404"):
                return stored
            if not status.startswith("204"):
                raise PartiError(f"the stream could not be read back: status {status}")
            end = asyncio.get_running_loop().create_future()
    finally:
        wire.unsubscribe(sid)


async def _in_time(awaitable: Awaitable[_T], what: str) -> _T:
    try:
        async with asyncio.timeout(_PATIENCE_S):
            return await awaitable
    except TimeoutError:
        raise RequestTimeout(f"{what}: no answer for {_PATIENCE_S:g} s") from None
