"""Workers on a hot mirror: a copy of the stream in memory that may vanish, fill up or fall behind at any moment.

Whatever becomes of it, each stored message is handled once and each partition in stream order; what handlers saw is
compared with the stream itself, read back by plain nats-py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import nats
import pytest
from benchmarks.audit import Handled, audit, read_back
from benchmarks.traffic import SteadyPublisher, connect
from nats.js.api import StorageType
from nats.js.errors import NotFoundError
from tests.integration.conftest import eventually
from tests.integration.test_outages import CLEAN, PARTITIONS, app_for, create_stream

from parti.app.worker import Worker
from parti.core.hot_mirror import mirror_name
from parti.embedded import Cluster, Server
from parti.errors import ConfigError, NotFound

QUICK: dict[str, Any] = {"pull_heartbeat_s": 0.3, "ping_interval_s": 0.4, "ack_wait_s": 3.0, "scale_window_s": 0.3}
RATE = 2_000


class Flow:
    """Messages on their way through workers that read from a mirror."""

    def __init__(self, servers: Any, stream: str, count: int, settings: dict[str, Any]) -> None:
        self.servers = servers
        self.stream = stream
        self.mirror = mirror_name(stream, stream)
        self.count = count
        self.journal: list[Handled] = []
        self.may_send = True
        self.settings = {"bucket": stream, "prefix": stream, "hot_mirror": "on", **QUICK, **settings}
        self.gate = asyncio.Event()
        self.gate.set()
        self.workers: list[Worker] = []
        self._stack = contextlib.AsyncExitStack()
        loop = asyncio.get_running_loop()
        self.began_s = loop.time()
        publisher = SteadyPublisher(servers, count, lambda n: f"{stream}.{PARTITIONS[n * 7 % len(PARTITIONS)]}")
        self.publishing = asyncio.create_task(
            publisher.run(lambda number: self.may_send and number < RATE * (loop.time() - self.began_s))
        )

    async def join(self, **settings: Any) -> Worker:
        """Start another worker."""
        app = app_for(self.stream, self.journal, self.gate)
        worker = await self._stack.enter_async_context(
            app.running(nats=self.servers, **{**self.settings, **settings})
        )
        self.workers.append(worker)
        return worker

    def inside(self) -> bool:
        return all(worker.metrics.mirror_inside.value for worker in self.workers)

    def outside(self) -> bool:
        return not any(worker.metrics.mirror_inside.value for worker in self.workers)

    async def handled(self, share: float, timeout_s: float = 30.0) -> None:
        await eventually(lambda: len(self.journal) >= share * self.count, timeout_s)

    async def finish(self) -> None:
        await asyncio.wait_for(self.publishing, 40)
        await self.handled(1, 40)
        await self._stack.aclose()
        stored = await read_back(self.servers, self.stream)
        assert len(stored) == self.count
        assert audit(stored, self.journal, map(str, range(self.count))) == CLEAN

    async def close(self) -> None:
        self.publishing.cancel()
        await asyncio.gather(self.publishing, return_exceptions=True)
        await self._stack.aclose()

    async def streams(self) -> set[str]:
        client = await nats.connect(self.servers)
        try:
            return {info.config.name or "" for info in await client.jetstream().streams_info()}
        finally:
            await client.close()

    async def consumers(self, stream: str) -> set[str]:
        client = await nats.connect(self.servers)
        try:
            return {info.name for info in await client.jetstream().consumers_info(stream)}
        finally:
            await client.close()

    async def window(self) -> int:
        """Where the mirror begins; 0 while there is none."""
        client = await nats.connect(self.servers)
        try:
            info = await client.jetstream().stream_info(self.mirror)
            assert info.config.mirror
            return info.config.mirror.opt_start_seq or 1
        except NotFoundError:
            return 0
        finally:
            await client.close()

    async def is_full(self) -> bool:
        """Whether the mirror has stopped for want of room."""
        client = await nats.connect(self.servers)
        try:
            js = client.jetstream()
            mirror, stream = await js.stream_info(self.mirror), await js.stream_info(self.stream)
            return stream.state.last_seq > mirror.state.last_seq + RATE / 2
        except NotFoundError:
            return False
        finally:
            await client.close()

    async def delete_mirror(self) -> None:
        client = await connect(self.servers)
        try:
            with contextlib.suppress(NotFoundError):
                await client.jetstream().delete_stream(self.mirror)
        finally:
            await client.close()


@contextlib.asynccontextmanager
async def flowing(servers: Any, stream: str, count: int, workers: int = 1, **settings: Any) -> AsyncIterator[Flow]:
    """Run workers on a mirror and a publisher; leave when all is handled, and check what came out."""
    await create_stream(servers, stream, num_replicas=settings.get("replicas", 1), allow_direct=True)
    flow = Flow(servers, stream, count, settings)
    try:
        # On a busy machine workers may take as long to join as all the messages take to be sent.
        flow.may_send = False
        for _ in range(workers):
            await flow.join()
        flow.may_send, flow.began_s = True, asyncio.get_running_loop().time()
        yield flow
        await flow.finish()
    finally:
        await flow.close()


async def test_a_fleet_reads_from_the_mirror_and_leaves_nothing_behind(nats_server: Server, stream_name: str) -> None:
    async with flowing(nats_server.url, stream_name, 4_000, workers=3) as flow:
        await eventually(flow.inside)
        assert flow.mirror in await flow.streams()

        async def all_there() -> bool:  # who has decided to read there makes its consumer next
            return await flow.consumers(flow.mirror) == {f"{stream_name}-worker-{n}" for n in range(3)}

        await eventually(all_there)
        await eventually(lambda: _is_empty(flow.consumers(stream_name)))
    assert flow.mirror not in await flow.streams(), "the last worker that left has removed it"


async def _is_empty(asked: Any) -> bool:
    return not await asked


async def test_a_worker_alone_has_a_mirror_of_its_own(nats_server: Server, stream_name: str) -> None:
    async with flowing(nats_server.url, stream_name, 4_000, fleet=False, worker_id="me") as flow:
        await eventually(flow.inside)
        assert mirror_name(stream_name, stream_name, "me") in await flow.streams()


@pytest.mark.slow
async def test_the_mirror_vanishes_again_and_again(nats_server: Server, stream_name: str) -> None:
    async with flowing(nats_server.url, stream_name, 8_000, workers=2) as flow:
        for share in (0.2, 0.5):
            await eventually(flow.inside, 15)
            await flow.handled(share)
            await flow.delete_mirror()
            await eventually(lambda: not flow.inside())
        await eventually(flow.inside, 15)


async def test_the_server_is_killed_and_its_memory_is_gone(
    nats_server_factory: Callable[..., Server], stream_name: str
) -> None:
    server = nats_server_factory()
    async with flowing(server.url, stream_name, 8_000, workers=2) as flow:
        for share in (0.2, 0.5):
            await eventually(flow.inside, 15)
            await flow.handled(share)
            await server.kill()
            await server.restart()
            await flow.handled(share + 0.1)
        await eventually(flow.inside, 15)


@pytest.mark.slow
async def test_partitions_move_between_workers_on_the_mirror(nats_server: Server, stream_name: str) -> None:
    async with flowing(nats_server.url, stream_name, 8_000) as flow:
        await eventually(flow.inside)
        for n in range(1, 4):
            worker = await flow.join()
            await eventually(lambda w=worker: len(w.partitions) == len(PARTITIONS) // len(flow.workers))  # type: ignore[misc]
            await flow.handled(n / 5)
        await eventually(flow.inside, 15)


@pytest.mark.slow
async def test_gained_partitions_with_a_long_backlog_are_gone_back_for_on_the_mirror(
    nats_server: Server, stream_name: str
) -> None:
    """Nothing is searched for in the stream, subject by subject; what the worker had before is not repeated."""
    async with flowing(nats_server.url, stream_name, 12_000, workers=0, fleet=False, worker_id="me") as flow:
        worker = await flow.join()
        await eventually(flow.inside)
        let_go_at = len(flow.journal)
        await worker.update_worker_consumer("me", PARTITIONS[: len(PARTITIONS) // 2])
        await asyncio.wait_for(flow.publishing, 30)
        await eventually(lambda: len(flow.journal) >= (let_go_at + flow.count) // 2)
        before = worker.metrics.resets.child("session").value
        await worker.update_worker_consumer("me", PARTITIONS)
        await flow.handled(1)
        assert worker.metrics.resets.child("session").value > before


async def test_a_mirror_that_is_full_is_read_to_its_end_and_made_anew_further_on(
    nats_server: Server, stream_name: str
) -> None:
    """A stall of the whole fleet is read window by window from memory: nobody has to go back to the stream."""
    settings = {"hot_mirror_max_bytes": 1 << 20}
    async with flowing(nats_server.url, stream_name, 14_000, workers=2, **settings) as flow:
        await eventually(flow.inside)
        before = await flow.window()
        flow.gate.clear()
        await eventually(flow.is_full, 15)
        flow.gate.set()
        await eventually(lambda: _begins_after(flow, before), 15)
        moves = [worker.metrics.mirror_moves for worker in flow.workers]
        await flow.handled(0.9)
        assert not sum(m.child(move).value for m in moves for move in ("leave", "rebuild"))


async def _begins_after(flow: Flow, seq: int) -> bool:
    return await flow.window() > seq


@pytest.mark.slow
async def test_a_backlog_many_times_as_large_as_the_mirror_is_read_from_it(
    nats_server: Server, stream_name: str
) -> None:
    count = 20_000
    await create_stream(nats_server.url, stream_name, allow_direct=True)
    publisher = SteadyPublisher(
        nats_server.url, count, lambda n: f"{stream_name}.{PARTITIONS[n * 7 % len(PARTITIONS)]}"
    )
    await publisher.run()
    flow = Flow(nats_server.url, stream_name, 0, {"hot_mirror_max_bytes": 1 << 20})
    flow.count = count
    try:
        for _ in range(2):
            await flow.join()
        await eventually(flow.inside, 15)
        await flow.finish()
    finally:
        await flow.close()


@pytest.mark.slow
async def test_what_everybody_has_finished_is_trimmed(nats_server: Server, stream_name: str) -> None:
    async with flowing(nats_server.url, stream_name, 20_000, workers=2, hot_mirror_max_bytes=4 << 20) as flow:
        await eventually(flow.inside)
        client = await connect(nats_server.url)
        try:
            js = client.jetstream()

            async def trimmed() -> bool:
                state = (await js.stream_info(flow.mirror)).state
                return state.first_seq > 2_000

            await eventually(trimmed, 20)
            assert flow.inside()
        finally:
            await client.close()


async def test_the_stream_is_made_anew_under_the_mirror(nats_server: Server, stream_name: str) -> None:
    journal: list[Handled] = []
    await create_stream(nats_server.url, stream_name, allow_direct=True)
    settings = {"bucket": stream_name, "prefix": stream_name, "hot_mirror": "on", **QUICK}
    client = await connect(nats_server.url)
    js = client.jetstream()
    try:
        async with app_for(stream_name, journal).running(nats=nats_server.url, **settings) as worker:
            for n in range(50):
                await js.publish(f"{stream_name}.p{n % 10}", b"old")
            await eventually(lambda: bool(worker.metrics.mirror_inside.value) and len(journal) == 50)
            await js.delete_stream(stream_name)
            await create_stream(nats_server.url, stream_name, allow_direct=True)
            for n in range(30):
                await js.publish(f"{stream_name}.p{n % 10}", b"new")
            await eventually(lambda: len(journal) == 80, 20)
            assert sorted(entry.seq for entry in journal[50:]) == list(range(1, 31))
    finally:
        await client.close()


@pytest.mark.slow
async def test_a_mirror_with_replicas_survives_its_leader(nats_cluster: Cluster, stream_name: str) -> None:
    """By default: a server that dies with the whole mirror (above), and a stream whose leader dies (test_outages)."""
    async with flowing(nats_cluster.urls, stream_name, 8_000, workers=2, replicas=3) as flow:
        await eventually(flow.inside, 20)
        await flow.handled(0.3)
        client = await connect(nats_cluster.urls)
        try:
            info = await client.jetstream().stream_info(flow.mirror)
            assert info.cluster
            names = [server.name for server in nats_cluster.servers]
            await nats_cluster.kill(names.index(info.cluster.leader or ""))
        finally:
            await client.close()
        await flow.handled(0.6)


async def test_a_frozen_server_under_the_mirror_is_waited_for(
    nats_server_factory: Callable[..., Server], stream_name: str
) -> None:
    server = nats_server_factory()
    async with flowing(server.url, stream_name, 6_000, workers=2) as flow:
        await eventually(flow.inside)
        await flow.handled(0.2)
        os.kill(server.pid, signal.SIGSTOP)
        await asyncio.sleep(1.0)  # the fault itself: a server that answers nobody for a second
        os.kill(server.pid, signal.SIGCONT)
        await flow.handled(0.6)
        await eventually(flow.inside, 20)


@pytest.mark.parametrize(
    ("options", "settings", "reason"),
    [
        ({"retention": "workqueue"}, {}, "workqueue retention"),
        ({"retention": "interest"}, {}, "interest retention"),
        ({"storage": StorageType.MEMORY}, {}, "in memory already"),
        ({}, {"ordered": False}, "out of order"),
    ],
)
async def test_it_is_refused_where_it_would_be_wrong(
    nats_server: Server, stream_name: str, options: dict[str, Any], settings: dict[str, Any], reason: str
) -> None:
    await create_stream(nats_server.url, stream_name, **options)
    app = app_for(stream_name, [])
    with pytest.raises(ConfigError, match=f"hot_mirror=on is not possible.*{reason}.*set hot_mirror=auto"):
        async with app.running(nats=nats_server.url, bucket=stream_name, hot_mirror="on", **settings):
            pytest.fail("it must not start")


async def test_a_mirror_of_another_stream_is_not_entered(nats_server: Server, stream_name: str) -> None:
    """A stream made anew while its worker is about to begin on the mirror of the old one."""
    async with flowing(nats_server.url, stream_name, 2_000) as flow:
        await eventually(flow.inside)
        reader = flow.workers[0]._reader
        assert reader
        assert reader._hot
        with pytest.raises(NotFound, match="of no use now"):
            await reader._hot.entrance("made at another time")
        assert flow.outside(), "and the stream itself is read from now on"
