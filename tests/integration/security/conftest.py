"""One guarded server for each module of these tests, and somebody at its terminal."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.security.guarded import (
    Deployment,
    guarded_config,
    guarded_server,
    make_stream,
    root_settings,
    typed_as,
)

from parti.embedded import Server
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.telemetry.logs import configure_logging

Type = Callable[..., Coroutine[Any, Any, tuple[int, str, str]]]
ORDERS = Deployment("orders")


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test sees variables or files of whoever runs it."""
    for name in [name for name in os.environ if name.startswith("PARTI_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    configure_logging("error")


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    """A server with a user for each role of the deployment `orders`."""
    with guarded_server([ORDERS], guarded_config([ORDERS])) as server:
        yield server


@pytest.fixture
async def root(guarded: Server) -> AsyncIterator[JetStreamApi]:
    """Somebody who may do all, on a server where only an empty stream is."""
    connection = await Connection.open(root_settings(guarded.url), name="root")
    api = JetStreamApi(connection)
    await api.ensure_stream({"name": "KEEPER", "subjects": ["keeper"]})
    await make_stream(api, ORDERS)
    yield api
    for name in await api.stream_names():
        if name != "KEEPER":
            await api.call(f"STREAM.DELETE.{name}")
    await connection.close()


@pytest.fixture
def typed(guarded: Server, capsys: pytest.CaptureFixture[str]) -> Type:
    """Type a command as the user of a role; returns exit code, stdout and stderr."""

    async def type_(role: str, *arguments: str, deployment: Deployment = ORDERS) -> tuple[int, str, str]:
        return await typed_as(guarded.url, deployment, role, capsys, *arguments)

    return type_
