"""One stream, one worker, one record of what its handler saw: the kit that the worker tests share.

Every name in it (stream, subjects, prefix, bucket, dead letters) is the test's own, so that tests on the shared
server never meet. What was published is known by the sequences that the server acknowledged, never by assumption.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.pace import unhindered_s

import parti
from parti.config import Settings
from parti.core.progress import Progress, decode_progress
from parti.embedded import Server
from parti.errors import NotFound, PartiError
from parti.jetstream.api import ConsumerInfo, JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.kv import Bucket
from parti.model.letter_mark import marks_stream
from parti.telemetry.logs import configure_logging

Sent = dict[str, list[int]]
"""Stream sequences by partition id."""

QUICK: Mapping[str, Any] = {
    "backoff_s": (0.05,),
    "progress_interval_s": 0.05,
    "update_min_interval_s": 0.0,
    "drain_timeout_s": 5.0,
    "log_level": "error",
}


async def eventually(condition: Callable[[], bool | Awaitable[bool]], timeout_s: float = 30.0) -> None:
    """Wait until the condition holds; an assertion error when it never does.

    The limit only says when to give up, so time in which somebody waited for a processor does not count.
    """
    deadline_s = unhindered_s() + timeout_s
    while True:
        holds = condition()
        if not isinstance(holds, bool):
            holds = await holds
        if holds:
            return
        assert unhindered_s() < deadline_s, f"did not happen within {timeout_s} s"
        await asyncio.sleep(0.01)


async def becomes_pending(api: JetStreamApi, stream: str, expected: Mapping[str, int]) -> None:
    """Wait until each consumer has so many messages pending.

    The server counts a message for its consumers after it has acknowledged it to the publisher: of 8,000 consumers
    that were asked at once, 36 did not know of the last message yet.
    """
    seen: dict[str, int] = {}

    async def as_expected() -> bool:
        seen.update({name: (await api.consumer_info(stream, name)).pending for name in expected})
        return seen == expected

    try:
        await eventually(as_expected, 10)
    except AssertionError:
        assert seen == expected


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a handler."""

    partition: str
    seq: int
    attempt: int
    at_s: float


