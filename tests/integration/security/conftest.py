"""One guarded server for each module of these tests, and somebody at its terminal."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.security.guarded import (
    Deployment,
    accounts_config,
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
ORDERS, APART = Deployment("orders"), Deployment("orders", apart=True)


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test sees variables or files of whoever runs it."""
    for name in [name for name in os.environ if name.startswith("PARTI_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    configure_logging("error")


@pytest.fixture(scope="module", params=[ORDERS, APART], ids=["one-account", "accounts"])
def deployment(request: pytest.FixtureRequest) -> Deployment:
    """The deployment `orders`, in both layouts that `parti perms` prints."""
    assert isinstance(request.param, Deployment)
    return request.param


@pytest.fixture(scope="module")
def guarded(deployment: Deployment) -> Iterator[Server]:
    """A server with a user for each role of the deployment."""
    config = accounts_config(deployment) if deployment.apart else guarded_config([deployment])
    with guarded_server([deployment], config) as server:
        yield server


@pytest.fixture
async def root(guarded: Server, deployment: Deployment) -> AsyncIterator[JetStreamApi]:
    """Somebody who may do all, on a server where only an empty stream is.

    With accounts nobody but members and people who may do all can make streams: dead letters are sent back with one.
    """
    connection = await Connection.open(root_settings(guarded.url), name="root")
    api = JetStreamApi(connection)
    await api.ensure_stream({"name": "KEEPER", "subjects": ["keeper"]})
    await make_stream(api, deployment)
    yield api
    for name in await api.stream_names():
        if name != "KEEPER":
            await api.call(f"STREAM.DELETE.{name}")
    await connection.close()


@pytest.fixture
def typed(guarded: Server, deployment: Deployment, capsys: pytest.CaptureFixture[str]) -> Type:
    """Type a command as the user of a role; returns exit code, stdout and stderr."""

    async def type_(role: str, *arguments: str) -> tuple[int, str, str]:
        return await typed_as(guarded.url, deployment, role, capsys, *arguments)

    return type_
