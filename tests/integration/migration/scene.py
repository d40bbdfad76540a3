"""A stream that is read the older way, by plain nats-py, the fleet that is to have it, and what all handlers did."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nats
import pytest
from examples.legacy.worker import LegacyWorker
from nats.aio.msg import Msg
from tests.integration.commands import Said, type_command
from tests.integration.conftest import Kit, eventually
from tests.integration.fleet import FLEET
from tests.integration.orders.operators import place

import parti
from parti.coordination.control_plane import ControlPlane
from parti.coordination.migration_desk import MigrationDesk
from parti.jetstream.kv import Bucket
from parti.model.fleet import Orders, decode
from parti.model.migration import MigrationRecord

OLD, NEW = "old", "new"


@dataclass
class Scene:
    """One migration."""

    kit: Kit
    directory: Path
    capsys: pytest.CaptureFixture[str]
    names: list[str]
    handled: dict[str, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))
    """By partition: sequences in the order in which handlers started, and who handled each."""
    sent: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    takes: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0.001)
    """What the fleet's handler does after it has noted its start."""

    # ── the stream and its publishers ─────────────────────────────────────────────────────────────────────────

    async def publish(self, each: int = 1, names: list[str] | None = None) -> None:
        for partition, seqs in (await self.kit.publish(names or self.names, each)).items():
            self.sent[partition] += seqs

    @asynccontextmanager
    async def under_load(self) -> AsyncIterator[None]:
        """Publish to all partitions in turn, without a pause, until the block ends."""
        stopping = False

        async def load() -> None:
            while not stopping:
                await self.publish()
                await asyncio.sleep(0.02)  # as much as a busy machine can take

        publishing = asyncio.create_task(load())
        try:
            yield
        finally:
            stopping = True
            await publishing

    # ── both sides ────────────────────────────────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def old_worker(self, names: list[str] | None = None, **config: Any) -> AsyncIterator[LegacyWorker]:
        """The older way: a durable consumer for each partition."""
        client = await nats.connect(self.kit.url)

        async def handle(partition: str, message: Msg) -> None:
            self.handled[partition].append((message.metadata.sequence.stream, OLD))
            await asyncio.sleep(0.001)

        worker = LegacyWorker(
            client,
            self.kit.stream,
            f"{self.kit.root}.{{}}",
            "old-{}",
            handle,
            wait_s=0.5,
            look_s=0.1,
        )
        mine = self.names if names is None else names
        for partition in mine:
            await worker.create(partition, **config)
        reading = asyncio.create_task(worker.run(mine))
        try:
            yield worker
        finally:
            worker.stop()
            await reading
            await client.close()

    @asynccontextmanager
    async def fleet(self, workers: int = 2, **settings: Any) -> AsyncIterator[None]:
        """Workers of parti, all in this process."""

        async def handle(message: parti.Message) -> None:
            self.handled[message.partition.id].append((message.seq, NEW))
            await self.takes()

        app = self.kit.app(handle, self.names, **{**FLEET, **settings})
        running = [app.worker() for _ in range(workers)]
        try:
            for worker in running:
                await worker.start()
            yield
        finally:
            await asyncio.gather(*(worker.stop() for worker in running))

    # ── the operator ──────────────────────────────────────────────────────────────────────────────────────────

    @property
    def module(self) -> str:
        """The app, as the command line finds it."""
        name = f"app_{self.kit.root}"
        path = self.directory / f"{name}.py"
        if not path.exists():
            fleet = {"prefix": f"w{self.kit.root}", "bucket": f"b{self.kit.root}"}
            path.write_text(
                f"import parti\n"
                f"app = parti.App(stream={self.kit.stream!r}, subject={self.kit.template!r}, "
                f"partitions={self.names!r}, **{fleet!r})\n"
                f"app.handler(print)\n"
            )
        return f"{name}:app"

    @property
    def shadow(self) -> tuple[str, ...]:
        """What the first phase is asked for."""
        return "run", self.module, "--phase", "shadow", "--consumers", "old-{partition}", "--workers", "2"

    async def type(self, *arguments: str) -> Said:
        """Run `parti migrate …` in this process."""
        return await type_command(self.capsys, "migrate", *arguments, *place(self.kit))

    async def does(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        """The same, with JSON; it must end with this exit code."""
        said = await self.type(*arguments, "--json")
        assert said.code == code, said
        answer: dict[str, Any] = json.loads(said.out)
        return answer

    async def is_refused(self, *arguments: str) -> str:
        """A command that makes no sense: one line, exit code 2, and nothing is changed."""
        before = await self.everything()
        said = await self.type(*arguments)
        assert (said.code, said.out) == (2, ""), said
        assert len(said.err.splitlines()) == 1, said
        assert await self.everything() == before
        return said.err.removeprefix("parti: ").rstrip()

    # ── what there is ─────────────────────────────────────────────────────────────────────────────────────────

    async def everything(self) -> tuple[object, ...]:
        """All that a migration may change: records, orders, positions, and the consumers with their pauses."""
        bucket = Bucket(self.kit.api, f"b{self.kit.root}")
        exists = bucket.stream in await self.kit.api.stream_names()
        keys = ("migration", "migration.p0", "orders", "progress.old.consumers")
        entries = [await bucket.get(key) for key in keys] if exists else None
        infos = await self.kit.api.consumers(self.kit.stream)
        return entries, sorted((i.name, i.paused) for i in infos if i.name.startswith(("old-", "shadow-")))

    async def consumers(self) -> Counter[str]:
        """How many there are, by the beginning of their names."""
        names = await self.kit.api.consumer_names(self.kit.stream)
        return Counter(name.partition("-")[0] for name in names if "-hold-" not in name)

    async def record(self) -> MigrationRecord:
        bucket = Bucket(self.kit.api, f"b{self.kit.root}")
        plane = ControlPlane(self.kit.connection, self.kit.api, bucket, (await bucket.info()).created)
        found = await MigrationDesk(plane, "test").load()
        assert found
        return found

    async def orders(self) -> Orders:
        entry = await Bucket(self.kit.api, f"b{self.kit.root}").get("orders")
        return decode(entry.value, Orders) if entry else Orders()

    # ── what must hold ────────────────────────────────────────────────────────────────────────────────────────

    def all_handled(self) -> bool:
        return all({seq for seq, _ in self.handled[p]} >= set(seqs) for p, seqs in self.sent.items())

    async def settles(self) -> None:
        """Everything that was published is handled."""
        await eventually(self.all_handled, 20.0)

    def is_exact(self) -> None:
        """Each message was handled once, in stream order within its partition."""
        for partition, seqs in self.sent.items():
            handled = [seq for seq, _ in self.handled[partition]]
            lost = sorted(set(seqs) - set(handled))
            repeats = {seq: [who for s, who in self.handled[partition] if s == seq] for seq in handled}
            repeats = {seq: who for seq, who in repeats.items() if len(who) > 1}
            assert handled == seqs, f"{partition}: lost {lost}, repeated {repeats}, or out of order"

    def by(self, who: str) -> int:
        return sum(1 for calls in self.handled.values() for _, by in calls if by == who)

    async def grows(self, who: str, by: int = 20) -> None:
        """So many more messages are handled by one side."""
        before = self.by(who)
        await eventually(lambda: self.by(who) >= before + by, 20.0)
