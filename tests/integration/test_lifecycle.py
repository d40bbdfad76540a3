"""The connection of a worker, from its start to its end, on a real server."""

from __future__ import annotations

import urllib.request
from urllib.error import URLError

import pytest

from parti.config import Settings
from parti.embedded import Server
from parti.jetstream.connection import Connection, ConnectionState
from parti.jetstream.lifecycle import Lifecycle
from parti.jetstream.vitals import Vitals


async def test_the_connection_outlives_all_other_parts_and_its_loss_is_told(nats_server: Server) -> None:
    vitals = Vitals("worker-0")
    life = Lifecycle(vitals)
    settings = Settings(nats=(nats_server.url,), metrics_port=0)
    seen: list[ConnectionState] = []
    opened: list[Connection] = []

    async def part_ends() -> None:
        seen.append(opened[0].state)
        assert health(vitals.port) == 200

    async def start() -> None:
        opened.append(await life.connect(settings, name="a worker"))
        vitals.serve(settings)
        life.hold(part_ends)

    async def leave() -> bool:
        return True

    await life.begin(start)
    port = vitals.port
    assert await life.end(leave)
    assert seen == [ConnectionState.CONNECTED]
    assert opened[0].closed
    assert "connection" in vitals.health.reasons
    with pytest.raises(URLError):
        health(port)


async def test_a_start_that_fails_closes_its_connection(nats_server: Server) -> None:
    life = Lifecycle(Vitals("worker-0"))
    opened: list[Connection] = []

    async def start() -> None:
        opened.append(await life.connect(Settings(nats=(nats_server.url,)), name="a worker"))
        raise ValueError("no such stream")

    with pytest.raises(ValueError, match="no such stream"):
        await life.begin(start)
    assert opened[0].closed


def health(port: int | None) -> int:
    """Status of the answer to a question about health."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as answer:
        return int(answer.status)
