"""A worker as a NATS micro service: what `nats micro list`, `info` and `stats` ask for, and what they get."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

import nats.micro.service as reference
import pytest
from nats.aio.msg import Msg
from tests.integration.conftest import Kit, eventually
from tests.integration.proxy import proxy_to

from parti.config import Settings
from parti.embedded import Server
from parti.errors import ConfigError
from parti.jetstream.connection import Connection
from parti.jetstream.micro import MicroService, ServiceStats

STATS = ServiceStats(
    finished=4,
    errors=1,
    last_error="handler failed",
    processing_time_s=0.002,
    data={"partitions": 3, "version": 7, "state": "stable"},
)


@contextlib.asynccontextmanager
async def serving(
    url: str, name: str, worker_id: str, **options: Any
) -> AsyncIterator[tuple[MicroService, Connection]]:
    connection = await Connection.open(Settings(nats=(url,), reconnect_wait_s=0.02), name=worker_id)
    service = MicroService(
        connection,
        name=name,
        version="1.2.3",
        description="a test",
        subject="orders.*",
        queue_group="parti",
        **{"metadata": lambda: {"worker": worker_id}, "stats": lambda: STATS, **options},
    )
    await service.start()
    try:
        yield service, connection
    finally:
        await service.stop()
        await connection.close()


async def ask(connection: Connection, subject: str, count: int) -> list[dict[str, Any]]:
    """The answers to one request; exactly as many as expected, in the order of the workers' names."""
    answers: list[dict[str, Any]] = []

    async def take(msg: Msg) -> None:
        answers.append(json.loads(msg.data) if msg.data else {"status": (msg.headers or {}).get("Status")})

    inbox = connection.client.new_inbox()
    subscription = await connection.client.subscribe(inbox, cb=take)
    await connection.publish(subject, b"", reply=inbox)
    await eventually(lambda: len(answers) >= count)
    await connection.flush()
    await subscription.unsubscribe()
    assert len(answers) == count
    return sorted(answers, key=lambda answer: str(answer.get("metadata")))


@pytest.mark.parametrize("verb", ["PING", "INFO", "STATS"])
async def test_every_instance_answers_by_kind_and_one_by_id(kit: Kit, verb: str) -> None:
    async with serving(kit.url, kit.root, "w0") as (first, _), serving(kit.url, kit.root, "w1") as (second, _):
        assert first.id != second.id
        both = await ask(kit.connection, f"$SRV.{verb}.{kit.root}", 2)
        assert [answer["id"] for answer in both] == [first.id, second.id]
        assert [answer["metadata"] for answer in both] == [{"worker": "w0"}, {"worker": "w1"}]
        one = await ask(kit.connection, f"$SRV.{verb}.{kit.root}.{second.id}", 1)
        assert [answer["id"] for answer in one] == [second.id]
        assert {answer["type"] for answer in both + one} == {f"io.nats.micro.v1.{verb.lower()}_response"}
        assert await ask(kit.connection, f"$SRV.{verb}.{kit.root}.nobody", 1) == [{"status": "503"}]


async def test_instances_of_all_kinds_answer_to_the_bare_subject(
    nats_server_factory: Callable[..., Server],
) -> None:
    server = nats_server_factory()
    async with serving(server.url, "parti", "w0") as (_, connection), serving(server.url, "other", "w1"):
        assert [answer["name"] for answer in await ask(connection, "$SRV.PING", 2)] == ["parti", "other"]


async def test_answers_are_read_by_another_implementation(kit: Kit) -> None:
    began = datetime.now(UTC).replace(tzinfo=None)
    async with serving(kit.url, kit.root, "w0") as (service, _):
        (answer,) = await ask(kit.connection, f"$SRV.PING.{kit.root}", 1)
        ping = reference.ServicePing.from_dict(answer)
        assert (ping.id, ping.name, ping.version) == (service.id, kit.root, "1.2.3")
        assert ping.to_dict() == answer
        (answer,) = await ask(kit.connection, f"$SRV.INFO.{kit.root}", 1)
        info = reference.ServiceInfo.from_dict(answer)
        assert info.to_dict() == answer
        assert [(e.name, e.subject, e.queue_group) for e in info.endpoints] == [("messages", "orders.*", "parti")]
        (answer,) = await ask(kit.connection, f"$SRV.STATS.{kit.root}", 1)
        stats = reference.ServiceStats.from_dict(answer)
        assert began <= stats.started <= datetime.now(UTC).replace(tzinfo=None)
        assert answer["endpoints"] == [
            {
                "name": "messages",
                "subject": "orders.*",
                "queue_group": "parti",
                "num_requests": 4,
                "num_errors": 1,
                "last_error": "handler failed",
                "processing_time": 2_000_000,
                "average_processing_time": 500_000,
                "data": {"partitions": 3, "version": 7, "state": "stable"},
            }
        ]


async def test_figures_are_those_of_the_moment_of_the_request(kit: Kit) -> None:
    finished = 0
    async with serving(kit.url, kit.root, "w0", stats=lambda: ServiceStats(finished=finished)):
        for finished in (0, 5):
            (answer,) = await ask(kit.connection, f"$SRV.STATS.{kit.root}", 1)
            assert answer["endpoints"][0]["num_requests"] == finished
            assert answer["endpoints"][0]["average_processing_time"] == 0


async def test_it_goes_on_after_a_reconnect_and_ends_with_stop(kit: Kit, nats_server: Server) -> None:
    async with proxy_to(nats_server.port) as proxy, serving(proxy.url, kit.root, "w0") as (service, connection):
        proxy.cut()
        await eventually(lambda: proxy.connections == 2)
        await connection.wait_connected(5)
        await connection.flush()
        for verb in ("PING", "INFO", "STATS"):
            await ask(kit.connection, f"$SRV.{verb}.{kit.root}", 1)
        await service.stop()
        await connection.flush()
        assert await ask(kit.connection, f"$SRV.PING.{kit.root}", 1) == [{"status": "503"}]
        await service.start()
        await ask(kit.connection, f"$SRV.PING.{kit.root}", 1)


async def test_figures_that_cannot_be_had_leave_the_other_answers_alone(kit: Kit) -> None:
    def fail() -> ServiceStats:
        raise RuntimeError("as planned")

    async with serving(kit.url, kit.root, "w0", stats=fail):
        with pytest.raises(asyncio.TimeoutError):
            await kit.connection.client.request(f"$SRV.STATS.{kit.root}", timeout=0.2)
        await ask(kit.connection, f"$SRV.PING.{kit.root}", 1)


@pytest.mark.parametrize(
    "wrong", [{"name": "a.b"}, {"name": ""}, {"version": "1.2"}, {"version": "01.2.3"}, {"version": "1.2.3-"}]
)
async def test_names_and_versions_that_the_protocol_forbids_are_refused(kit: Kit, wrong: dict[str, str]) -> None:
    given = {"name": "parti", "version": "1.2.3", "description": "", "subject": "a"} | wrong
    with pytest.raises(ConfigError):
        MicroService(kit.connection, metadata=dict, stats=lambda: STATS, **given)


@pytest.mark.parametrize("version", ["0.1.0", "1.0.0-rc.1", "1.0.0-alpha-x.7+build.5"])
async def test_any_semantic_version_is_taken(kit: Kit, version: str) -> None:
    service = MicroService(
        kit.connection, version=version, description="", subject="a", metadata=dict, stats=lambda: STATS
    )
    assert service.name == "parti"
    assert reference.SEMVER_REGEX.match(version)
