"""What the blocking client promises, against real servers: who gets in, and which of three errors a failure is."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.integration.certs import Authority, Key, credentials, tenancy
from tests.integration.streams import Stream
from tests.pace import unhindered_s

from parti.config import Settings
from parti.embedded import Server
from parti.embedded.monitor import ask
from parti.errors import (
    ApiError,
    AuthenticationFailed,
    ConfigError,
    ConnectionFailed,
    JetStreamUnavailable,
    NoResponders,
    PartiError,
    PermissionDenied,
    RequestTimeout,
    StreamNotFound,
)
from parti.jetstream.blocking import BlockingClient
from parti.jetstream.target import Target

SECRET = "s3cret-never-shown"
WRONG = "wr0ng-never-shown"
LOGIN = f'authorization {{ user: ann, password: "{SECRET}" }}'
Start = Callable[..., Server]


def target_of(server: Server | str, **more: Any) -> Target:
    return Target(servers=(server if isinstance(server, str) else server.url,), **more)


def get_in(target: Target) -> None:
    with BlockingClient.open(target, name="test") as client, pytest.raises(NoResponders, match=r"'nobody\.here'"):
        client.request("nobody.here")


def refusal(target: Target, kind: type[PartiError]) -> str:
    with pytest.raises(kind) as error:
        BlockingClient.open(target, name="test")
    assert type(error.value) is kind
    assert "\n" not in str(error.value)
    return str(error.value)


@contextlib.contextmanager
def listening(greet: Callable[[socket.socket], None]) -> Iterator[str]:
    """Something on a port that is no NATS server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ended = threading.Event()

        def serve() -> None:
            while not ended.is_set():
                with contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    with connection:
                        greet(connection)
                        connection.settimeout(5)
                        while connection.recv(4096):
                            pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"nats://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            ended.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)


# ── who gets in ───────────────────────────────────────────────────────────────────────────────────────────────────


def password(tmp_path: Path, patch: pytest.MonkeyPatch, right: bool) -> tuple[str, dict[str, Any]]:
    patch.setenv("SOME_SECRET", SECRET if right else WRONG)
    return LOGIN, {"user": "ann", "password_env": "SOME_SECRET"}


def token(tmp_path: Path, patch: pytest.MonkeyPatch, right: bool) -> tuple[str, dict[str, Any]]:
    patch.setenv("SOME_SECRET", SECRET if right else WRONG)
    return f'authorization {{ token: "{SECRET}" }}', {"token_env": "SOME_SECRET"}


def _nkey(right: bool) -> tuple[str, str]:
    known, other = Key("user"), Key("user")
    return f"authorization {{ users: [ {{ nkey: {known.public} }} ] }}", (known if right else other).seed


def nkey_file(tmp_path: Path, patch: pytest.MonkeyPatch, right: bool) -> tuple[str, dict[str, Any]]:
    config, seed = _nkey(right)
    (tmp_path / "user.nk").write_text(f"{seed}\n")
    return config, {"nkey_seed_file": str(tmp_path / "user.nk")}


def nkey_variable(tmp_path: Path, patch: pytest.MonkeyPatch, right: bool) -> tuple[str, dict[str, Any]]:
    config, seed = _nkey(right)
    patch.setenv("SOME_SECRET", seed)
    return config, {"nkey_seed_env": "SOME_SECRET"}


def credentials_file(tmp_path: Path, patch: pytest.MonkeyPatch, right: bool) -> tuple[str, dict[str, Any]]:
    ours, other = tenancy(), tenancy()
    (tmp_path / "user.creds").write_text((ours if right else other).credentials)
    return ours.config, {"credentials_file": str(tmp_path / "user.creds")}


def credentials_variable(tmp_path: Path, patch: pytest.MonkeyPatch, right: bool) -> tuple[str, dict[str, Any]]:
    ours, other = tenancy(), tenancy()
    patch.setenv("SOME_SECRET", (ours if right else other).credentials)
    return ours.config, {"credentials_env": "SOME_SECRET"}


Way = Callable[[Path, pytest.MonkeyPatch, bool], tuple[str, dict[str, Any]]]
WAYS = [password, token, nkey_file, nkey_variable, credentials_file, credentials_variable]
SENT = ["user and password", "token", "nkey", "nkey", "credentials file", "credentials file"]


