"""A partition that gets more than its handler can do is its own problem: the others go on as if it were not there."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from statistics import quantiles

import nats
from nats.js.api import StreamConfig
from tests.integration.conftest import eventually
from tests.pace import unhindered_s

import parti
from parti.embedded import Server

HOT_RATE, HOT_S = 1_500, 0.004
"""Six times as many as the handler can do, one after the other."""
SECONDS = 2.0
"""The backlog of the hot one takes six times as long, and is handled to its end."""


async def test_a_hot_partition_never_starves_the_others(nats_server: Server, stream_name: str) -> None:
    client = await nats.connect(nats_server.url)
    js = client.jetstream()
    await js.add_stream(StreamConfig(name=stream_name, subjects=[f"{stream_name}.*"], allow_direct=True))
    ages_ms: list[float] = []
    seqs: dict[str, list[int]] = defaultdict(list)
    partitions = ["hot", *(f"p{n}" for n in range(79))]
    app = parti.App(stream=stream_name, subject=f"{stream_name}.{{key}}", partitions=partitions)

    @app.handler
    async def handle(message: parti.Message) -> None:
        seqs[message.partition.id].append(message.seq)
        if message.partition.id == "hot":
            await asyncio.sleep(HOT_S)
        else:
            ages_ms.append((unhindered_s() - float(message.data)) * 1e3)

    sent = {"hot": 0, "others": 0}
    settings = {"bucket": stream_name, "prefix": stream_name, "nats": nats_server.url, "max_ack_pending": 200}
    async with app.running(**settings) as worker:
        await eventually(lambda: len(worker.partitions) == 80)
        began_s = time.monotonic()
        while (elapsed_s := time.monotonic() - began_s) < SECONDS:
            while sent["hot"] < HOT_RATE * elapsed_s:
                await client.publish(f"{stream_name}.hot", b"")
                sent["hot"] += 1
            while sent["others"] < 400 * elapsed_s:
                await client.publish(f"{stream_name}.p{sent['others'] % 79}", str(unhindered_s()).encode())
                sent["others"] += 1
            await asyncio.sleep(0.002)
        await eventually(lambda: len(ages_ms) == sent["others"], 5)
        assert len(seqs["hot"]) < sent["hot"] / 2, "the hot one is far behind, and nobody else is"
        assert worker.metrics.parked.value >= 1
        assert quantiles(ages_ms, n=100)[94] < 500
        await eventually(lambda: len(seqs["hot"]) == sent["hot"], 45)
    await client.close()
    for handled in seqs.values():
        assert handled == sorted(set(handled)), "in order, each once"
