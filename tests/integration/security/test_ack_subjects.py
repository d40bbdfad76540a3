"""With `js_ack_fc_v2` subjects of acknowledgements name domain and account; roles cover both forms."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
from tests.integration.conftest import eventually
from tests.integration.security.conftest import ORDERS
from tests.integration.security.guarded import guarded_config, guarded_server, make_stream, root_settings
from tests.integration.security.test_roles import Strict, violations

from parti.embedded import Server
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.scan import scan
from parti.jobs import Job, JobApp

V2 = "feature_flags { js_ack_fc_v2: true }\n"
PARTITIONS = [f"p{number}" for number in range(4)]


@asynccontextmanager
async def flagged(*options: str, roles: tuple[str, ...]) -> AsyncIterator[tuple[Server, JetStreamApi]]:
    """A server with the flag and the users of these roles, and somebody who may do all.

    Without the right to answer, which covers the first acknowledgement of a delivery for a minute and hides that the
    second one (progress, then the end) or a late one is refused.
    """
    config = re.sub(r" *allow_responses .*\n", "", guarded_config([ORDERS], roles=roles, options=options, more=V2))
    with guarded_server([ORDERS], config) as server:
        root = await Connection.open(root_settings(server.url), name="root")
        try:
            yield server, JetStreamApi(root)
        finally:
            await root.close()


@pytest.mark.parametrize("retention", ["limits", "interest", "workqueue"])
async def test_workers_acknowledge_under_their_roles_with_the_newer_subjects(retention: str) -> None:
    async with flagged(roles=("worker", "leader")) as (server, root):
        await make_stream(root, ORDERS, retention=retention)
        seen = Strict()
        async with ORDERS.app(server.url, "leader", seen.handle, PARTITIONS).running() as leader:
            await leader.wait_assigned()
            following = ORDERS.app(server.url, "worker", seen.handle, PARTITIONS, may_lead=False)
            async with following.running() as worker:
                await eventually(lambda: len(worker.partitions) == len(leader.partitions) == 2, 20)
                for number in range(16):
                    await root.publish(f"orders.in.p{number % 4}", b"bad" if number == 7 else b"x")
                await seen.reaches(16)
                await eventually(partial(_is_settled, root, retention), 20)
        assert sorted(call.seq for call in seen.calls) == list(range(1, 17))
        assert violations(server, ["orders-leader", "orders-worker"]) == []


async def _is_settled(root: JetStreamApi, retention: str) -> bool:
    """Nothing waits for an acknowledgement, and a work-queue is empty."""
    if any(info.ack_pending for info in await root.consumers(ORDERS.stream)):
        return False
    return retention != "workqueue" or (await root.stream_info(ORDERS.stream)).messages == 0


async def test_a_job_is_acknowledged_with_the_newer_subjects() -> None:
    async with flagged("--jobs", "WORK", "--jobs-subject", "work.>", roles=("leader",)) as (server, root):
        done: list[int] = []

        async def work(job: Job) -> None:
            done.append(job.seq)

        login = {"nats": server.url, "log_level": "error", **ORDERS.names, **ORDERS.login("leader")}
        app = JobApp(stream="WORK", subject="work.>", **login)
        app.handler(work)
        async with app.running():
            await root.publish("work.a", b"x")
            await eventually(lambda: done == [1], 10)
            await eventually(partial(_is_empty, root, "WORK"), 10)
        assert violations(server, ["orders-leader"]) == []


async def _is_empty(root: JetStreamApi, stream: str) -> bool:
    return (await root.stream_info(stream)).messages == 0


async def test_answers_to_flow_control_are_allowed_with_the_newer_subjects() -> None:
    """The server asks before it goes on; without an answer it would stall in the middle."""
    async with flagged(roles=("observer",)) as (server, root):
        await root.ensure_stream({"name": "orders-dlq", "subjects": ["orders-dlq.>"], "storage": "memory"})
        await asyncio.gather(*(root.publish(f"orders-dlq.ORDERS.{n % 9}", b"x" * 4096) for n in range(3000)))
        connection = await Connection.open(ORDERS.settings(server.url, "observer"), name="observer")
        asked: list[str] = []
        inbox = await root_listener(server, asked)
        try:
            read = [each.seq async for each in scan(connection, JetStreamApi(connection), "orders-dlq", payload=True)]
        finally:
            await connection.close()
            await inbox.close()
        assert read == list(range(1, 3001))
        assert asked, "the server has asked, so there was something to allow"
        assert asked[0].startswith("$JS.FC._.")
        assert violations(server, ["orders-observer"]) == []


async def root_listener(server: Server, asked: list[str]) -> Connection:
    """Hear what is answered to flow control."""
    connection = await Connection.open(root_settings(server.url), name="listener")

    async def hear(message: object) -> None:
        asked.append(getattr(message, "subject", ""))

    await connection.client.subscribe("$JS.FC.>", cb=hear)
    await connection.flush()
    return connection