@pytest.mark.parametrize("way", WAYS)
def test_right_credentials_get_in(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nats_server_factory: Start
) -> None:
    config, options = way(tmp_path, monkeypatch, True)
    target = target_of(nats_server_factory(config=config, jetstream=False), **options)
    target.check()
    get_in(target)


@pytest.mark.parametrize(("way", "sent"), list(zip(WAYS, SENT, strict=True)))
def test_wrong_credentials_are_refused_at_once_and_not_shown(
    way: Way, sent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nats_server_factory: Start
) -> None:
    config, options = way(tmp_path, monkeypatch, False)
    target = target_of(nats_server_factory(config=config, jetstream=False), **options)
    began_s = unhindered_s()
    text = refusal(target, AuthenticationFailed)
    assert unhindered_s() - began_s < 2
    assert f"refused the connection (sent: {sent})" in text
    hidden = os.environ.get("SOME_SECRET") or next(tmp_path.iterdir()).read_text()
    assert not [line for line in hidden.split("\n") if line and line in text + repr(target)]


def test_no_credentials_where_some_are_needed(nats_server_factory: Start) -> None:
    text = refusal(target_of(nats_server_factory(config=LOGIN, jetstream=False)), AuthenticationFailed)
    assert "sent: no credentials" in text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"user": "ann", "password_env": "NOT_SET"}, "password: the environment variable NOT_SET is not set"),
        ({"token_env": "NOT_SET"}, "token: the environment variable NOT_SET is not set"),
        ({"nkey_seed_env": "NOT_SET"}, "nkey_seed_env: the environment variable NOT_SET is not set"),
        ({"credentials_file": "/no/such"}, "credentials_file: cannot read /no/such: No such file"),
        ({"nkey_seed_file": "/no/such"}, "nkey_seed_file: cannot read /no/such"),
        ({"tls_ca": "/no/such"}, "tls_ca: cannot use /no/such"),
        ({"tls_cert": "/no/such", "tls_key": "/no/such"}, "tls_cert, tls_key: cannot use /no/such"),
    ],
)
def test_missing_files_and_variables(nats_server: Server, options: dict[str, Any], text: str) -> None:
    target = target_of(nats_server, **options)
    assert text in refusal(target, ConfigError)
    with pytest.raises(ConfigError) as error:
        target.check()
    assert text in str(error.value)


