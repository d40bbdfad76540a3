"""What a Connection promises, against real servers: who gets in, what is seen of an outage, what a request says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import structlog
from nats.aio.msg import Msg
from tests.integration.certs import Authority, Key, credentials, tenancy
from tests.integration.proxy import proxy_to
from tests.pace import unhindered_s

from parti.config import Settings
from parti.embedded import Cluster, Server
from parti.errors import (
    AuthenticationFailed,
    ConfigError,
    ConnectionFailed,
    NoResponders,
    PermissionDenied,
    RequestTimeout,
)
from parti.jetstream.connection import Connection, ConnectionState

CONNECTED, SUSPENDED, LOST = ConnectionState.CONNECTED, ConnectionState.SUSPENDED, ConnectionState.LOST
SECRET = "s3cret-never-shown"
LOGIN = f'authorization {{ user: ann, password: "{SECRET}" }}'
LIMITED = f"""
authorization {{ users: [
  {{ user: ann, password: "{SECRET}", permissions: {{ publish: {{ deny: ["Closed.>"] }} }} }}
  {{ user: deaf, password: "{SECRET}", permissions: {{ subscribe: {{ deny: ["_INBOX.>"] }} }} }}
] }}
"""


@contextlib.asynccontextmanager
async def connected(url: str, **settings: Any) -> AsyncIterator[Connection]:
    connection = await Connection.open(Settings(nats=(url,), **settings), name="test")
    try:
        yield connection
    finally:
        await connection.close()


class Seen:
    """The state changes of a connection, one after the other."""

    def __init__(self, connection: Connection) -> None:
        self._queue: asyncio.Queue[tuple[ConnectionState, str]] = asyncio.Queue()
        connection.on_state(lambda state, reason: self._queue.put_nowait((state, reason)))

    async def next(self, timeout_s: float = 5.0) -> tuple[ConnectionState, str]:
        return await asyncio.wait_for(self._queue.get(), timeout_s)


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def echo(connection: Connection, subject: str) -> None:
    async def answer(msg: Msg) -> None:
        await connection.publish(msg.reply, msg.data, headers=msg.headers)

    await connection.client.subscribe(subject, cb=answer)
    await connection.flush()


@contextlib.contextmanager
def frozen(server: Server) -> Iterator[None]:
    threads = psutil.Process(server.pid).threads()
    os.kill(server.pid, signal.SIGSTOP)
    try:
        # A thread that runs on another core stops only at its next interrupt.
        while any(psutil.Process(thread.id).status() != psutil.STATUS_STOPPED for thread in threads):
            pass
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


# -- who gets in ------------------------------------------------------------------------------------------------


def with_password(tmp_path: Path, *, right: bool) -> tuple[str, dict[str, Any], list[str]]:
    password = SECRET if right else "wr0ng-never-shown"
    return LOGIN, {"user": "ann", "password": password}, [password]


def with_token(tmp_path: Path, *, right: bool) -> tuple[str, dict[str, Any], list[str]]:
    token = SECRET if right else "wr0ng-never-shown"
    return f'authorization {{ token: "{SECRET}" }}', {"token": token}, [token]


def with_nkey(tmp_path: Path, *, right: bool) -> tuple[str, dict[str, Any], list[str]]:
    known, other = Key("user"), Key("user")
    seed = known.seed if right else other.seed
    path = tmp_path / "user.nk"
    path.write_text(f"{seed}\n")
    return f"authorization {{ users: [ {{ nkey: {known.public} }} ] }}", {"nkey_seed_file": path}, [seed]


def with_credentials(tmp_path: Path, *, right: bool) -> tuple[str, dict[str, Any], list[str]]:
    ours, other = tenancy(), tenancy()
    path = tmp_path / "user.creds"
    path.write_text((ours if right else other).credentials)
    jwt, seed = path.read_text().split("\n")[1], (ours if right else other).user.seed
    return ours.config, {"credentials_file": path}, [jwt, seed]


Way = Callable[..., tuple[str, dict[str, Any], list[str]]]
ways = pytest.mark.parametrize("way", [with_password, with_token, with_nkey, with_credentials])


@ways
async def test_right_credentials_open_a_connection_and_show_no_secret(
    way: Way, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config, settings, secrets = way(tmp_path, right=True)
    with structlog.testing.capture_logs() as logs:
        async with Server(config=config, jetstream=False) as server, connected(server.url, **settings) as connection:
            assert connection.state is CONNECTED
            await echo(connection, "Echo.It")
            reply = await connection.request("Echo.It", b"hello", headers={"A": "b"})
            assert (reply.data, dict(reply.headers), reply.status) == (b"hello", {"A": "b"}, 0)
            shown = f"{connection!r} {connection.client!r} {connection.client.options} {connection.server_info}"
    assert [entry["event"] for entry in logs] == ["connection connected", "connection lost"]
    for text in (shown, str(logs), *capfd.readouterr()):
        assert not [secret for secret in secrets if secret in text]


@ways
async def test_wrong_credentials_are_refused_soon_and_show_no_secret(
    way: Way, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    config, settings, secrets = way(tmp_path, right=False)
    with structlog.testing.capture_logs() as logs:
        async with Server(config=config, jetstream=False) as server:
            began = unhindered_s()
            with pytest.raises(AuthenticationFailed) as refusal:
                await Connection.open(Settings(nats=(server.url,), **settings), name="test")
            assert unhindered_s() - began < 2
    assert server.name not in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not caplog.records
    for text in (str(refusal.value), repr(refusal.value), str(logs), *capfd.readouterr()):
        assert not [secret for secret in secrets if secret in text]


async def test_missing_credentials_are_an_authentication_failure() -> None:
    async with Server(config=LOGIN, jetstream=False) as server:
        with pytest.raises(AuthenticationFailed, match="sent: no credentials"):
            await Connection.open(Settings(nats=(server.url,)), name="test")


async def test_one_refusing_server_among_dead_ones_is_an_authentication_failure() -> None:
    async with Server(config=LOGIN, jetstream=False) as server:
        settings = Settings(nats=(unused_address(), server.url), user="ann", password="wrong")  # type: ignore[arg-type]
        began = unhindered_s()
        with pytest.raises(AuthenticationFailed):
            await Connection.open(settings, name="test")
        assert unhindered_s() - began < 2


async def test_login_inside_the_address_works_and_is_never_shown() -> None:
    async with Server(config=LOGIN, jetstream=False) as server:
        async with connected(f"nats://ann:{SECRET}@127.0.0.1:{server.port}") as connection:
            assert connection.state is CONNECTED
            assert SECRET not in f"{connection!r} {connection.client.servers} {connection.client.options}"
        with pytest.raises(AuthenticationFailed) as refusal:
            await Connection.open(Settings(nats=(f"nats://ann:wr0ng@127.0.0.1:{server.port}",)), name="test")
        assert "wr0ng" not in str(refusal.value)


@pytest.mark.parametrize(
    "text",
    ["", "no key here", "SUAM", credentials("a.b.c", "SUAM"), Key("account").seed],
    ids=["empty", "words", "half a seed", "half a seed inside", "of an account"],
)
@pytest.mark.parametrize("setting", ["nkey_seed_file", "credentials_file"])
async def test_damaged_key_file_is_a_config_error(setting: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"{setting}: {path}"):
        await Connection.open(Settings(**{setting: path}), name="test")  # type: ignore[arg-type]


async def test_key_file_rotated_while_disconnected_is_read_again(tmp_path: Path) -> None:
    config, settings, _ = with_nkey(tmp_path, right=True)
    async with Server(config=config, jetstream=False) as server, connected(server.url, **settings) as connection:
        seen = Seen(connection)
        good = settings["nkey_seed_file"].read_text()
        settings["nkey_seed_file"].write_text("damaged")
        await server.kill()
        assert (await seen.next())[0] is SUSPENDED
        await server.restart()
        await until(lambda: "valid user seed" in connection._last_failure)
        settings["nkey_seed_file"].write_text(good)
        assert (await seen.next())[0] is CONNECTED


# -- TLS --------------------------------------------------------------------------------------------------------


def tls_config(authority: Authority, *hosts: str, verify: bool = False, more: str = "") -> str:
    pair = authority.issue("server", *hosts)
    check = f'ca_file: "{authority.path}", verify: true,' if verify else ""
    return f'tls {{ cert_file: "{pair.cert}", key_file: "{pair.key}", {check} {more} }}'


async def test_tls_with_an_own_authority(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with (
        Server(config=tls_config(authority, "127.0.0.1"), jetstream=False) as server,
        connected(f"tls://127.0.0.1:{server.port}", tls_ca=authority.path) as connection,
    ):
        with pytest.raises(NoResponders):
            await connection.request("nobody")


async def test_tls_handshake_first(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    config = tls_config(authority, "127.0.0.1", more="handshake_first: true")
    async with Server(config=config, jetstream=False) as server:
        async with connected(server.url, tls_ca=authority.path, tls_handshake_first=True) as connection:
            await connection.flush()
        with pytest.raises(ConnectionFailed, match="set tls_handshake_first"):
            await Connection.open(
                Settings(nats=(server.url,), tls_ca=authority.path, connect_timeout_s=0.5), name="test"
            )


async def test_unknown_authority_points_at_tls_ca(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "a"), Authority(tmp_path / "b", "another authority")
    async with Server(config=tls_config(authority, "127.0.0.1"), jetstream=False) as server:
        for settings in ({}, {"tls_ca": other.path}):
            began = unhindered_s()
            with pytest.raises(ConnectionFailed, match=r"TLS: .*set tls_ca to the authority") as failure:
                await Connection.open(Settings(nats=(server.url,), **settings), name="test")  # type: ignore[arg-type]
            assert not isinstance(failure.value, AuthenticationFailed)
            assert unhindered_s() - began < 2


async def test_certificate_for_another_host_points_at_tls_hostname(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with Server(config=tls_config(authority, "nats.example"), jetstream=False) as server:
        with pytest.raises(ConnectionFailed, match=r"TLS: .*mismatch.*set tls_hostname"):
            await Connection.open(Settings(nats=(server.url,), tls_ca=authority.path), name="test")
        async with connected(server.url, tls_ca=authority.path, tls_hostname="nats.example") as connection:
            assert connection.state is CONNECTED


async def test_client_certificate_is_demanded_and_accepted(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "a")
    stranger = Authority(tmp_path / "b", "another authority").issue("stranger")
    client = authority.issue("client")
    async with Server(config=tls_config(authority, "127.0.0.1", verify=True), jetstream=False) as server:
        began = unhindered_s()
        with pytest.raises(ConnectionFailed, match="set tls_cert and tls_key"):
            await Connection.open(Settings(nats=(server.url,), tls_ca=authority.path), name="test")
        assert unhindered_s() - began < 2
        with pytest.raises(ConnectionFailed):
            await Connection.open(
                Settings(
                    nats=(server.url,),
                    tls_ca=authority.path,
                    tls_cert=stranger.cert,
                    tls_key=stranger.key,
                    connect_timeout_s=1,
                ),
                name="test",
            )
        async with connected(
            server.url, tls_ca=authority.path, tls_cert=client.cert, tls_key=client.key
        ) as connection:
            await connection.flush()


async def test_password_is_not_sent_in_clear_when_tls_was_asked_for() -> None:
    heard = bytearray()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"auth_required":true,"version":"2.15.1","max_payload":1024}\r\n')
        heard.extend(await reader.read())
        writer.close()

    async with await asyncio.start_server(listen, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        settings = Settings(nats=(f"tls://127.0.0.1:{port}",), user="ann", password=SECRET)  # type: ignore[arg-type]
        with pytest.raises(ConnectionFailed, match="offers no TLS"):
            await Connection.open(settings, name="test")
    assert heard == b""


# -- outages ----------------------------------------------------------------------------------------------------


def unused_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"nats://127.0.0.1:{probe.getsockname()[1]}"


async def test_unreachable_server_fails_in_bounded_time_with_one_line(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    address = unused_address().replace("//", "//ann:pa55@")
    began, unhindered = time.monotonic(), unhindered_s()
    with (
        structlog.testing.capture_logs() as logs,
        pytest.raises(ConnectionFailed, match=r"within 0\.5 s: .*Errno 111.*check that nats-server runs") as failure,
    ):
        await Connection.open(Settings(nats=(address,), connect_timeout_s=0.5), name="test")
    assert time.monotonic() - began > 0.4
    assert unhindered_s() - unhindered < 1.5
    assert "\n" not in str(failure.value)
    assert "pa55" not in f"{failure.value} {logs}"
    assert {entry["log_level"] for entry in logs} == {"debug"}
    assert (list(capfd.readouterr()), caplog.records) == (["", ""], [])


async def test_frozen_server_fails_opening_in_bounded_time() -> None:
    async with Server(jetstream=False) as server:
        with frozen(server), pytest.raises(ConnectionFailed, match="no answer in time"):
            await Connection.open(Settings(nats=(server.url,), connect_timeout_s=0.5), name="test")


async def test_opening_survives_a_dead_server_in_the_list() -> None:
    async with Server(jetstream=False) as server:
        settings = Settings(nats=(unused_address(), server.url, unused_address()))
        connection = await Connection.open(settings, name="test")
        assert connection.server_version == tuple(int(part) for part in server.version.split("."))
        assert connection.max_payload == connection.server_info["max_payload"] == 1 << 20
        await connection.close()


async def test_opening_survives_a_connection_that_breaks_as_soon_as_it_stands() -> None:
    """The server has answered the first ping, of the handshake, and hangs up at the second."""
    async with Server(jetstream=False) as server, proxy_to(server.port) as proxy:
        pongs = 0

        def breaks(line: bytes) -> bool:
            nonlocal pongs
            pong = line == b"PONG\r\n"
            pongs += pong
            if pong and pongs == 2:
                proxy.cut()
            return pong and pongs == 2

        proxy.lose(breaks)
        async with connected(proxy.url, reconnect_wait_s=0.02) as connection:
            assert proxy.connections == 2
            assert connection.state is CONNECTED

            async def echo(msg: Msg) -> None:
                await msg.respond(msg.data)

            await connection.client.subscribe("echo", cb=echo)
            assert (await connection.request("echo", b"hello")).data == b"hello"


async def test_killed_server_is_seen_as_suspended_and_a_restart_as_connected() -> None:
    async with Server() as server, connected(server.url) as connection:
        seen = Seen(connection)
        await server.kill()
        state, reason = await seen.next()
        assert (state, reason) == (SUSPENDED, "the server closed the connection")
        with pytest.raises(ConnectionFailed):
            await connection.wait_connected(0.1)
        assert connection.server_info["server_name"] == server.name
        await server.restart()
        assert (await seen.next())[0] is CONNECTED
        assert (await connection.request("$JS.API.INFO")).data.startswith(b'{"type"')


async def test_request_waits_for_the_reconnect_within_its_timeout() -> None:
    async with Server() as server, connected(server.url) as connection:
        seen = Seen(connection)
        await server.kill()
        await seen.next()
        request = asyncio.create_task(connection.request("$JS.API.INFO", timeout_s=10))
        await server.restart()
        assert (await request).data


async def test_what_failed_while_disconnected_is_never_sent() -> None:
    async with Server(jetstream=False) as server, connected(server.url) as connection:
        seen, arrived = Seen(connection), asyncio.Queue[str]()

        async def note(msg: Msg) -> None:
            arrived.put_nowait(msg.subject)

        await connection.client.subscribe("orders.>", cb=note)
        await connection.flush()
        await connection.publish("orders.pending", b"")  # Not yet written when the connection breaks.
        await connection.client._process_op_err(OSError("cable cut"))
        with pytest.raises(ConnectionFailed, match="nothing was sent"):
            await connection.publish("orders.published", b"")
        await server.kill()
        with pytest.raises(ConnectionFailed, match="nothing was sent"):
            await connection.request("orders.requested", timeout_s=0.2)
        await server.restart()
        while (await seen.next())[0] is not CONNECTED:
            pass
        await connection.publish("orders.marker", b"")
        assert await asyncio.wait_for(arrived.get(), 5) == "orders.marker"


async def test_request_in_flight_when_the_server_dies_is_unknown_at_once() -> None:
    async with Server(jetstream=False) as server, connected(server.url) as connection:
        arrived = asyncio.Event()

        async def never_answer(_: Msg) -> None:
            arrived.set()

        await connection.client.subscribe("silent", cb=never_answer)
        request = asyncio.create_task(connection.request("silent", timeout_s=30))
        await arrived.wait()
        await server.kill()
        with pytest.raises(RequestTimeout, match="outcome is unknown"):
            await asyncio.wait_for(request, 5)


async def test_frozen_server_is_noticed_and_publishers_are_not_stuck() -> None:
    async with Server(jetstream=False) as server, connected(server.url, ping_interval_s=0.3) as connection:
        seen = Seen(connection)
        await connection.flush()
        with frozen(server):
            began = unhindered_s()

            async def publish_until_refused() -> None:
                while True:
                    await connection.publish("bulk", bytes(512 << 10))

            publisher = asyncio.create_task(publish_until_refused())
            state, reason = await seen.next()
            assert (state, reason) == (SUSPENDED, "the server stopped answering pings")
            assert unhindered_s() - began < 2
            with pytest.raises(ConnectionFailed):
                await asyncio.wait_for(publisher, 10)
        assert (await seen.next(10))[0] is CONNECTED
        await connection.flush()


async def test_pong_after_a_flush_timed_out_does_not_stop_the_reader() -> None:
    async with Server(jetstream=False) as server, connected(server.url) as connection:
        seen = Seen(connection)
        with frozen(server), pytest.raises(RequestTimeout):
            await connection.flush(0.05)
        await connection.flush()
        with pytest.raises(asyncio.TimeoutError):
            await seen.next(0.1)


async def test_failing_reader_is_a_disconnect_and_not_silence(caplog: pytest.LogCaptureFixture) -> None:
    async with Server(jetstream=False) as server, connected(server.url) as connection:
        seen, parser = Seen(connection), connection.client._ps
        parse = parser.parse

        async def fail_once(_: bytes) -> None:
            parser.parse = parse  # type: ignore[method-assign]
            raise RuntimeError("unforeseen")

        parser.parse = fail_once  # type: ignore[method-assign, assignment]
        with contextlib.suppress(RequestTimeout):
            await connection.request("nobody")
        assert await seen.next() == (SUSPENDED, "unforeseen")
        assert (await seen.next())[0] is CONNECTED
        assert not caplog.records


async def test_long_outage_is_lost_and_still_comes_back() -> None:
    async with Server(jetstream=False) as server, connected(server.url, lost_after_s=0.2) as connection:
        seen = Seen(connection)
        await server.kill()
        assert (await seen.next())[0] is SUSPENDED
        state, reason = await seen.next()
        assert state is LOST
        assert "still trying" in reason
        assert not connection.closed
        await server.restart()
        await connection.wait_connected(5)
        assert (await seen.next())[0] is CONNECTED


async def test_revoked_credentials_are_a_reason_and_mended_ones_bring_it_back(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def reload(server: Server, old: str, new: str) -> None:
        conf = server.log_path.parent / "nats-server.conf"
        conf.write_text(conf.read_text().replace(old, new))
        os.kill(server.pid, signal.SIGHUP)

    async with (
        Server(config=LOGIN, jetstream=False) as server,
        connected(server.url, user="ann", password=SECRET, lost_after_s=0.5, reconnect_wait_s=0.02) as connection,
    ):
        seen = Seen(connection)
        reload(server, SECRET, "changed")
        assert (await seen.next())[0] is SUSPENDED
        state, reason = await seen.next()
        assert state is LOST
        assert "refused the credentials" in reason
        assert SECRET not in reason
        assert not connection.closed
        reload(server, "changed", SECRET)
        assert (await seen.next())[0] is CONNECTED
        await connection.flush()
    assert "Traceback" not in capfd.readouterr().err


async def test_expired_credentials_end_the_connection_and_renewed_ones_bring_it_back(tmp_path: Path) -> None:
    tenant, path = tenancy(), tmp_path / "user.creds"
    path.write_text(tenant.credentials_for(seconds=2))
    async with (
        Server(config=tenant.config, jetstream=False) as server,
        connected(server.url, credentials_file=path, reconnect_wait_s=0.02) as connection,
    ):
        seen = Seen(connection)
        state, reason = await seen.next()
        assert (state, reason) == (SUSPENDED, "the server refused the credentials (User Authentication Expired)")
        path.write_text(tenant.credentials)
        assert (await seen.next())[0] is CONNECTED


async def test_server_learned_by_gossip_is_used_when_the_only_known_one_dies() -> None:
    async with Cluster() as cluster:
        first = cluster.servers[0]
        async with connected(first.url) as connection:
            seen = Seen(connection)
            await until(lambda: len(connection.client.discovered_servers) == 2)
            await cluster.kill(0)
            assert (await seen.next())[0] is SUSPENDED
            assert (await seen.next())[0] is CONNECTED
            assert connection.server_info["server_name"] in {node.name for node in cluster.servers[1:]}


# -- requests ---------------------------------------------------------------------------------------------------


async def test_denied_request_is_permission_denied_for_exactly_that_request() -> None:
    async with (
        Server(config=LIMITED, jetstream=False) as server,
        connected(server.url, user="ann", password=SECRET) as connection,
    ):
        await echo(connection, "open")
        began = unhindered_s()
        denied, allowed = await asyncio.gather(
            connection.request("Closed.Door"), connection.request("open", b"x"), return_exceptions=True
        )
        assert unhindered_s() - began < 1
        assert isinstance(denied, PermissionDenied)
        assert (denied.operation, denied.subject) == ("publish to", "Closed.Door")
        assert not isinstance(allowed, BaseException)
        assert allowed.data == b"x"
        assert connection.state is CONNECTED
        assert not connection.permission_errors


async def test_denied_reply_inbox_is_permission_denied() -> None:
    async with (
        Server(config=LIMITED, jetstream=False) as server,
        connected(server.url, user="deaf", password=SECRET) as connection,
    ):
        with pytest.raises(PermissionDenied, match="may not subscribe to '_INBOX"):
            await connection.request("anything")


async def test_denied_publish_is_logged_recorded_and_called_back_before_flush_returns() -> None:
    async with (
        Server(config=LIMITED, jetstream=False) as server,
        connected(server.url, user="ann", password=SECRET) as connection,
    ):
        called: list[PermissionDenied] = []
        remove = connection.on_permission_denied(called.append)
        with structlog.testing.capture_logs() as logs:
            await connection.publish("Closed.Door", b"x")
            await connection.flush()
        assert [denial.subject for denial in called] == ["Closed.Door"]
        assert list(connection.permission_errors) == called
        assert [(entry["event"], entry["log_level"]) for entry in logs] == [("permission denied", "error")]
        remove()
        await connection.publish("Closed.Door", b"x")
        await connection.flush()
        assert (len(called), len(connection.permission_errors)) == (1, 2)


async def test_request_nobody_answers() -> None:
    async with Server(jetstream=False) as server, connected(server.url) as connection:
        with pytest.raises(NoResponders, match="nobody listens on 'nobody'"):
            await connection.request("nobody")
        await connection.client.subscribe("silent")
        with pytest.raises(RequestTimeout, match=r"within 0\.05 s: the outcome is unknown"):
            await connection.request("silent", timeout_s=0.05)


async def test_unsendable_message_is_refused_and_leaves_the_connection_alone() -> None:
    async with (
        Server(config="max_payload: 1024", jetstream=False) as server,
        connected(server.url) as connection,
    ):
        with pytest.raises(ConfigError, match="max_payload of 1024"):
            await connection.publish("a", bytes(1000), headers={"Some-Header": "x" * 50})
        with pytest.raises(ConfigError, match="invalid subject"):
            await connection.publish("a b", b"")
        await connection.flush()
        assert connection.state is CONNECTED


async def test_publishing_fast_waits_for_the_socket_and_loses_nothing() -> None:
    async with Server(jetstream=False) as server, connected(server.url) as connection:
        got = 0
        done = asyncio.Event()

        async def count(_: Msg) -> None:
            nonlocal got
            got += 1
            if got == 400:
                done.set()

        await connection.client.subscribe("bulk", cb=count, pending_bytes_limit=0)
        highest = 0
        for _ in range(400):
            await connection.publish("bulk", bytes(64 << 10))
            highest = max(highest, connection.client.pending_data_size)
        await asyncio.wait_for(done.wait(), 20)
        assert highest < 2 << 20


# -- closing ----------------------------------------------------------------------------------------------------


async def test_close_delivers_what_was_published_and_may_be_repeated() -> None:
    async with Server(jetstream=False) as server, connected(server.url) as listener:
        sub = await listener.client.subscribe("last.words")
        await listener.flush()
        connection = await Connection.open(Settings(nats=(server.url,)), name="test")
        seen = Seen(connection)
        await connection.publish("last.words", b"bye")
        await connection.close()
        await connection.close()
        assert (await sub.next_msg(5)).data == b"bye"
        assert await seen.next() == (LOST, "closed by this process")
        assert connection.closed
        for refused in (
            connection.request("x"),
            connection.publish("x", b""),
            connection.flush(),
            connection.wait_connected(),
        ):
            with pytest.raises(ConnectionFailed, match="closed"):
                await refused


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_close_of_a_dead_connection_is_quick_and_quiet(how: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with Server(config=tls_config(authority, "127.0.0.1"), jetstream=False) as server:
        connection = await Connection.open(Settings(nats=(server.url,), tls_ca=authority.path), name="test")
        with contextlib.ExitStack() as stack:
            if how == "frozen":
                stack.enter_context(frozen(server))
            else:
                seen = Seen(connection)
                await server.kill()
                await seen.next()
            waiting = asyncio.create_task(connection.wait_connected()) if how == "killed" else None
            await asyncio.sleep(0)
            began = unhindered_s()
            await connection.close()
            assert unhindered_s() - began < 4
            if waiting is not None:
                with pytest.raises(ConnectionFailed):
                    await waiting
