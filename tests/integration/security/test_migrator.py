"""The role `migrator`: `parti migrate` from plan to cleanup and back works with its permissions, and needs each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from nats.aio.msg import Msg
from tests.integration.security.conftest import ORDERS
from tests.integration.security.guarded import guarded_config, guarded_server, make_stream, root_settings, typed_as
from tests.integration.security.migrating import PARTITIONS, WHAT, make_old_consumers, write_app

import parti
from parti.core.permissions import inbox_of
from parti.core.role_calls import calls_of
from parti.core.role_matrix import EXAMPLE
from parti.embedded import Server
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.model.subjects import covers

QUICK = ("--windows", "1", "--window", "0.1")
HANDLED_BEFORE = 10
OWN_KEYS = ("$KV.orders.migrat", "$KV.orders.progress.old.")
UNSEEN = ("$JS.FC.",)
"""Not asked for in a run of a second: what the server wants to know when it delivers very much."""

RARE = ("$JS.API.DIRECT.GET.", "$JS.API.STREAM.PURGE.")
"""On a work-queue: for partitions of several subjects, and for messages whose acknowledgement came to nothing."""


@asynccontextmanager
async def asked_by(connection: Connection, user: str) -> AsyncIterator[set[str]]:
    """What a user publishes meanwhile: told by the inbox for the answer, or by keys that nobody else writes."""
    subjects: set[str] = set()

    async def hear(message: Msg) -> None:
        if message.reply.startswith(f"{inbox_of(user)}.") or message.subject.startswith(OWN_KEYS):
            subjects.add(message.subject)

    heard = [await connection.client.subscribe(each, cb=hear) for each in ("$JS.API.>", "$KV.>")]
    await connection.flush()
    try:
        yield subjects
        await connection.flush()
    finally:
        for each in heard:
            await each.unsubscribe()


@pytest.mark.parametrize("retention", ["limits", "workqueue", "interest"])
async def test_a_migrator_can_migrate_and_may_do_nothing_that_this_does_not_need(
    retention: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_app(tmp_path)
    options = ("--retention", retention)
    config = guarded_config([ORDERS], roles=("leader", "migrator"), options=options)
    with guarded_server([ORDERS], config) as server:
        connection = await Connection.open(root_settings(server.url), name="root")
        root = JetStreamApi(connection)
        try:
            await make_stream(root, ORDERS, retention=retention)
            await make_old_consumers(root)
            async with asked_by(connection, ORDERS.user("migrator")) as asked:
                await _there_and_back(server, root, capsys)
        finally:
            await connection.close()
        refused = [line for line in server.log_path.read_text().splitlines() if "Violation" in line]
        assert not [line for line in refused if "orders-migrator" in line]
    limits = retention == "limits"
    names = replace(EXAMPLE, mirror=EXAMPLE.mirror if limits else "", keeps=limits, holds=retention == "interest")
    unseen = UNSEEN if retention != "workqueue" else (*UNSEEN, *RARE)
    granted = {call.subject for call in calls_of("migrator", names) if not call.subject.startswith(unseen)}
    assert not {each for each in granted if not any(covers(each, subject) for subject in asked)}


async def _there_and_back(server: Server, root: JetStreamApi, capsys: pytest.CaptureFixture[str]) -> None:
    """All that there is to type, under load, so that there is something to compare and to count."""

    async def types(*arguments: str) -> None:
        code, out, err = await typed_as(server.url, ORDERS, "migrator", capsys, "migrate", *arguments)
        assert code == 0, (arguments, out, err)

    async def publish() -> None:
        while True:
            for name in PARTITIONS:
                await root.publish(f"orders.in.{name}", b"x")
            await asyncio.sleep(0.01)

    async def handle(message: parti.Message) -> None:
        if message.seq > HANDLED_BEFORE:
            await may_end.wait()

    may_end = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        load = tasks.create_task(publish())
        await types("plan", *WHAT)
        await types("run", *WHAT, "--phase", "shadow")
        async with ORDERS.app(server.url, "leader", handle, PARTITIONS).running():
            await types("run", "--phase", "validate", *QUICK)
            await types("run", "--phase", "switch", "--yes")
            await types("run", "--phase", "validate", *QUICK)  # with messages that wait
            may_end.set()
            load.cancel()
            await types("run", "--phase", "cleanup", "--yes")
            await types("status")
            await types("run", "--abandon")
            await types("run", "--rollback")
    assert {info.name for info in await root.consumers(ORDERS.stream)} >= {f"old-{name}" for name in PARTITIONS}
