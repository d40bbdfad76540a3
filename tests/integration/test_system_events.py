"""What servers say about their clients: who came, who went, why, and how soon."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import SecretStr
from tests.integration.conftest import eventually
from tests.integration.proxy import proxy_to
from tests.pace import unhindered_s

from parti.config import Settings
from parti.embedded import Cluster, Server
from parti.errors import AuthenticationFailed, ConfigError, PermissionDenied
from parti.jetstream.connection import Connection
from parti.jetstream.system_events import SystemEvents, client_ref

CONFIG = """
accounts {
  SYS { users: [
    { user: sys, password: p },
    { user: least, password: p, permissions: {
        publish: ["$SYS.REQ.SERVER.PING"],
        subscribe: ["$SYS.ACCOUNT.*.CONNECT", "$SYS.ACCOUNT.*.DISCONNECT", "_INBOX.>"] } },
    { user: less, password: p, permissions: {
        publish: ["$SYS.REQ.SERVER.PING"], subscribe: ["$SYS.ACCOUNT.*.CONNECT", "_INBOX.>"] } } ] }
  APP { jetstream: enabled, users: [{ user: app, password: p }] }
  ELSE { users: [{ user: else, password: p }] }
}
system_account: SYS
ping_interval: "200ms"
ping_max: 2
"""
AT_ONCE_S = 0.5
"""A killed process is reported within this time; measured 4 to 21 ms."""

CLIENT = """
import asyncio, sys
from parti.config import Settings
from parti.jetstream.connection import Connection
from parti.jetstream.system_events import client_ref

