"""Two regions, one consumer: overflow, prioritized and pinned clients on a server that this script starts itself.

    python examples/two_regions.py

Each act makes a consumer with another policy and lets two clients work on it, `near` and `far`. Takes 15 seconds, and
with `--quick` three.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from parti.config import Settings
from parti.core.priority import Policy, PriorityGroup
from parti.embedded import Server
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.priority import ensure_consumer
from parti.jetstream.pull_client import PullClient
from parti.telemetry.logs import configure_logging

GROUP = "jobs"
WORK_S = 0.01


class Stage:
    """A server, a stream, and how many messages each region has finished since the last look."""

    def __init__(self, url: str, connection: Connection, pace: float) -> None:
        self.url = url
        self.pace = pace
        self.connection = connection
        self.api = JetStreamApi(connection)
        self.done: Counter[str] = Counter()

    async def act(self, policy: Policy, timeout_s: float | None = None) -> None:
        """Begin with an empty stream and a consumer of this policy."""
        print(f"\n{policy.value}")
        with suppress(Exception):
            await self.api.call("STREAM.DELETE.WORK")
        await self.api.call("STREAM.CREATE.WORK", {"name": "WORK", "subjects": ["work.>"], "retention": "workqueue"})
        await ensure_consumer(self.connection, "WORK", "work", PriorityGroup(GROUP, policy, timeout_s))

    @asynccontextmanager
    async def region(self, name: str, **options: Any) -> AsyncIterator[PullClient]:
        """A client that takes 10 ms for each message, one after the other, and has twenty in hand at most."""

        async def work() -> None:
            async for message in client:
                await asyncio.sleep(WORK_S)
                message.ack()
                self.done[name] += 1

        client = PullClient(self.url, stream="WORK", consumer="work", group=GROUP, limit=20, **options)
        async with client:
            task = asyncio.create_task(work())
            yield client
        await task

    async def load(self, per_s: int, seconds: float, say: str, *, finish: bool = True) -> None:
        """Publish at a rate, and tell what happened meanwhile, or (`finish`) until all of it was done."""
        self.done.clear()
        for _ in range(int(10 * seconds * self.pace)):
            await asyncio.gather(*(self.api.publish("work.item", b"x") for _ in range(per_s // 10)))
            await asyncio.sleep(0.1)
        info = await self.api.consumer_info("WORK", "work")
        while finish and (info.pending or info.ack_pending):
            await asyncio.sleep(WORK_S)
            info = await self.api.consumer_info("WORK", "work")
        did = ", ".join(f"{name} {self.done[name]:,}" for name in ("near", "far"))
        print(f"  {say:<44} {did}; {info.pending:,} waiting")


async def main(pace: float) -> None:
    """The three acts."""
    configure_logging("error")
    async with Server() as server:
        connection = await Connection.open(Settings(nats=(server.url,)), name="stage")
        stage = Stage(server.url, connection, pace)
        print("finished by each region:")

        await stage.act(Policy.OVERFLOW)
        async with stage.region("near"), stage.region("far", min_pending=50):
            await stage.load(50, 1.5, "50 a second, which near can do")
            await stage.load(300, 2, "300 a second: far helps above 50 waiting", finish=False)
            await stage.load(20, 1.5, "20 a second: what waits is done, far leaves")

        await stage.act(Policy.PRIORITIZED)
        async with stage.region("far", priority=1):
            async with stage.region("near", priority=0):
                await stage.load(50, 1.5, "near asks, so far waits")
            await stage.load(50, 1.5, "near is gone, so far does it")

        await stage.act(Policy.PINNED, timeout_s=1.0)
        async with stage.region("near") as near:
            await stage.load(50, 1, "near came first, so it is pinned")
            async with stage.region("far"):
                await stage.load(50, 1, "far stands by")
                await near.stop()
                await stage.load(50, 1, "near has left and given its pin up")
        await connection.close()


if __name__ == "__main__":
    asyncio.run(main(0.2 if "--quick" in sys.argv else 1.0))
