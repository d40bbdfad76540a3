"""A stream of a test's own, filled and looked at through the blocking client."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from parti.errors import PartiError
from parti.jetstream.blocking import BlockingClient
from parti.jetstream.ranges import Chunk, Range, RangeReader, Wanted, sequence_of
from parti.jetstream.target import Target

Message = tuple[str | bytes, bytes, bytes | None]
"""Subject, payload and header block as it goes over the wire."""


def block(*lines: str | bytes) -> bytes:
    """A header block with exactly these lines."""
    encoded = (line.encode() if isinstance(line, str) else line for line in lines)
    return b"NATS/1.0\r\n" + b"".join(line + b"\r\n" for line in encoded) + b"\r\n"


@dataclass
class Reading:
    """What a reader gave out."""

    seqs: list[int] = field(default_factory=list)
    subjects: list[bytes] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    headers: list[bytes | None] = field(default_factory=list)
    stamps_us: list[int] = field(default_factory=list)
    missing: list[Range] = field(default_factory=list)
    server_filters: bool = False

    def add(self, chunk: Chunk) -> None:
        self.seqs += chunk.seqs or [sequence_of(reply) for reply in chunk.replies]
        self.subjects += chunk.subjects
        self.payloads += chunk.payloads
        self.headers += chunk.headers
        self.stamps_us += chunk.stamps_us


@dataclass
class Stream:
    """One stream, on a server that may be shared."""

    target: Target
    name: str
    root: str = field(default_factory=lambda: f"r{os.urandom(5).hex()}")

    @contextmanager
    def client(self) -> Iterator[BlockingClient]:
        with BlockingClient.open(self.target, name="test") as client:
            yield client

    def call(self, name: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        with self.client() as client:
            return client.api(f"{name}.{self.name}", body)

    def create(self, **config: Any) -> None:
        given = {"subjects": [f"{self.root}.>"], "storage": "memory", "allow_direct": True, **config}
        self.call("STREAM.CREATE", {"name": self.name, **given})

    def remove(self) -> None:
        try:
            self.call("STREAM.DELETE")
        except PartiError:
            pass

    def purge(self, **body: Any) -> None:
        self.call("STREAM.PURGE", body)

    def delete(self, *seqs: int) -> None:
        with self.client() as client:
            for seq in seqs:
                client.api(f"STREAM.MSG.DELETE.{self.name}", {"seq": seq})

    def info(self) -> dict[str, Any]:
        with self.client() as client:
            return client.stream_info(self.name)

    @property
    def created(self) -> str:
        return str(self.info()["created"])

    @property
    def last(self) -> int:
        return int(self.info()["state"]["last_seq"])

    def consumers(self) -> list[str]:
        return [str(name) for name in self.call("CONSUMER.NAMES")["consumers"] or ()]

    def fill(self, count: int, *, subjects: Iterable[str] = ("a",), size: int = 0) -> None:
        """Publish numbered messages to the subjects in turn."""
        names = list(subjects)
        self.publish((names[i % len(names)], b"%d" % i + b"." * size, None) for i in range(count))

    def publish(self, messages: Iterable[Message]) -> None:
        """Publish in order; returns when every message is stored."""
        with self.client() as client:
            inbox = client.new_inbox()
            client.subscribe(inbox)
            every = iter(messages)
            while some := [self._published(inbox, message) for message in itertools.islice(every, 2000)]:
                client.send(b"".join(some))
                for _ in some:
                    ack = client.next_delivery(30)
                    assert ack is not None
                    assert b'"error"' not in ack.data, ack.data

    def _published(self, inbox: str, message: Message) -> bytes:
        tail, payload, header = message
        subject = b"%b.%b" % (self.root.encode(), tail if isinstance(tail, bytes) else tail.encode())
        head = header or b""
        sizes = b"%d %d" % (len(head), len(head) + len(payload)) if head else b"%d" % len(payload)
        verb = b"HPUB" if head else b"PUB"
        return b"%b %b %b %b\r\n%b%b\r\n" % (verb, subject, inbox.encode(), sizes, head, payload)

    def wanted(self, start: int = 1, end: int | None = None, **more: Any) -> Wanted:
        info = self.info()
        stop = int(info["state"]["last_seq"]) + 1 if end is None else end
        if subjects := more.get("subjects"):
            more["subjects"] = tuple(f"{self.root}.{subject}" for subject in subjects)
        return Wanted(stream=self.name, created=info["created"], start=start, end=stop, **more)

    def reader(self, start: int = 1, end: int | None = None, **more: Any) -> RangeReader:
        return RangeReader(self.target, self.wanted(start, end, **more), name="test")

    def read(self, start: int = 1, end: int | None = None, **more: Any) -> Reading:
        return read_all(self.reader(start, end, **more))


def read_all(reader: RangeReader) -> Reading:
    """Everything that a reader gives."""
    found = Reading()
    for chunk in reader.chunks():
        found.add(chunk)
    found.missing, found.server_filters = reader.missing, reader.server_filters
    assert reader.rows == len(found.seqs)
    return found
