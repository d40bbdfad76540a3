"""Connections that ask for nothing, slowly, or do not read: they end, and others do not notice them."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import resource
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.integration.conftest import Kit, eventually
from tests.integration.console.looking import Console, ask, web_of
from tests.integration.processes import command, environment
from tests.pace import unhindered_s

from parti.console.access import Access
from parti.console.connections import Limits
from parti.console.hub import Hub
from parti.jetstream.kv import Bucket
from parti.telemetry.logs import configure_logging

pytestmark = pytest.mark.usefixtures("no_settings_of_this_machine")

ANSWER_S = 1.0
FEW_FILES = 128
HALF_OPEN = 115
MOST_LOG = 20_000


def connect(url: str, sent: bytes = b"", receive_buffer: int = 0) -> socket.socket:
    place = urlsplit(url)
    made = socket.socket()
    if receive_buffer:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    made.settimeout(30)
    made.connect((place.hostname, place.port))
    made.sendall(sent)
    return made


def ended(connection: socket.socket) -> bool:
    """Read to the end of a connection; False when it does not come."""
    try:
        while connection.recv(65_536):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


async def has_ended(connection: socket.socket) -> bool:
    return await asyncio.to_thread(ended, connection)


# ── a process with few files ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def bucket(kit: Kit) -> None:
    await Bucket.open(kit.api, f"b{kit.root}", replicas=1)


@pytest.fixture
def small_console(bucket: None, kit: Kit, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """`parti console` in a process that may open few files: its address, and the file that it logs to."""
    log = tmp_path / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            command("console", "--port", "0", "--nats", kit.url, "--bucket", f"b{kit.root}"),
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (FEW_FILES, FEW_FILES))  # long before it listens
    try:
        assert process.stdout
        line = process.stdout.readline()
        yield next(word for word in line.split() if word.startswith("http://")), log
    finally:
        process.terminate()
        process.communicate(timeout=20)


async def test_half_open_connections_keep_nobody_out_and_are_closed(small_console: tuple[str, Path]) -> None:
    url, log = small_console
    with contextlib.ExitStack() as opened:
        silent = [opened.enter_context(contextlib.closing(connect(url))) for _ in range(HALF_OPEN)]
        for path in ("/", "/static/main.js", "/", "/"):
            began_s = unhindered_s()
            assert (await asyncio.to_thread(ask, url, path, "GET")).status == 200
            assert unhindered_s() - began_s < ANSWER_S
        assert all([await has_ended(each) for each in silent])
    assert log.stat().st_size < MOST_LOG


# ── each kind, in this process ────────────────────────────────────────────────────────────────────────────────────


async def trickle(connection: socket.socket, text: bytes) -> None:
    """Send the same byte again and again until the other end has enough."""
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    with contextlib.suppress(ConnectionError):
        while True:
            await loop.sock_sendall(connection, text)
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("first", "more"),
    [
        (b"", b""),
        (b"G", b""),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ", b"x"),
        (b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\ntoken=", b"x"),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n", b"x"),
        (b"POST /login HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\nPOST /login HTTP/1.1\r\nHost: localhost\r\n", b""),
        (
            b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
            b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n",
            b"",
        ),
    ],
    ids=["silent", "one byte", "header", "body", "body that nobody reads", "chunks", "second header", "second body"],
)
async def test_a_request_that_is_not_complete_in_time_is_given_up(first: bytes, more: bytes) -> None:
    limits = Limits(request_s=0.3)
    async with web_of(Access("a-token-that-is-long-enough"), limits=limits) as console:
        with contextlib.closing(connect(console.url, first)) as slow:
            if more:
                await asyncio.wait_for(trickle(slow, more), 10)
            else:
                assert await has_ended(slow)


async def test_a_request_in_time_is_answered_on_a_connection_that_is_kept() -> None:
    async with web_of(Access(), limits=Limits(request_s=0.3)) as console:
        kept = http.client.HTTPConnection(urlsplit(console.url).netloc, timeout=10)
        kept.auto_open = False

        def ask_again() -> int:
            kept.request("GET", "/")
            answer = kept.getresponse()
            answer.read()
            return answer.status

        with contextlib.closing(kept):
            await asyncio.to_thread(kept.connect)
            for _ in range(3):
                assert await asyncio.to_thread(ask_again) == 200
                await asyncio.sleep(0.4)  # longer than a request may take, shorter than a connection may rest


async def test_an_event_stream_outlives_the_time_of_a_request() -> None:
    hub = Hub()
    async with web_of(Access(), hub, limits=Limits(request_s=0.1)) as console:
        with contextlib.closing(connect(console.url, b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")) as looking:
            await eventually(lambda: len(hub) == 1)
            await asyncio.sleep(0.3)
            hub.publish(b"event: late\n\n")
            found = b""
            while b"event: late" not in found:
                found += await asyncio.to_thread(looking.recv, 65_536)


async def test_the_oldest_idle_connection_makes_room_for_a_new_one() -> None:
    hub = Hub()
    async with web_of(Access(), hub, limits=Limits(connections=4)) as console:
        with contextlib.ExitStack() as opened:

            def open_one(sent: bytes = b"") -> socket.socket:
                return opened.enter_context(contextlib.closing(connect(console.url, sent)))

            stream = open_one(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await eventually(lambda: len(hub) == 1)
            oldest, *_ = [open_one() for _ in range(3)]
            assert (await console.ask("/")).status == 200
            oldest.settimeout(5)
            assert await has_ended(oldest)
            assert len(hub) == 1
            hub.publish(b"event: still\n\n")
            found = b""
            while b"event: still" not in found:
                found += await asyncio.to_thread(stream.recv, 65_536)


FORM = b"POST /login HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"


@pytest.mark.parametrize(
    ("token", "sent", "status"),
    [
        ("a-token-that-is-long-enough", FORM + b"Content-Length: 100\r\n\r\n", 401),
        ("a-token-that-is-long-enough", FORM + b"Transfer-Encoding: chunked\r\n\r\n", 401),
        ("", b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),
    ],
    ids=["half a form", "chunks of a form", "answers that nobody reads"],
)
async def test_those_that_keep_the_console_waiting_keep_nobody_out(token: str, sent: bytes, status: int) -> None:
    limits = Limits(connections=4, request_s=60.0, answer_s=60.0)
    async with web_of(Access(token), limits=limits, snapshot=b'"%b"' % (b"x" * 20_000_000)) as console:
        with contextlib.ExitStack() as opened:
            for _ in range(3 * limits.connections):
                waiting = connect(console.url, sent, receive_buffer=4096)
                opened.enter_context(contextlib.closing(waiting))
                assert (await asyncio.to_thread(waiting.recv, 8)).startswith(b"HTTP/1.1")
            for _ in range(2):
                assert (await console.ask("/static/main.js")).status == 200
                assert (await console.ask("/")).status == status


async def test_without_an_idle_connection_a_new_one_is_refused_in_a_line() -> None:
    hub = Hub()
    async with web_of(Access(), hub, limits=Limits(connections=2)) as console:
        with contextlib.ExitStack() as opened:
            for number in (1, 2):
                asked = connect(console.url, b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
                opened.enter_context(contextlib.closing(asked))
                await eventually(lambda number=number: len(hub) == number)  # type: ignore[misc]
            refused = opened.enter_context(contextlib.closing(connect(console.url)))
            answer = await asyncio.to_thread(refused.recv, 65_536)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert answer.endswith(b"\r\n\r\ntoo many connections to this console; wait\n")


async def read_slowly(console: Console, path: str) -> None:
    """Ask, and take so little of the answer that it would need hours, until the console has had enough."""
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    with contextlib.closing(connect(console.url, request, receive_buffer=4096)) as slow:
        slow.setblocking(False)
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):
            while await loop.sock_recv(slow, 256):  # noqa: ASYNC110 - slowness is what this is about
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("path", ["/", "/events"])
async def test_an_answer_that_is_read_too_slowly_is_given_up(path: str) -> None:
    hub = Hub()
    async with web_of(Access(), hub, limits=Limits(answer_s=0.3), snapshot=b'"%b"' % (b"x" * 20_000_000)) as console:
        await asyncio.wait_for(read_slowly(console, path), 30)
        await eventually(lambda: len(hub) == 0)
        assert (await console.ask("/static/main.js")).status == 200


async def test_bad_requests_do_not_fill_the_log() -> None:
    log = io.StringIO()
    configure_logging("info", "json", stream=log)
    async with web_of(Access("a-token-that-is-long-enough")) as console:
        for _ in range(50):
            with contextlib.closing(connect(console.url, b"\x00\x01\x02 nonsense\r\n\r\n")) as bad:
                assert await has_ended(bad)
            assert (await console.ask("/", headers={"Authorization": "Bearer wrong"})).status == 401
            assert (await console.ask("/login", "POST", body="token=wrong")).status == 401
            form = b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\ntoken="
            connect(console.url, form).close()
        await eventually(lambda: "a browser left in the middle of a form" in log.getvalue())
    lines = log.getvalue().splitlines()
    for text in ("Invalid HTTP request", "a wrong secret was given", "a wrong token was given"):
        assert 1 <= sum(text in line for line in lines) <= 3, text
    assert len(lines) < 15
