"""The console's web side: who is let in, with which headers, and what a browser that does not read can do."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.integration.conftest import Kit, eventually
from tests.integration.console.looking import ask, events_of, web_of
from tests.integration.processes import command, environment

from parti.cli.main import main
from parti.config import Settings, load_settings
from parti.console.access import COOKIE, Access, Proxies
from parti.console.hub import Hub
from parti.errors import ConfigError
from parti.jetstream.kv import Bucket

TOKEN = "a-token-that-is-long-enough"
PATHS = ("/", "/static/main.js", "/static/console.css", "/events", "/nothing")

pytestmark = pytest.mark.usefixtures("no_settings_of_this_machine")


@pytest.mark.parametrize("path", PATHS)
async def test_every_answer_carries_the_headers_that_keep_others_out(path: str) -> None:
    async with web_of(Access()) as console:
        answer = await console.ask(path)
    headers = {name.lower(): value for name, value in answer.headers.items()}
    policy = headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == ("no-cache" if path.startswith("/static/") else "no-store")
    assert "server" not in headers


async def test_without_a_token_nothing_of_the_fleet_is_shown() -> None:
    async with web_of(Access(TOKEN)) as console:
        for path in ("/", "/events", "/nothing"):
            answer = await console.ask(path)
            assert answer.status == 401, path
            assert "snapshot" not in answer.body
            assert answer.headers["www-authenticate"] == 'Bearer realm="parti"'
        assert "token" in (await console.ask("/")).body  # the form that asks for it


async def test_a_wrong_token_is_401_and_the_right_one_opens_everything() -> None:
    async with web_of(Access(TOKEN)) as console:
        wrong = await console.ask("/events", headers={"Authorization": f"Bearer {TOKEN[:-1]}"})
        assert wrong.status == 401
        right = {"Authorization": f"Bearer {TOKEN}"}
        assert (await console.ask("/", headers=right)).status == 200
        assert "snapshot" in (await console.ask("/events", headers=right)).body


async def test_the_form_gives_a_cookie_that_no_script_can_read() -> None:
    async with web_of(Access(TOKEN)) as console:
        refused = await console.ask("/login", "POST", body="token=wrong-wrong-wrong-wrong")
        assert refused.status == 401
        assert "That is not the token." in refused.body
        assert "set-cookie" not in refused.headers
        assert (await console.ask("/login", "POST", body="token=" + "x" * 10_000)).status == 401
        taken = await console.ask("/login", "POST", body=f"token={TOKEN}")
        assert taken.status == 303
        cookie = taken.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert TOKEN not in cookie
        pair = cookie.partition(";")[0]
        assert pair.startswith(f"{COOKIE}=")
        assert (await console.ask("/", headers={"Cookie": pair})).status == 200
        assert (await console.ask("/events", headers={"Cookie": f"{pair}x"})).status == 401


LOCAL = Proxies(["127.0.0.0/8"])
ELSEWHERE = Proxies(["10.0.0.0/8"])


@pytest.mark.parametrize(
    ("forwarded", "proxies", "secure"),
    [
        (None, LOCAL, False),
        ("https", LOCAL, True),
        ("HTTPS", LOCAL, True),
        ("https, http", LOCAL, True),
        ("http", LOCAL, False),
        ("http, https", LOCAL, False),
        ("https", ELSEWHERE, False),
        ("https", None, False),
    ],
)
async def test_behind_a_trusted_proxy_that_speaks_tls_the_cookie_is_for_tls_only(
    forwarded: str | None, proxies: Proxies | None, secure: bool
) -> None:
    headers = {"X-Forwarded-Proto": forwarded} if forwarded else {}
    async with web_of(Access(TOKEN), proxies=proxies) as console:
        taken = await console.ask("/login", "POST", body=f"token={TOKEN}", headers=headers)
        assert taken.status == 303
        assert ("Secure" in taken.headers["set-cookie"].split("; ")) is secure


def test_proxies_on_this_machine_are_trusted_unless_others_are_named() -> None:
    assert Settings().console_trusted_proxies == ("127.0.0.0/8", "::1/128")
    assert load_settings({"console_trusted_proxies": "10.0.0.7, fd00::/8"}).console_trusted_proxies == (
        "10.0.0.7/32",
        "fd00::/8",
    )
    with pytest.raises(ConfigError, match=r"console_trusted_proxies.*must be an address or a network, such as"):
        load_settings({"console_trusted_proxies": "proxy.example"})


async def test_with_passwords_the_browser_asks_for_one() -> None:
    async with web_of(Access(passwords={"ada": "correct horse"})) as console:
        asked = await console.ask("/")
        assert asked.status == 401
        assert asked.headers["www-authenticate"].startswith("Basic")
        assert (await console.ask("/", headers={"Authorization": "Basic YWRhOmNvcnJlY3QgaG9yc2U="})).status == 200
        assert (await console.ask("/login", "POST", body="token=")).status == 401  # there is no form then


async def test_a_page_of_somebody_else_cannot_read_a_console_without_secrets() -> None:
    async with web_of(Access()) as console:
        assert (await console.ask("/", headers={"Host": "evil.example"})).status == 421
        assert (await console.ask("/events", headers={"Host": "evil.example:8787"})).status == 421
        assert (await console.ask("/", headers={"Host": "localhost:1"})).status == 200
        assert (await console.ask("/", headers={"Host": "127.0.0.1%evil.example"})).status == 400


async def test_a_host_that_is_none_is_refused_with_a_secret_too() -> None:
    right = {"Authorization": f"Bearer {TOKEN}"}
    async with web_of(Access(TOKEN)) as console:
        assert (await console.ask("/", headers={"Host": "console.example", **right})).status == 200
        for host in ("127.0.0.1%x", "[", "a b", "x/y", "u@h"):
            assert (await console.ask("/", headers={"Host": host, **right})).status == 400, host
            assert (await console.ask("/login", "POST", body=f"token={TOKEN}", headers={"Host": host})).status == 400


async def test_nothing_can_be_changed_through_it() -> None:
    async with web_of(Access()) as console:
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert (await console.ask("/", method)).status == 405


async def test_files_are_sent_once() -> None:
    async with web_of(Access()) as console:
        first = await console.ask("/static/main.js")
        again = await console.ask("/static/main.js", headers={"If-None-Match": first.headers["etag"]})
    assert (first.status, again.status, again.body) == (200, 304, "")
    assert first.headers["content-type"].startswith("text/javascript")


async def test_a_browser_that_does_not_read_is_dropped_and_does_not_slow_others() -> None:
    hub, big = Hub(room=8), b'event: delta\ndata: {"changes": {}, "x": "%b"}\n\n' % (b"x" * 500_000)
    async with web_of(Access(), hub) as console:
        place = urlsplit(console.url)
        with socket.create_connection((place.hostname, place.port)) as deaf:
            deaf.sendall(f"GET /events HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n".encode())
            async with events_of(console) as events:
                await eventually(lambda: len(hub) == 2)
                assert await events.next() in {"", "snapshot"}
                for _ in range(60):
                    hub.publish(big)
                    while await events.next() != "delta":
                        pass
                assert (hub.dropped, len(hub)) == (1, 1)
                assert events.names.count("delta") == 60


async def test_beyond_so_many_browsers_nobody_is_let_in() -> None:
    async with web_of(Access(), Hub(most=1)) as console, events_of(console) as events:
        await events.next()
        assert (await console.ask("/events")).status == 503


# ── the command ───────────────────────────────────────────────────────────────────────────────────────────────────


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["console", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_it_listens_beyond_this_machine_only_with_a_secret(capsys: pytest.CaptureFixture[str], host: str) -> None:
    if host == "::" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    assert "name one with --token-file or --basic-auth-file" in refused(capsys, "--host", host, "--port", "0")


def test_what_cannot_be_used_is_said_in_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("short")
    secret.chmod(0o644)
    assert f"expected 0600; run 'chmod 600 {secret}'" in refused(capsys, "--token-file", str(secret))
    secret.chmod(0o600)
    text = refused(capsys, "--host", "0.0.0.0", "--token-file", str(secret))
    assert "one token of 16 characters or more" in text
    assert "short" not in text
    assert "must be the path of an existing file" in refused(capsys, "--token-file", str(tmp_path / "none"))
    assert "no address of this machine" in refused(capsys, "--host", "no.such.host.invalid")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"console_port={port} cannot be listened on" in refused(capsys, "--port", port)
    assert "less than or equal to 65535" in refused(capsys, "--port", "70000")


def test_without_a_server_or_a_fleet_it_says_so(capsys: pytest.CaptureFixture[str], kit: Kit) -> None:
    assert "bucket 'nowhere' does not exist" in refused(
        capsys, "--port", "0", "--nats", kit.url, "--bucket", "nowhere"
    )


@pytest.fixture
async def bucket(kit: Kit) -> None:
    await Bucket.open(kit.api, f"b{kit.root}", replicas=1)


@pytest.fixture
def console_process(bucket: None, kit: Kit, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """`parti console` with a token, in a process of its own."""
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    place = ("--port", "0", "--nats", kit.url, "--bucket", f"b{kit.root}")
    process = subprocess.Popen(
        command("console", *place, "--token-file", str(tmp_path / "token")),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    yield process
    if process.poll() is None:
        process.kill()
    process.communicate(timeout=10)


async def test_as_a_process_it_says_where_it_is_and_ends_at_once_while_somebody_looks(
    kit: Kit, console_process: subprocess.Popen[str]
) -> None:
    assert console_process.stdout
    line = await asyncio.to_thread(console_process.stdout.readline)
    assert f"console of bucket b{kit.root} on" in line
    url = next(word for word in line.split() if word.startswith("http://"))
    assert (await asyncio.to_thread(ask, url, "/events", "GET")).status == 401
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=1 << 20)
    writer.write(f"GET /events HTTP/1.1\r\nHost: {place.netloc}\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
    await reader.readuntil(b"snapshot")
    console_process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(console_process.wait, 10) == 0
    writer.transport.abort()
    assert TOKEN not in line + console_process.stdout.read()