class Record:
    """Every call of the handler, in the order in which they started."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def note(self, message: parti.Message) -> None:
        self.calls.append(Call(message.partition.id, message.seq, message.attempt, time.monotonic()))

    async def handle(self, message: parti.Message) -> None:
        """The simplest handler."""
        self.note(message)

    def of(self, partition: str) -> list[int]:
        """Sequences handled in a partition, in order of their start."""
        return [call.seq for call in self.calls if call.partition == partition]

    @property
    def by_partition(self) -> Sent:
        seen: Sent = defaultdict(list)
        for call in self.calls:
            seen[call.partition].append(call.seq)
        return dict(seen)

    async def reaches(self, count: int, timeout_s: float = 20.0) -> None:
        """Wait until that many calls have started."""
        await eventually(lambda: len(self.calls) >= count, timeout_s)

    def is_exactly(self, sent: Sent) -> None:
        """Every message once, in stream order within its partition."""
        assert self.by_partition == {p: sorted(seqs) for p, seqs in sent.items() if seqs}


def only_suffixes_repeat(seen: list[int]) -> bool:
    """Whether a run of handled sequences goes back only to go on from there: nothing is skipped on the way."""
    finished: list[int] = []
    for seq in seen:
        if finished and seq <= finished[-1]:
            if seq not in finished:
                return False
            del finished[finished.index(seq) :]
        finished.append(seq)
    return True


def merge(*parts: Sent) -> Sent:
    """Put several batches of published messages together."""
    merged: Sent = defaultdict(list)
    for part in parts:
        for partition, seqs in part.items():
            merged[partition] += seqs
    return dict(merged)


@dataclass
class Kit:
    """A server, a connection of the test's own, and names that nobody else uses."""

    url: str
    stream: str
    root: str
    connection: Connection
    api: JetStreamApi
    streams: list[str] = field(default_factory=list)

    @property
    def template(self) -> str:
        return f"{self.root}.{{p}}"

    @property
    def settings(self) -> dict[str, Any]:
        return {
            **QUICK,
            "nats": self.url,
            "prefix": f"w{self.root}",
            "worker_id": "one",
            "fleet": False,
            "bucket": f"b{self.root}",
            "dead_letter_stream": f"d{self.root}",
            "dead_letter_subject": f"d{self.root}",
        }

    @property
    def consumer(self) -> str:
        return f"w{self.root}-one"

    async def create_stream(self, **config: Any) -> None:
        given = {"subjects": [f"{self.root}.>"], "storage": "memory", "allow_direct": True, **config}
        await self.api.call(f"STREAM.CREATE.{self.stream}", {"name": self.stream, **given})

    async def delete_stream(self, name: str | None = None) -> None:
        await self.api.call(f"STREAM.DELETE.{name or self.stream}")

    def subject(self, partition: str) -> str:
        return f"{self.root}.{partition}"

    async def publish(self, partitions: Iterable[str], each: int = 1, data: bytes = b"x") -> Sent:
        """Publish to each partition in turn, so that their messages lie between one another in the stream."""
        order = list(partitions) * each
        sent: Sent = defaultdict(list)
        for begin in range(0, len(order), 256):
            chunk = order[begin : begin + 256]
            seqs = await asyncio.gather(*(self.api.publish(self.subject(p), data) for p in chunk))
            for partition, seq in zip(chunk, seqs, strict=True):
                sent[partition].append(seq)
        return {p: sorted(seqs) for p, seqs in sent.items()}

    def app(self, handler: Callable[[parti.Message], Any], partitions: Any = None, **settings: Any) -> parti.App:
        app = parti.App(
            stream=self.stream,
            subject=settings.pop("subject", self.template),
            partitions=partitions,
            **{**self.settings, **settings},
        )
        app.handler(handler)
        return app

    async def consumer_info(self) -> ConsumerInfo:
        return await self.api.consumer_info(self.stream, self.consumer)

    async def filter(self) -> set[str]:
        """The subjects in the consumer's filter on the server."""
        return set((await self.consumer_info()).subjects)

    async def all_acked(self) -> bool:
        """Whether the consumer has delivered everything and holds nothing unacknowledged.

        What was just published may not be counted as pending yet: wait until it is handled before.
        """
        info = await self.consumer_info()
        return not info.ack_pending and not info.pending

    async def progress(self) -> Progress | None:
        entry = await Bucket(self.api, f"b{self.root}").get("progress.one")
        return decode_progress(entry.value) if entry else None

    async def dead_letters(self) -> list[dict[str, Any]]:
        """Every dead letter, as the server stores it: subject, seq, data and raw headers."""
        letters = []
        info = await self.api.stream_info(f"d{self.root}")
        for seq in range(1, info.last_seq + 1):
            answer = await self.api.call(f"STREAM.MSG.GET.d{self.root}", {"seq": seq})
            letters.append(answer["message"])
        return letters

    async def clean_up(self) -> None:
        letters = f"d{self.root}"
        for name in (self.stream, f"KV_b{self.root}", letters, marks_stream(letters), f"b{self.root}-history"):
            try:
                await self.delete_stream(name)
            except NotFound:
                pass


async def open_kit(server: Server, stream: str) -> Kit:
    connection = await Connection.open(Settings(nats=(server.url,)), name="test")
    return Kit(server.url, stream, f"t{uuid.uuid4().hex[:10]}", connection, JetStreamApi(connection, timeout_s=15))


@pytest.fixture
async def kit(nats_server: Server, stream_name: str) -> AsyncIterator[Kit]:
    """A kit with a fresh memory stream on the shared server."""
    kit = await open_kit(nats_server, stream_name)
    # When its last stream is deleted, the server removes the directory of all streams in the background, and a stream
    # that is created at that moment fails with error 10049. So one stream stays.
    await kit.api.ensure_stream({"name": "KEEPER", "subjects": ["keeper"], "storage": "file"})
    await kit.create_stream()
    try:
        yield kit
    finally:
        try:
            await kit.clean_up()
        except PartiError:
            pass
        await kit.connection.close()


@pytest.fixture
def record() -> Record:
    return Record()


@pytest.fixture
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Commands that run in the test process see neither variables nor files of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("PARTI_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    configure_logging("error")
