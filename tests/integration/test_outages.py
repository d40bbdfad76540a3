"""A worker over every kind of outage: each stored message is handled once, each partition in stream order.

A running worker keeps its positions in memory, so not even the crash of a server is an excuse for a repeat. What
handlers saw is compared with the stream itself, read back by plain nats-py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import nats
import pytest
from benchmarks.audit import MSG_ID, Findings, Handled, audit, first_at_or_after, read_back
from benchmarks.traffic import SteadyPublisher, answering_again, connect
from nats.js.api import StorageType, StreamConfig
from tests.integration.proxy import proxy_to

import parti
from parti.app.worker import Worker
from parti.embedded import Cluster, Server

Servers = str | list[str]
PARTITIONS = [f"p{n}" for n in range(40)]
QUICK: dict[str, Any] = {"pull_heartbeat_s": 0.3, "ping_interval_s": 0.4, "ack_wait_s": 3.0}
"""Notice an outage fast, and let the server redeliver within the test what it believes to be lost."""
RATE = 3_000
RESUME_S = 3.0
CLEAN = Findings(unpublished=0, lost=0, repeated=0, out_of_order=0, altered=0)


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def until_true(condition: Callable[[], Awaitable[bool]], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def create_stream(servers: Servers, name: str, **options: Any) -> None:
    client = await nats.connect(servers)
    try:
        await client.jetstream().add_stream(StreamConfig(name=name, subjects=[f"{name}.*"], **options))
    finally:
        await client.close()


def note(journal: list[Handled], message: parti.Message) -> None:
    id_ = message.headers.get(MSG_ID, "")
    journal.append(Handled(message.subject, message.seq, id_, time.monotonic()))


def app_for(stream: str, journal: list[Handled], gate: asyncio.Event | None = None) -> parti.App:
    """An app that notes what it handles; with a gate, the first partition waits until that is open."""
    app = parti.App(stream=stream, subject=f"{stream}.{{partition}}", partitions=PARTITIONS)

    @app.handler
    async def handle(message: parti.Message) -> None:
        note(journal, message)
        if gate and message.partition.id == PARTITIONS[0]:
            await gate.wait()
        if not message.seq % 5:
            await asyncio.sleep(0.002)  # Some handlers are in the middle of it when the outage comes.

    return app


class Flow:
    """Messages on their way through a worker."""

    def __init__(self, servers: Servers, stream: str, count: int, bucket: str) -> None:
        self.servers = servers
        self.stream = stream
        self.count = count
        self.journal: list[Handled] = []
        self.consumer = f"{bucket}-worker-0"
        self.worker: Worker | None = None
        publisher = SteadyPublisher(servers, count, lambda n: f"{stream}.{PARTITIONS[n * 7 % len(PARTITIONS)]}")
        self._started_s = time.monotonic()
        self.publishing = asyncio.create_task(publisher.run(self._may_send))

    def _may_send(self, number: int) -> bool:
        """Slow enough to last over the outages, and never so far ahead that the worker could not be watched."""
        due = RATE * (time.monotonic() - self._started_s)
        return number < due and number < len(self.journal) + 2_000

    async def share_handled(self, share: float, timeout_s: float = 20.0) -> None:
        await until(lambda: len(self.journal) >= share * self.count, timeout_s)

    async def more_handled(self, messages: int = 100, timeout_s: float = 20.0) -> None:
        goal = min(self.count, len(self.journal) + messages)
        await until(lambda: len(self.journal) >= goal, timeout_s)

    async def finish(self, timeout_s: float = 25.0) -> None:
        """Until everything is published, delivered and acknowledged: then the server cannot redeliver any more."""
        async with asyncio.timeout(timeout_s):
            await self.publishing
            await until(lambda: len({entry.seq for entry in self.journal}) >= self.count, timeout_s)
            client = await connect(self.servers)
            try:
                js = client.jetstream()

                async def all_acknowledged() -> bool:
                    info = await js.consumer_info(self.stream, self.consumer)
                    return not info.num_ack_pending and not info.num_pending

                await until_true(all_acknowledged, timeout_s)
            finally:
                await client.close()

    async def findings(self) -> Findings:
        stored = await read_back(self.servers, self.stream)
        assert len(stored) == self.count
        return audit(stored, self.journal, map(str, range(self.count)))


@contextlib.asynccontextmanager
async def flowing(
    servers: Servers,
    stream: str,
    count: int,
    *,
    worker_url: str | None = None,
    gate: asyncio.Event | None = None,
    **settings: Any,
) -> AsyncIterator[Flow]:
    """Run a worker and a publisher; leave when all is handled and acknowledged, and check what came out."""
    await create_stream(servers, stream, num_replicas=settings.get("replicas", 1))
    flow = Flow(servers, stream, count, settings.get("bucket", "parti"))
    try:
        nats_url = worker_url or servers
        async with app_for(stream, flow.journal, gate).running(nats=nats_url, **settings) as flow.worker:
            yield flow
            await flow.finish()
    finally:
        flow.publishing.cancel()
        await asyncio.gather(flow.publishing, return_exceptions=True)
    assert await flow.findings() == CLEAN


# ── the server ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
async def test_three_crashes_of_the_server_cost_nothing(
    nats_server_factory: Callable[..., Server], stream_name: str
) -> None:
    server = nats_server_factory()
    resumed_s = []
    async with flowing(server.url, stream_name, 20_000) as flow:
        for share in (0.25, 0.5, 0.75):
            await flow.share_handled(share)
            await server.kill()
            probe = asyncio.to_thread(answering_again, server.url, stream_name)
            _, answered_s = await asyncio.gather(server.restart(), probe)
            await until(lambda at=answered_s: first_at_or_after(flow.journal, at) is not None)  # type: ignore[misc]
            first = first_at_or_after(flow.journal, answered_s)
            assert first
            resumed_s.append(first.at_s - answered_s)
    assert max(resumed_s) < RESUME_S


async def test_a_frozen_server_is_waited_for(nats_server_factory: Callable[..., Server], stream_name: str) -> None:
    server = nats_server_factory()
    async with flowing(server.url, stream_name, 5_000, **QUICK) as flow:
        worker = flow.worker
        assert worker
        await flow.share_handled(0.3)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            await until(lambda: worker.metrics.pull_missed_heartbeats.value > 0)
            await until(lambda: "connection" in worker.health.reasons)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        await flow.more_handled()
        await until(lambda: worker.health.healthy)


async def test_a_parked_partition_survives_a_crash_of_the_server(
    nats_server_factory: Callable[..., Server], stream_name: str
) -> None:
    server = nats_server_factory()
    gate = asyncio.Event()
    async with flowing(server.url, stream_name, 8_000, gate=gate, max_ack_pending=100, **QUICK) as flow:
        worker = flow.worker
        assert worker
        await until(lambda: worker.metrics.parked.value > 0, 15)
        for _ in range(2):
            await server.kill()
            await server.restart()
            await flow.more_handled(200)
        assert sum(entry.subject.endswith(f".{PARTITIONS[0]}") for entry in flow.journal) == 1, "it still waits"
        gate.set()


# ── the network ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_connections_cut_with_deliveries_in_flight(nats_server: Server, stream_name: str) -> None:
    async with (
        proxy_to(nats_server.port) as proxy,
        flowing(nats_server.url, stream_name, 8_000, worker_url=proxy.url, bucket=stream_name, **QUICK) as flow,
    ):
        for cuts in range(1, 9):
            await flow.share_handled(cuts / 10)
            proxy.cut()
            await until(lambda at=cuts: proxy.connections > at)  # type: ignore[misc]


async def test_deliveries_that_get_lost_are_noticed_by_the_hole(nats_server: Server, stream_name: str) -> None:
    seen = 0
    delivery = b"MSG " + stream_name.encode()

    def every_700th(line: bytes) -> bool:
        nonlocal seen
        if delivery not in line:
            return False
        seen += 1
        return seen % 700 == 0

    async with (
        proxy_to(nats_server.port) as proxy,
        flowing(nats_server.url, stream_name, 8_000, worker_url=proxy.url, bucket=stream_name, **QUICK),
    ):
        proxy.lose(every_700th)
        await until(lambda: proxy.lost >= 8, 20)
        proxy.lose(None)


async def test_silence_of_the_pulls_is_noticed_by_missed_heartbeats(nats_server: Server, stream_name: str) -> None:
    def belongs_to_a_pull(line: bytes) -> bool:
        # The pull's own inbox has two tokens, that of an API request one more.
        subject = line.split(b" ")[1] if b"MSG " in line else b""
        return subject.startswith(stream_name.encode()) or (
            subject.startswith(b"_INBOX.") and subject.count(b".") == 1
        )

    async with (
        proxy_to(nats_server.port) as proxy,
        flowing(nats_server.url, stream_name, 5_000, worker_url=proxy.url, bucket=stream_name, **QUICK) as flow,
    ):
        worker = flow.worker
        assert worker
        await flow.share_handled(0.3)
        proxy.lose(belongs_to_a_pull)
        await until(lambda: worker.metrics.pull_missed_heartbeats.value >= 2)
        proxy.lose(None)
        await flow.more_handled()
        assert proxy.connections == 1, "the connection itself was never in question"


async def test_a_silent_connection_is_given_up(nats_server: Server, stream_name: str) -> None:
    async with (
        proxy_to(nats_server.port) as proxy,
        flowing(nats_server.url, stream_name, 5_000, worker_url=proxy.url, bucket=stream_name, **QUICK) as flow,
    ):
        worker = flow.worker
        assert worker
        await flow.share_handled(0.3)
        proxy.lose(lambda line: True)
        await until(lambda: "connection" in worker.health.reasons)
        proxy.lose(None)
        await flow.more_handled()
        await until(lambda: worker.health.healthy)


async def test_a_consumer_deleted_during_the_outage_is_made_again_at_the_position(
    nats_server: Server, stream_name: str
) -> None:
    async with (
        proxy_to(nats_server.port) as proxy,
        flowing(nats_server.url, stream_name, 5_000, worker_url=proxy.url, bucket=stream_name, **QUICK) as flow,
    ):
        worker = flow.worker
        assert worker
        await flow.share_handled(0.5)
        proxy.refuse()
        await until(lambda: "connection" in worker.health.reasons)
        client = await nats.connect(nats_server.url)
        await client.jetstream().delete_consumer(stream_name, flow.consumer)
        await client.close()
        proxy.refuse(False)
        await flow.more_handled()
        await until(lambda: worker.metrics.recreated.value == 1)


# ── a cluster ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_stream_leader_of_a_cluster_dies(nats_cluster: Cluster, stream_name: str) -> None:
    names = [server.name for server in nats_cluster.servers]
    async with flowing(nats_cluster.urls, stream_name, 5_000, replicas=3, **QUICK) as flow:
        await flow.share_handled(0.3)
        leader = names.index(await leader_of(nats_cluster.urls, stream_name))
        await nats_cluster.kill(leader)
        await flow.more_handled(1_000)


@pytest.mark.slow
async def test_the_consumer_leader_of_a_cluster_steps_down(nats_cluster: Cluster, stream_name: str) -> None:
    async with flowing(nats_cluster.urls, stream_name, 5_000, replicas=3, **QUICK) as flow:
        client = await connect(nats_cluster.urls)
        try:
            for share in (0.2, 0.4, 0.6, 0.8):
                await flow.share_handled(share)
                subject = f"$JS.API.CONSUMER.LEADER.STEPDOWN.{stream_name}.{flow.consumer}"
                answer = json.loads((await client.request(subject, b"", timeout=5)).data)
                assert answer.get("success"), answer
        finally:
            await client.close()


async def leader_of(servers: Servers, stream: str) -> str:
    client = await nats.connect(servers)
    try:
        cluster = (await client.jetstream().stream_info(stream)).cluster
        assert cluster
        assert cluster.leader
        return cluster.leader
    finally:
        await client.close()


# ── what cannot be survived is said ───────────────────────────────────────────────────────────────────────────────


async def test_a_memory_stream_that_died_with_its_server_is_named(
    nats_server_factory: Callable[..., Server], stream_name: str
) -> None:
    server = nats_server_factory()
    await create_stream(server.url, stream_name, storage=StorageType.MEMORY)
    journal: list[Handled] = []
    async with app_for(stream_name, journal).running(nats=server.url, **QUICK) as worker:
        await SteadyPublisher(server.url, 100, lambda n: f"{stream_name}.p{n % 4}").run()
        await until(lambda: len(journal) == 100)
        await server.kill()
        await server.restart()
        await until(lambda: "stream" in worker.health.reasons.get("pull", ""))


async def test_a_stream_made_again_under_a_running_worker_is_read_from_its_start(
    nats_server_factory: Callable[..., Server], stream_name: str
) -> None:
    server = nats_server_factory()
    await create_stream(server.url, stream_name, storage=StorageType.MEMORY)
    journal: list[Handled] = []
    async with app_for(stream_name, journal).running(nats=server.url, **QUICK):
        await SteadyPublisher(server.url, 100, lambda n: f"{stream_name}.p{n % 4}").run()
        await until(lambda: len(journal) == 100)
        await server.kill()
        await server.restart()
        await create_stream(server.url, stream_name, storage=StorageType.MEMORY)
        await SteadyPublisher(server.url, 150, lambda n: f"{stream_name}.p{n % 4}").run()
        await until(lambda: len(journal) >= 101)
        await until(lambda: len(journal) == 250, 2)


async def test_two_solo_workers_with_one_id_are_told_apart_by_a_health_signal(
    nats_server: Server, stream_name: str
) -> None:
    count = 1_500
    await create_stream(nats_server.url, stream_name)
    journals: tuple[list[Handled], list[Handled]] = ([], [])
    settings = {"nats": nats_server.url, "bucket": stream_name, "worker_id": "twin", "fleet": False, **QUICK}
    said: list[str] = []
    async with contextlib.AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(app_for(stream_name, journal).running(**settings)) for journal in journals
        ]
        for worker in workers:
            worker.health.on_change(lambda health: said.extend(health.reasons.values()))
        publisher = SteadyPublisher(nats_server.url, count, lambda n: f"{stream_name}.{PARTITIONS[n % 40]}")
        # Some messages come to the one, some to the other, some to both.
        publishing = asyncio.create_task(publisher.run(lambda n: n < sum(map(len, journals)) + 400))
        try:
            await until(lambda: any("worker_id" in reason for reason in said), 20)
            await asyncio.wait_for(publishing, 25)
        finally:
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)
        stored = await read_back(nats_server.url, stream_name)

        def all_seen() -> bool:
            return {e.seq for journal in journals for e in journal} >= {s.seq for s in stored}

        await until(all_seen, 20)
    # What both saw was handled twice, but neither of them lost order.
    for journal in journals:
        own = audit([s for s in stored if s.seq in {e.seq for e in journal}], journal, ())
        assert (own.out_of_order, own.altered) == (0, 0)
