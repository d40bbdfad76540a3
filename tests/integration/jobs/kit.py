"""Jobs of a test's own: names that nobody else uses, a handler that waits at gates, and what it has seen."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.integration.conftest import Kit

from parti.errors import NotFound
from parti.jetstream.kv import Bucket, Entry
from parti.jobs import Job, JobApp
from parti.jobs.desk import JobDesk
from parti.model.job import JobRecord, decode_job, record_key
from parti.model.letter_mark import marks_stream

QUICK: dict[str, Any] = {
    "heartbeat_interval_s": 0.1,
    "ack_wait_minutes": 2 / 60,
    "fetch_timeout_s": 0.5,
    "report_interval_s": 0.05,
    "backoff_s": (0.05,),
    "drain_timeout_s": 5.0,
    "fetch_batch_size": 5,
    "log_level": "error",
}


@dataclass
class Gates:
    """A handler whose jobs hold their slots until their gate opens."""

    started: list[int] = field(default_factory=list)
    holding: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    usage: list[int] = field(default_factory=list)
    opened: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, job: Job) -> None:
        self.started.append(job.seq)
        async with job.slots(job.json["cost"]) as slots:
            self.holding.append(job.seq)
            self.usage.append(slots)
            await self.opened.wait()
        self.done.append(job.seq)


@dataclass
class JobKit:
    """A stream for jobs on the test's server."""

    kit: Kit

    @property
    def prefix(self) -> str:
        return f"j{self.kit.root}"

    @property
    def durable(self) -> str:
        return f"{self.prefix}-jobs"

    @property
    def stream(self) -> str:
        return f"J{self.kit.stream}"

    @property
    def subject(self) -> str:
        return f"{self.prefix}.work"

    @property
    def settings(self) -> dict[str, Any]:
        return {
            **QUICK,
            "nats": self.kit.url,
            "prefix": self.prefix,
            "dead_letter_stream": f"d{self.prefix}",
            "dead_letter_subject": f"d{self.prefix}",
        }

    def app(self, handler: Any, **settings: Any) -> JobApp:
        app = JobApp(stream=self.stream, subject=f"{self.prefix}.>", **{**self.settings, **settings})
        app.handler(handler)
        return app

    async def publish(self, *documents: Any) -> list[int]:
        return [await self.kit.api.publish(self.subject, json.dumps(d).encode()) for d in documents]

    async def publish_many(self, documents: list[Any]) -> list[int]:
        sent: list[int] = []
        for begin in range(0, len(documents), 100):
            chunk = documents[begin : begin + 100]
            sent += await asyncio.gather(
                *(self.kit.api.publish(self.subject, json.dumps(document).encode()) for document in chunk)
            )
        return sent

    async def create_stream(self, **config: Any) -> None:
        given = {"subjects": [f"{self.prefix}.>"], "storage": "file", "retention": "workqueue", **config}
        await self.kit.api.call(f"STREAM.CREATE.{self.stream}", {"name": self.stream, **given})

    async def held_by_server(self) -> int:
        return (await self.kit.api.consumer_info(self.stream, self.durable)).ack_pending

    async def all_settled(self) -> bool:
        """Whether the server waits for nothing and has deleted all; what is new it may not count as pending yet."""
        info = await self.kit.api.consumer_info(self.stream, self.durable)
        settled = not info.ack_pending and not info.pending
        return settled and not (await self.kit.api.stream_info(self.stream)).messages

    async def entry(self, seq: int) -> Entry | None:
        return await Bucket(self.kit.api, f"{self.prefix}-jobs").get(record_key(self.durable, seq))

    async def record(self, seq: int) -> JobRecord | None:
        entry = await self.entry(seq)
        return decode_job(entry.value) if entry and entry.value else None

    async def states(self) -> Counter[str]:
        entries = await JobDesk(self.kit.connection, self.prefix).entries()
        records = (decode_job(entry.value) for entry in entries.values() if entry.value)
        return Counter(record.state.value for record in records if record)

    async def letters(self) -> int:
        return (await self.kit.api.stream_info(f"d{self.prefix}")).messages

    async def clean_up(self) -> None:
        letters = f"d{self.prefix}"
        for name in (self.stream, f"KV_{self.prefix}-jobs", letters, marks_stream(letters)):
            with contextlib.suppress(NotFound):  # marks are made by those that may lead
                await self.kit.api.call(f"STREAM.DELETE.{name}")
