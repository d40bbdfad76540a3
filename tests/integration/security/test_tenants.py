"""Two deployments in one account do not touch each other, though the prefix of one begins with that of the other."""

from __future__ import annotations

import asyncio
import json
import os
from datetime import UTC, datetime
from unittest.mock import patch

import pytest
from tests.integration.conftest import Record, eventually
from tests.integration.security.guarded import (
    QUICK,
    Deployment,
    guarded_config,
    guarded_server,
    make_stream,
    open_as,
    root_settings,
)
from tests.integration.security.test_roles import _is_allowed

import parti
from parti.cli.main import main
from parti.cli.perms import names_of
from parti.config import Settings
from parti.core.role_calls import ROLES
from parti.core.role_matrix import actions
from parti.embedded import Server
from parti.errors import ConfigError
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.kv import Bucket
from parti.model.fleet import HealthRecord, encode, key_of

SHORT, LONG = Deployment("a"), Deployment("a-b")
PARTITIONS = [f"p{number}" for number in range(4)]


def app(server: Server, deployment: Deployment, seen: Record) -> parti.App:
    """A worker of a deployment, on a server without users; both deployments read one stream."""
    given = {**QUICK, "nats": server.url, **deployment.names, "ledger": "full"}
    given["ledger_stream"] = f"{deployment.name}-ledger"
    made = parti.App(stream="SHARED", subject="shared.{p}", partitions=PARTITIONS, **given)
    made.handler(seen.handle)
    return made


async def doctor(server: Server, deployment: Deployment, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What is left over of a deployment, in the eyes of `parti doctor`."""
    variables = {f"PARTI_{name.upper()}": value for name, value in deployment.names.items()}
    capsys.readouterr()
    with patch.dict(os.environ, variables):
        await asyncio.to_thread(main, ["doctor", "--nats", server.url, "--stream", "SHARED", "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    return [each["text"] for each in findings if each["area"] == "leftovers" and each["level"] != "ok"]


async def test_without_permissions_names_keep_them_apart(capsys: pytest.CaptureFixture[str]) -> None:
    async with Server() as server:
        connection = await Connection.open(Settings(nats=(server.url,)), name="test")
        api = JetStreamApi(connection)
        await api.ensure_stream({"name": "SHARED", "subjects": ["shared.*"], "allow_direct": True})
        short, long = Record(), Record()
        async with app(server, SHORT, short).running(), app(server, LONG, long).running():
            for number in range(8):
                await api.publish(f"shared.p{number % 4}", b"x")
            await short.reaches(8)
            await long.reaches(8)
        assert sorted(await api.consumer_names("SHARED")) == ["a-b-worker-0", "a-worker-0"]
        assert sorted(await api.stream_names()) == [
            "KV_a",
            "KV_a-b",
            "SHARED",
            "a-b-dlq",
            "a-b-dlq-replays",
            "a-b-history",
            "a-b-ledger",
            "a-dlq",
            "a-dlq-replays",
            "a-history",
            "a-ledger",
        ]
        await api.call("STREAM.CREATE.a-b-hot-SHARED", {"name": "a-b-hot-SHARED", "mirror": {"name": "SHARED"}})
        # Each sees what it has left behind itself, and nothing of the other's.
        assert await doctor(server, SHORT, capsys) == ["consumers while no worker runs: a-worker-0"]
        assert {"a-b-worker-0", "a-b-hot-SHARED"} == {
            text.rpartition(" ")[2] for text in await doctor(server, LONG, capsys)
        }
        await _one_name_is_not_shared(server)
        await _cleanup_takes_only_its_own(server, api)
        await connection.close()


async def _one_name_is_not_shared(server: Server) -> None:
    """A worker whose id makes its consumer's name that of the other deployment's is refused."""
    worker = app(server, SHORT, Record()).worker(worker_id="b-worker-0", fleet=False)
    with pytest.raises(ConfigError, match="consumer 'a-b-worker-0' belongs to the deployment with prefix 'a-b'"):
        await worker.start()


async def _cleanup_takes_only_its_own(server: Server, api: JetStreamApi) -> None:
    """A consumer of a worker that the fleet `a` has known goes; that of `a-b`, which is as much alone, stays."""
    bucket = Bucket(api, "a")
    gone = HealthRecord(incarnation=1, at=datetime.now(UTC))
    await bucket.put(key_of("health", "worker-7"), encode(gone), revision=0)
    for name in ("a-worker-7", "a-b-worker-7"):
        config = {"name": name, "durable_name": name, "ack_policy": "explicit", "filter_subject": "shared.none"}
        await api.put_consumer("SHARED", config, action="create")
    async with app(server, SHORT, Record()).running():

        async def removed() -> bool:
            return "a-worker-7" not in await api.consumer_names("SHARED")

        await eventually(removed, 30)
        assert {"a-b-worker-7", "a-b-worker-0"} <= set(await api.consumer_names("SHARED"))
        assert "a-b-hot-SHARED" in await api.stream_names()


async def test_no_role_of_one_may_anything_that_is_the_others() -> None:
    config = guarded_config([SHORT, LONG])
    with guarded_server([SHORT, LONG], config) as server:
        root = await Connection.open(root_settings(server.url), name="root")
        for each in (SHORT, LONG):
            await make_stream(JetStreamApi(root), each)
        await root.close()
        for ours, theirs in ((SHORT, LONG), (LONG, SHORT)):
            # Answering `nats micro` is nobody's own.
            names = names_of(theirs.settings(server.url, "leader"), theirs.stream, subjects=(f"{theirs.name}.in.>",))
            tried = [each for each in actions(names) if each.subject != "$SRV.PING"]
            assert len(tried) > 30
            for role in ROLES:
                connection = await open_as(server.url, ours, role)
                allowed = [each.what for each in tried if await _is_allowed(connection, each)]
                await connection.close()
                assert allowed == [], (ours.name, role)


async def test_both_work_under_their_roles_beside_each_other() -> None:
    with guarded_server([SHORT, LONG], guarded_config([SHORT, LONG], roles=("leader", "worker"))) as server:
        root = await Connection.open(root_settings(server.url), name="root")
        api = JetStreamApi(root)
        seen = {each.name: Record() for each in (SHORT, LONG)}
        for each in (SHORT, LONG):
            await make_stream(api, each)
        async with (
            SHORT.app(server.url, "leader", seen["a"].handle, PARTITIONS).running(),
            LONG.app(server.url, "leader", seen["a-b"].handle, PARTITIONS).running(),
        ):
            for number in range(8):
                await api.publish(f"a.in.p{number % 4}", b"x")
                await api.publish(f"a-b.in.p{number % 4}", b"x")
            await seen["a"].reaches(8)
            await seen["a-b"].reaches(8)
        await root.close()
        assert "Violation" not in server.log_path.read_text()
