"""What a fleet hears besides its leases: system events of the server, and requests to its micro service."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from tests.integration.conftest import eventually
from tests.integration.processes import environment
from tests.integration.proxy import proxy_to
from tests.pace import unhindered_s

import parti
from parti.config import Settings
from parti.coordination.control_plane import read_keys
from parti.coordination.records import KEYS, Records
from parti.embedded import Server
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection

PARTITIONS = [f"p{n}" for n in range(12)]
ACCOUNTS = """
accounts: {
  A: {jetstream: enabled, users: [{user: a, password: x}]}
  SYS: {users: [{user: s, password: y}]}
}
system_account: SYS
"""
CREDENTIALS = {"user": "a", "password": "x", "system_user": "s", "system_password": "y"}
QUICK: dict[str, Any] = {
    "cold_start_window_s": 0.1,
    "scale_window_s": 0.1,
    "min_rebalance_interval_s": 0.1,
    "lease_ttl_s": 30.0,
    "log_level": "error",
}
DOOMED = """
import asyncio
import parti
from parti.telemetry.logs import configure_logging

async def main():
    configure_logging("error")
    app = parti.App(stream="S", subject="s.{{p}}", partitions={partitions!r}, nats={url!r}, **{settings!r})
    app.handler(handle)
    async with app.running() as worker:
        print(worker.worker_id, flush=True)
        await asyncio.sleep(600)

async def handle(message):
    pass

asyncio.run(main())
"""


def make_app(url: str, **settings: Any) -> parti.App:
    app = parti.App(stream="S", subject="s.{p}", partitions=PARTITIONS, nats=url, **{**QUICK, **settings})

    @app.handler
    async def handle(message: parti.Message) -> None:
        pass

    return app


@asynccontextmanager
async def connected(server: Server, **credentials: Any) -> AsyncIterator[Connection]:
    connection = await Connection.open(Settings(nats=(server.url,), **credentials), name="test")
    try:
        await JetStreamApi(connection).ensure_stream({"name": "S", "subjects": ["s.*"], "storage": "memory"})
        yield connection
    finally:
        await connection.close()


async def test_a_killed_process_is_replaced_within_seconds_of_the_servers_word(
    nats_server_factory: Callable[..., Server],
) -> None:
    server = nats_server_factory(config=ACCOUNTS)
    settings = {**QUICK, **CREDENTIALS, "takeover_on_disconnect": True}
    async with connected(server, user="a", password="x"), make_app(server.url, **settings).running() as survivor:
        script = DOOMED.format(partitions=PARTITIONS, url=server.url, settings=settings)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", script), stdout=asyncio.subprocess.PIPE, env=environment()
        )
        try:
            assert process.stdout
            assert await process.stdout.readline() == b"worker-1\n"
            await eventually(lambda: len(survivor.partitions) == 6)
            process.kill()
            killed_s = unhindered_s()
            await process.wait()
            await eventually(lambda: len(survivor.partitions) == 12)
            assert unhindered_s() - killed_s < 5, "the lease would have lasted 30 s"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def test_a_worker_that_comes_back_over_another_connection_keeps_its_lease(
    nats_server_factory: Callable[..., Server],
) -> None:
    server = nats_server_factory(config=ACCOUNTS)
    settings = {**CREDENTIALS, "takeover_on_disconnect": True, "reconnect_wait_s": 0.05}
    async with AsyncExitStack() as stack:
        connection = await stack.enter_async_context(connected(server, user="a", password="x"))
        leader = await stack.enter_async_context(make_app(server.url, **settings).running())
        proxy = await stack.enter_async_context(proxy_to(server.port))
        other = await stack.enter_async_context(make_app(proxy.url, **settings).running())
        await eventually(lambda: len(other.partitions) == 6)
        before = await read(connection)
        proxy.cut()
        await eventually(lambda: other.metrics.reconnects.value > 0)

        async def heard_again() -> bool:
            now = await read(connection)
            return now.members["worker-1"].client != before.members["worker-1"].client

        await eventually(heard_again)
        # Longer than the grace that a broken connection gets.
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            now = await read(connection)
            assert now.members["worker-1"].incarnation == before.members["worker-1"].incarnation
            assert [c.fence_token for c in now.claims.values()] == [c.fence_token for c in before.claims.values()]
        assert len(leader.partitions) == len(other.partitions) == 6


async def read(connection: Connection) -> Records:
    return Records.of(await read_keys(connection, JetStreamApi(connection), "parti", KEYS))


async def test_wrong_system_credentials_do_not_stop_a_fleet(nats_server_factory: Callable[..., Server]) -> None:
    server = nats_server_factory(config=ACCOUNTS)
    wrong = {**CREDENTIALS, "system_password": "z"}
    async with connected(server, user="a", password="x"), make_app(server.url, **wrong).running() as worker:
        await eventually(lambda: len(worker.partitions) == 12)


async def test_every_worker_answers_as_a_micro_service(nats_server_factory: Callable[..., Server]) -> None:
    server = nats_server_factory()
    async with AsyncExitStack() as stack:
        connection = await stack.enter_async_context(connected(server))
        workers = [await stack.enter_async_context(make_app(server.url).running()) for _ in range(2)]
        await eventually(lambda: sum(len(w.partitions) for w in workers) == 12)
        for n in range(24):
            await JetStreamApi(connection).publish(f"s.p{n % 12}", b"x")
        await eventually(lambda: sum(w.finished for w in workers) == 24)
        answers: list[dict[str, Any]] = []

        async def take(message: Any) -> None:
            answers.append(json.loads(message.data))

        inbox = connection.client.new_inbox()
        await connection.client.subscribe(inbox, cb=take)
        await connection.publish("$SRV.STATS.parti", b"", reply=inbox)
        await eventually(lambda: len(answers) == 2)
    assert {a["metadata"]["worker"] for a in answers} == {"worker-0", "worker-1"}
    assert sum(a["endpoints"][0]["num_requests"] for a in answers) == 24
    assert sum(a["endpoints"][0]["data"]["partitions"] for a in answers) == 12
    assert {a["version"] for a in answers} == {parti.__version__}
