"""The demo's messages: made, published with acknowledgements at a rate that changes, read back from the stream."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Iterator
from typing import NamedTuple, TypeVar

from parti.cli.demo.notes import fingerprint
from parti.errors import ConnectionFailed, PartiError, RequestTimeout
from parti.jetstream.wire import Wire, pub
from parti.model.headers import parse_headers, status_of
from parti.model.partition import Template

STREAM = "DC"
SUBJECT = "dc.{tool}.{chamber}.completion"
_KINDS = ("etch", "cvd", "pvd", "litho", "cmp")
_CHAMBERS = 4
_WINDOW = 2_000
"""Messages on their way to the server and not yet acknowledged."""
_TICK_S = 0.02
_READ_BATCH = 5_000
_PATIENCE_S = 10.0

_T = TypeVar("_T")


class Outgoing(NamedTuple):
    """A message to publish."""

    subject: bytes
    data: bytes


class Stored(NamedTuple):
    """One message as the stream holds it."""

    seq: int
    subject: str
    fingerprint: int


def partition_names(count: int) -> list[str]:
    """The ids of the partitions: chambers of tools."""
    return [".".join(_tool_and_chamber(number)) for number in range(count)]


def make_messages(partitions: int, seed: int) -> Iterator[Outgoing]:
    """Wafers that leave chambers, without end: mixed, but for one seed always the same."""
    template, chance = Template(SUBJECT), random.Random(seed)
    subjects = [template.partition(name).subject.encode() for name in partition_names(partitions)]
    number = 0
    while True:
        round_of_all = list(subjects)
        chance.shuffle(round_of_all)
        for subject in round_of_all:
            lot, wafer = divmod(number, 25)
            yield Outgoing(subject, b'{"lot": "L%05d", "wafer": %d, "result": "completed"}' % (lot, wafer + 1))
            number += 1


def _tool_and_chamber(number: int) -> tuple[str, str]:
    tool, chamber = divmod(number, _CHAMBERS)
    return f"{_KINDS[tool % len(_KINDS)]}{tool // len(_KINDS) + 1:02}", f"c{chamber + 1}"


class Publisher:
    """Publishes to a stream at `rate` messages a second and counts what the server has acknowledged."""

    def __init__(self, wire: Wire, messages: Iterator[Outgoing]) -> None:
        self._wire = wire
        self._messages = messages
        self._inbox = wire.new_inbox()
        wire.subscribe(self._inbox, self._on_ack)
        self._sent = 0
        self._refused = ""
        self._progress = asyncio.Event()
        self.rate = 0.0
        """May be changed at any time."""
        self.acknowledged = 0

    def _on_ack(self, _subject: bytes, _reply: bytes, header: bytes | None, payload: bytes) -> None:
        if header or b'"error"' in payload:
            self._refused = " ".join((payload or header or b"").decode(errors="replace").split())
        else:
            self.acknowledged += 1
        self._progress.set()

    async def run(self) -> None:
        """Send until cancelled.

        Raises `PartiError` when the server refuses a message, `ConnectionFailed` or `RequestTimeout` when it is gone.
        """
        clock = asyncio.get_running_loop().time
        owed, before_s = 0.0, clock()
        while True:
            await asyncio.sleep(_TICK_S)
            now_s = clock()
            # After a pause of this process it does not make up for what was not sent.
            owed += self.rate * min(now_s - before_s, 10 * _TICK_S)
            before_s = now_s
            number, owed = int(owed), owed % 1
            await self._wait_until_fewer_than(_WINDOW)
            self.send(number)

    def send(self, number: int) -> None:
        """Send so many messages now."""
        reply = self._inbox.encode()
        batch = [next(self._messages) for _ in range(number)]
        if not self._wire.write(b"".join(pub(each.subject, each.data, reply) for each in batch)):
            raise ConnectionFailed("the connection to the server broke while messages were being published")
        self._sent += number

    async def all_acknowledged(self) -> None:
        """Wait until the server has everything that was sent; raises as `run` does."""
        await self._wait_until_fewer_than(1)

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
            stored.append(Stored(int(fields["Nats-Sequence"]), subject, fingerprint(subject, payload)))
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