@pytest.mark.parametrize("text", ["", "words", "SUAM", credentials("a.b.c", "SUAM")])
@pytest.mark.parametrize("option", ["nkey_seed_file", "credentials_file", "nkey_seed_env", "credentials_env"])
def test_damaged_keys(option: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text(text)
    monkeypatch.setenv("SOME_KEY", text)
    value = "SOME_KEY" if option.endswith("env") else str(tmp_path / "key")
    with pytest.raises(ConfigError, match=rf"^{option}: .*({value}|SOME_KEY)") as error:
        target_of("localhost", **{option: value}).check()
    assert "a.b.c" not in str(error.value)


def test_two_ways_at_once_are_refused(nats_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SECRET", SECRET)
    with pytest.raises(ConfigError, match="user and token are given; expected one way"):
        target_of(nats_server, user="ann", password_env="SOME_SECRET", token_env="SOME_SECRET").check()


@pytest.mark.parametrize(
    "url",
    ["", "nats://", "http://host:1", "nats://host:0", "nats://host:99999", "nats://host:x", "nats://[::1", "  "],
)
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^servers: .*expected nats://host:port"):
        target_of(url).check()


@pytest.mark.parametrize(
    "url", [f"nats://ann:{SECRET}@host:4222", f"{SECRET}@host", f"nats://a:{SECRET}@", f"nats://a:b/{SECRET}@h"]
)
def test_addresses_with_secrets_are_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^servers: ") as error:
        target_of(url).check()
    assert SECRET not in str(error.value)


def test_targets_of_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="PARTI_PASSWORD is not set"):
        Target.of(Settings(nats=("nats://h:1",), user="ann", password=SECRET))  # type: ignore[arg-type]
    monkeypatch.setenv("PARTI_PASSWORD", SECRET)
    Path("ca.pem").touch()
    target = Target.of(Settings(nats=("nats://h:1",), user="ann", tls_ca=Path("ca.pem")))
    assert (target.servers, target.user, target.password_env) == (("nats://h:1",), "ann", "PARTI_PASSWORD")
    assert target.tls_ca == str(tmp_path / "ca.pem")
    assert SECRET not in repr(target)


# ── TLS ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def tls_config(authority: Authority, *hosts: str, more: str = "") -> str:
    pair = authority.issue("server", *hosts)
    return f'tls {{ cert_file: "{pair.cert}", key_file: "{pair.key}", {more} }}'


def test_tls_with_an_own_authority_and_a_client_certificate(tmp_path: Path, nats_server_factory: Start) -> None:
    authority = Authority(tmp_path)
    verify = f'ca_file: "{authority.path}", verify: true'
    server = nats_server_factory(config=tls_config(authority, "127.0.0.1", more=verify), jetstream=False)
    pair = authority.issue("client")
    plain = target_of(server, tls_ca=str(authority.path), connect_timeout_s=0.5)
    get_in(replace(plain, tls_cert=str(pair.cert), tls_key=str(pair.key)))
    assert "could not connect within 0.5 s" in refusal(plain, ConnectionFailed)


def test_tls_large_answers(tmp_path: Path, nats_server_factory: Start, stream_name: str) -> None:
    authority = Authority(tmp_path)
    server = nats_server_factory(config=tls_config(authority, "127.0.0.1"))
    stream = Stream(target_of(server, tls_ca=str(authority.path)), stream_name)
    stream.create()
    stream.fill(20, size=500_000)
    assert [len(payload) for payload in stream.read().payloads] == [500_001] * 10 + [500_002] * 10


def test_tls_handshake_first(tmp_path: Path, nats_server_factory: Start) -> None:
    authority = Authority(tmp_path)
    config = tls_config(authority, "127.0.0.1", more="handshake_first: true")
    server = nats_server_factory(config=config, jetstream=False)
    target = target_of(server, tls_ca=str(authority.path), tls_handshake_first=True, connect_timeout_s=0.5)
    get_in(replace(target, connect_timeout_s=10))
    assert "whether it wants the TLS handshake first" in refusal(
        replace(target, tls_handshake_first=False), ConnectionFailed
    )


def test_tls_of_another_authority_or_host_is_refused_soon(tmp_path: Path, nats_server_factory: Start) -> None:
    authority, other = Authority(tmp_path / "a"), Authority(tmp_path / "b", "another authority")
    server = nats_server_factory(config=tls_config(authority, "nats.example"), jetstream=False)
    began_s = unhindered_s()
    assert "TLS: " in refusal(target_of(server, tls_ca=str(other.path)), ConnectionFailed)
    text = refusal(target_of(server, tls_ca=str(authority.path)), ConnectionFailed)
    assert "TLS: " in text
    assert "host name" in text
    assert unhindered_s() - began_s < 3
    get_in(target_of(server, tls_ca=str(authority.path), tls_hostname="nats.example"))


def test_nothing_is_sent_in_clear_where_tls_is_wanted(
    tmp_path: Path, nats_server_factory: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_SECRET", SECRET)
    heard: list[bytes] = []

    def greet(connection: socket.socket) -> None:
        connection.sendall(b'INFO {"server_id":"x","headers":true}\r\n')
        connection.settimeout(0.5)
        with contextlib.suppress(OSError):
            heard.append(connection.recv(4096))

    with listening(greet) as url:
        target = target_of(
            url.replace("nats:", "tls:"), user="ann", password_env="SOME_SECRET", connect_timeout_s=0.3
        )
        assert "the server offers no TLS" in refusal(target, ConnectionFailed)
    assert SECRET.encode() not in b"".join(heard)


# ── who is not there ──────────────────────────────────────────────────────────────────────────────────────────────


def test_unreachable_servers_are_told_one_by_one_in_bounded_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    target = Target(servers=(f"nats://127.0.0.1:{port}", "nats://no-such-host.invalid:1"), connect_timeout_s=1.0)
    began_s = unhindered_s()
    text = refusal(target, ConnectionFailed)
    assert unhindered_s() - began_s < 4
    assert f"nats://127.0.0.1:{port}: Connection refused" in text
    assert "nats://no-such-host.invalid:1: " in text
    assert "could not connect within 1 s" in text


def test_the_second_server_is_taken_when_the_first_is_not_there(nats_server: Server) -> None:
    get_in(Target(servers=("nats://127.0.0.1:1", nats_server.url)))


def test_a_server_that_comes_up_meanwhile_is_taken(nats_server_factory: Start) -> None:
    server = nats_server_factory(jetstream=False)
    url = server.url
    server.kill_sync()
    back = threading.Timer(0.5, server.restart_sync)
    back.start()
    try:
        get_in(Target(servers=(url,)))
    finally:
        back.join()


@pytest.mark.parametrize(
    ("greeting", "text"),
    [
        (b"SSH-2.0-OpenSSH_9.0\r\n", "this is no NATS server"),
        (b"220 mail.example ESMTP\n", "this is no NATS server"),
        (b"INFO nonsense\r\n", "this is no NATS server"),
        (b"INFO [1]\r\n", "this is no NATS server"),
        (b"", "it says nothing"),
    ],
)
def test_something_else_listens_there(greeting: bytes, text: str) -> None:
    with listening(lambda connection: connection.sendall(greeting)) as url:
        began_s = unhindered_s()
        assert text in refusal(target_of(url, connect_timeout_s=0.5), ConnectionFailed)
        assert unhindered_s() - began_s < 3


def test_a_greeting_without_end_is_given_up() -> None:
    def greet(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection.sendall(b"INFO " + b"x" * 100)
                time.sleep(0.05)

    with listening(greet) as url:
        began_s = unhindered_s()
        assert "no NATS server" in refusal(target_of(url, connect_timeout_s=0.5), ConnectionFailed)
        assert unhindered_s() - began_s < 3


# ── answers ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def client(nats_server: Server) -> Iterator[BlockingClient]:
    with BlockingClient.open(target_of(nats_server), name="test") as one:
        yield one


def test_no_and_unknown_are_different_answers(client: BlockingClient) -> None:
    with pytest.raises(NoResponders):
        client.request("nobody")
    sid = client.subscribe("deaf")
    began_s = unhindered_s()
    with pytest.raises(RequestTimeout, match=r"within 0\.2 s; the outcome is unknown"):
        client.request("deaf", timeout_s=0.2)
    assert unhindered_s() - began_s < 2
    client.unsubscribe(sid)
    with pytest.raises(StreamNotFound, match=r"stream 'no-such' does not exist on .*; create it or check the name"):
        client.stream_info("no-such")
    with pytest.raises(ApiError):
        client.api("STREAM.CREATE.x", {"name": "y"})


def test_late_answers_are_not_taken_for_others(client: BlockingClient, nats_server: Server) -> None:
    with BlockingClient.open(target_of(nats_server), name="service") as service:
        service.subscribe("late.service")
        with pytest.raises(NoResponders):
            service.request("nobody")  # The subscription is in place.
        with pytest.raises(RequestTimeout):
            client.request("late.service", b"one", timeout_s=0.1)
        first = service.next_delivery(5)
        assert first is not None
        service.publish(first.reply, b"answer to one")
        answers: list[bytes] = []
        asking = threading.Thread(target=lambda: answers.append(client.request("late.service", b"two").data))
        asking.start()
        second = service.next_delivery(5)
        assert second is not None
        assert second.data == b"two"
        service.publish(second.reply, b"answer to two")
        asking.join(10)
    assert answers == [b"answer to two"]


def test_requests_carry_payload_and_headers(client: BlockingClient, nats_server: Server) -> None:
    with BlockingClient.open(target_of(nats_server), name="service") as service:
        service.subscribe("echo.service")
        with pytest.raises(NoResponders):
            service.request("nobody")

        def serve() -> None:
            asked = service.next_delivery(5)
            assert asked is not None
            assert asked.header is not None
            service.publish(asked.reply, asked.header + asked.data, headers={"B": "2"})

        serving = threading.Thread(target=serve)
        serving.start()
        answer = client.request("echo.service", b"MSG x 1 1\r\n", headers={"A": "1"})
        serving.join(10)
    assert answer.data == b"NATS/1.0\r\nA: 1\r\n\r\nMSG x 1 1\r\n"
    assert answer.header == b"NATS/1.0\r\nB: 2\r\n\r\n"


def test_answers_larger_than_what_is_read_at_once(nats_server: Server, stream_name: str) -> None:
    stream = Stream(target_of(nats_server), stream_name)
    stream.create()
    stream.fill(80_000, subjects=("a", "b"))
    stream.purge(filter=f"{stream.root}.a")
    with stream.client() as client:
        details = client.stream_info(stream.name, deleted_details=True)
    stream.remove()
    assert len(json.dumps(details)) > 260_000
    # The first message is no hole but before the beginning.
    assert details["state"]["deleted"] == list(range(3, 80_000, 2))


def test_permission_denied_is_told_at_once(nats_server_factory: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SECRET", SECRET)
    config = f"""authorization {{ users: [
      {{ user: mute, password: "{SECRET}", permissions: {{ publish: {{ deny: ["Closed.>", "$JS.API.>"] }} }} }}
      {{ user: deaf, password: "{SECRET}", permissions: {{ subscribe: {{ deny: ["_INBOX.>"] }} }} }} ] }}"""
    server = nats_server_factory(config=config)
    began_s = unhindered_s()
    mute = target_of(server, user="mute", password_env="SOME_SECRET")
    with BlockingClient.open(mute, name="test") as client:
        with pytest.raises(PermissionDenied, match=r"may not publish to 'Closed\.Door'") as error:
            client.request("Closed.Door")
        assert error.value.subject == "Closed.Door"
        with pytest.raises(PermissionDenied, match=r"publish to '\$JS.API.STREAM.INFO.X'"):
            client.stream_info("X")
        with pytest.raises(NoResponders):
            client.request("open")
    deaf = target_of(server, user="deaf", password_env="SOME_SECRET")
    with BlockingClient.open(deaf, name="test") as client:
        for _ in range(2):
            with pytest.raises(PermissionDenied, match="subscribe on '_INBOX"):
                client.request("anything")
    assert unhindered_s() - began_s < 3


def test_jetstream_is_off(nats_server_factory: Start) -> None:
    server = nats_server_factory(jetstream=False)
    with (
        BlockingClient.open(target_of(server), name="test") as client,
        pytest.raises(JetStreamUnavailable, match="enable it on the server"),
    ):
        client.stream_info("X")


def test_jetstream_is_off_for_the_account(nats_server_factory: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SECRET", SECRET)
    config = f"""accounts {{
      WITH {{ jetstream: enabled, users: [ {{ user: ann, password: "{SECRET}" }} ] }}
      WITHOUT {{ users: [ {{ user: bob, password: "{SECRET}" }} ] }} }}"""
    server = nats_server_factory(config=config)
    bob = target_of(server, user="bob", password_env="SOME_SECRET")
    with BlockingClient.open(bob, name="test") as client, pytest.raises(JetStreamUnavailable):
        client.stream_info("X")


def test_server_killed_while_it_is_asked(nats_server_factory: Start) -> None:
    server = nats_server_factory(jetstream=False)
    with BlockingClient.open(target_of(server), name="test") as client:
        client.subscribe("deaf")
        os.kill(server.pid, signal.SIGSTOP)
        killing = threading.Timer(0.3, server.kill_sync)
        killing.start()
        began_s = unhindered_s()
        with pytest.raises(ConnectionFailed):
            client.request("deaf", timeout_s=20)
        assert unhindered_s() - began_s < 10
        killing.join()
        with pytest.raises(ConnectionFailed):
            client.request("deaf")


def test_pings_are_answered_while_waiting(nats_server_factory: Start) -> None:
    server = nats_server_factory(config='ping_interval: "200ms"\nping_max: 2', jetstream=False)
    with BlockingClient.open(target_of(server), name="test") as client:
        client.subscribe("deaf")
        with pytest.raises(RequestTimeout):
            client.request("deaf", timeout_s=1.5)
        with pytest.raises(NoResponders):
            client.request("nobody")
    varz = ask(server.monitor_port, "/varz") or {}
    assert varz["stale_connections"] == 0