async def main():
    connection = await Connection.open(Settings(nats=(sys.argv[1],), user="app", password="p"), name="client")
    print("ref", client_ref(connection), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@dataclass
class Heard:
    """Every event, in order: "+" or "-", the client, the reason."""

    events: list[tuple[str, str, str]] = field(default_factory=list)

    def connect(self, ref: str) -> None:
        self.events.append(("+", ref, ""))

    def disconnect(self, ref: str, reason: str) -> None:
        self.events.append(("-", ref, reason))

    def came(self, ref: str) -> bool:
        return ("+", ref, "") in self.events

    def why_gone(self, ref: str) -> str:
        return next((reason for kind, who, reason in self.events if (kind, who) == ("-", ref)), "")

    def of(self, *refs: str) -> list[tuple[str, str]]:
        return [(kind, ref) for kind, ref, _ in self.events if ref in refs]


def as_user(url: str, user: str, **options: Any) -> Settings:
    return Settings(nats=(url,), user=user, password=SecretStr("p"), reconnect_wait_s=0.02, **options)


@contextlib.asynccontextmanager
async def listening(url: str, user: str = "sys", **options: Any) -> AsyncIterator[tuple[SystemEvents, Heard]]:
    heard = Heard()
    events = SystemEvents(as_user(url, user), on_connect=heard.connect, on_disconnect=heard.disconnect, **options)
    await events.start()
    try:
        yield events, heard
    finally:
        await events.stop()


@contextlib.asynccontextmanager
async def client(url: str, user: str = "app") -> AsyncIterator[Connection]:
    connection = await Connection.open(as_user(url, user), name="client")
    try:
        yield connection
    finally:
        await connection.close()


@contextlib.asynccontextmanager
async def client_process(url: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A client in a process of its own, and what it says of itself."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, url, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout
        words: list[str] = []
        while words[:1] != ["ref"]:
            line = await process.stdout.readline()
            assert line, "the client ended before it was connected"
            words = line.decode().split()
        yield process, words[1]
    finally:
        if process.returncode is None:
            process.kill()
        # Wait for the end of its output too, or the transport outlives the loop.
        await process.communicate()


@pytest.fixture
def server(nats_server_factory: Callable[..., Server]) -> Server:
    return nats_server_factory(config=CONFIG)


@pytest.mark.parametrize("user", ["sys", "least"])
async def test_a_client_that_comes_and_closes_is_reported(server: Server, user: str) -> None:
    async with listening(server.url, user) as (events, heard):
        assert events.healthy
        async with client(server.url) as connection:
            ref = client_ref(connection)
            server_id, _, client_id = ref.partition("/")
            assert server_id == connection.server_info["server_id"]
            assert client_id.isdigit()
            await eventually(lambda: heard.came(ref))
            assert not heard.why_gone(ref)
        await eventually(lambda: heard.why_gone(ref) == "Client Closed")
    assert not events.healthy


async def test_a_killed_process_is_reported_at_once(server: Server) -> None:
    async with listening(server.url) as (_, heard), client_process(server.url) as (process, ref):
        await eventually(lambda: heard.came(ref))
        killed_s = unhindered_s()
        process.send_signal(signal.SIGKILL)
        await eventually(lambda: heard.why_gone(ref) == "Client Closed")
        assert unhindered_s() - killed_s < AT_ONCE_S


async def test_a_frozen_process_is_reported_when_the_server_has_pinged_it_in_vain(server: Server) -> None:
    async with listening(server.url) as (_, heard), client_process(server.url) as (process, ref):
        await eventually(lambda: heard.came(ref))
        process.send_signal(signal.SIGSTOP)
        await eventually(lambda: heard.why_gone(ref) == "Stale Connection")


async def test_a_reconnect_is_the_end_of_one_client_and_the_beginning_of_another(server: Server) -> None:
    async with (
        listening(server.url) as (_, heard),
        proxy_to(server.port) as proxy,
        client(proxy.url) as connection,
    ):
        before = client_ref(connection)
        proxy.cut()
        await eventually(lambda: client_ref(connection) != before)
        after = client_ref(connection)
        await eventually(lambda: heard.came(after))
        await eventually(lambda: bool(heard.why_gone(before)))
        assert sorted(heard.of(before, after)) == sorted([("+", before), ("-", before), ("+", after)])


async def test_a_restarted_server_is_another_server(server: Server) -> None:
    async with listening(server.url) as (events, heard), client(server.url) as connection:
        before = client_ref(connection)
        await server.kill()
        await server.restart()
        await eventually(lambda: client_ref(connection).split("/")[0] != before.split("/")[0])
        await eventually(lambda: events.healthy)
        assert not heard.why_gone(before), "a server that dies says nothing about its clients"
        async with client(server.url) as newcomer:
            ref = client_ref(newcomer)
        await eventually(lambda: heard.why_gone(ref) == "Client Closed")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(size=3, config=CONFIG) as cluster:
        yield cluster


async def test_clients_of_every_node_of_a_cluster_are_reported(cluster: Cluster) -> None:
    async with listening(cluster.urls[0]) as (_, heard):
        refs = []
        for url in cluster.urls:
            async with client(url) as connection:
                refs.append(client_ref(connection))
        await eventually(lambda: all(heard.came(ref) and heard.why_gone(ref) == "Client Closed" for ref in refs))
        assert len({ref.split("/")[0] for ref in refs}) == 3


async def test_one_account_can_be_listened_to(server: Server) -> None:
    async with listening(server.url, account="APP") as (_, heard):
        async with client(server.url, "else") as stranger, client(server.url, "app") as ours:
            refs = [client_ref(stranger), client_ref(ours)]
        await eventually(lambda: bool(heard.why_gone(refs[1])))
        assert heard.of(refs[0]) == []


async def test_a_callback_that_raises_does_not_end_the_news(server: Server) -> None:
    gone: list[str] = []

    def fail(ref: str) -> None:
        raise RuntimeError("as planned")

    events = SystemEvents(
        as_user(server.url, "sys"), on_connect=fail, on_disconnect=lambda ref, reason: gone.append(ref)
    )
    await events.start()
    for _ in range(2):
        async with client(server.url) as connection:
            ref = client_ref(connection)
        await eventually(lambda who=ref: who in gone)  # type: ignore[misc]
    await events.stop()


@pytest.mark.parametrize(
    ("user", "error"), [("app", ConfigError), ("nobody", AuthenticationFailed), ("less", PermissionDenied)]
)
async def test_credentials_that_would_hear_nothing_are_refused(
    server: Server, user: str, error: type[Exception]
) -> None:
    events = SystemEvents(as_user(server.url, user, connect_timeout_s=3.0), on_connect=print, on_disconnect=print)
    with pytest.raises(error):
        await events.start()
    assert not events.healthy
    await events.stop()
