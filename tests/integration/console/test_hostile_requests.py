"""Requests that no browser sends: each gets an answer that is no 500, soon, and the console goes on."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from urllib.parse import quote_from_bytes

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.integration.conftest import Kit
from tests.integration.console.looking import Console, console_of, web_of
from tests.trials import examples_of

from parti.console.access import COOKIE, Access
from parti.console.connections import Limits
from parti.jetstream.kv import Bucket

pytestmark = pytest.mark.usefixtures("no_settings_of_this_machine")

TOKEN = "a-token-that-is-long-enough"
HOST = b"Host: localhost\r\n"
HEAD = b"GET / HTTP/1.1\r\n" + HOST

REQUESTS: dict[str, bytes] = {
    "NUL in the path": b"GET /static/%00 HTTP/1.1\r\n" + HOST + b"\r\n",
    "NUL in a file": b"GET /static/main.js%00.css HTTP/1.1\r\n" + HOST + b"\r\n",
    "raw NUL": b"GET /\x00 HTTP/1.1\r\n" + HOST + b"\r\n",
    "path up": b"GET /static/..%2f..%2fweb.py HTTP/1.1\r\n" + HOST + b"\r\n",
    "path up, twice encoded": b"GET /static/%252e%252e%252fweb.py HTTP/1.1\r\n" + HOST + b"\r\n",
    "invalid UTF-8 in the path": b"GET /static/%ff%fe%ed%a0%80 HTTP/1.1\r\n" + HOST + b"\r\n",
    "raw bytes in the path": b"GET /\xff\xfe HTTP/1.1\r\n" + HOST + b"\r\n",
    "half an escape": b"GET /static/% HTTP/1.1\r\n" + HOST + b"\r\n",
    "another host in the path": b"GET //evil.example/ HTTP/1.1\r\n" + HOST + b"\r\n",
    "a whole address": b"GET http://evil.example/ HTTP/1.1\r\n" + HOST + b"\r\n",
    "an open bracket": b"GET //[ HTTP/1.1\r\n" + HOST + b"\r\n",
    "a long path": b"GET /" + b"x" * 15_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    "a longer path": b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    "NUL in a parameter": b"GET /events?from=%00 HTTP/1.1\r\n" + HOST + b"\r\n",
    "invalid UTF-8 in a parameter": b"GET /events?from=%ff%ed%a0%80 HTTP/1.1\r\n" + HOST + b"\r\n",
    "many parameters": b"GET /events?" + b"from=1&" * 2000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    "a huge number": b"GET /events?from=" + b"9" * 5000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    "a bad last event": b"GET /events HTTP/1.1\r\n" + HOST + b"Last-Event-ID: \xff-\xb2\r\n\r\n",
    "many headers": HEAD + b"".join(b"X-%d: y\r\n" % n for n in range(1000)) + b"\r\n",
    "very many headers": HEAD + b"".join(b"X-%d: y\r\n" % n for n in range(50_000)) + b"\r\n",
    "a long header": HEAD + b"X: " + b"y" * 300_000 + b"\r\n\r\n",
    "a header without end": HEAD + b"X: " + b"y" * 300_000,
    "two hosts": b"GET / HTTP/1.1\r\n" + HOST + HOST + b"\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "no host, old": b"GET / HTTP/1.0\r\n\r\n",
    "HTTP 2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP 9": b"GET / HTTP/9.9\r\n" + HOST + b"\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500,
    "an upgrade": HEAD + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n\r\n",
    "a bad cookie": HEAD + b"Cookie: " + COOKIE.encode() + b'="' + b"\\" * 8000 + b"\r\n\r\n",
    "many cookies": HEAD + b"Cookie: " + (COOKIE.encode() + b"=x;") * 900 + b"\r\n\r\n",
    "a bad authorization": HEAD + b"Authorization: Basic " + base64.b64encode(b"\xff\x00:\xff") + b"\r\n\r\n",
    "raw bytes in a header": HEAD + b"Authorization: Bearer \xff\xfe\r\n\r\n",
    "a body that is no form": b"POST /login HTTP/1.1\r\n" + HOST + b"Content-Length: 4\r\n\r\n\xff\xfe\x00&",
    "a form with many fields": b"POST /login HTTP/1.1\r\n" + HOST + b"Content-Length: 400\r\n\r\n" + b"a=b&" * 100,
    "a large body": b"POST /login HTTP/1.1\r\n" + HOST + b"Content-Length: 3000000\r\n\r\n" + b"x" * 3_000_000,
    "a body that nobody wants": b"GET / HTTP/1.1\r\n" + HOST + b"Content-Length: 1000000\r\n\r\n" + b"x" * 1_000_000,
    "a negative length": b"POST /login HTTP/1.1\r\n" + HOST + b"Content-Length: -1\r\n\r\n",
    "a huge length": b"POST /login HTTP/1.1\r\n" + HOST + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n",
    "two lengths": b"POST /login HTTP/1.1\r\n" + HOST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
    "a bad chunk": b"POST /login HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "an unknown method": b"FROBNICATE /events HTTP/1.1\r\n" + HOST + b"\r\n",
    "events by POST": b"POST /events HTTP/1.1\r\n" + HOST + b"Content-Length: 0\r\n\r\n",
    "events by HEAD": b"HEAD /events HTTP/1.1\r\n" + HOST + b"\r\n",
    "nothing but lines": b"\r\n" * 50_000,
}


async def status_of(console: Console, request: bytes) -> int:
    """Send bytes and return the status of the first answer; 0: the connection was closed without one."""
    place = console.url.removeprefix("http://").rstrip("/")
    host, _, port = place.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(20):
            writer.write(request)
            with contextlib.suppress(ConnectionError):
                line = await reader.readline()
                return int(line.split()[1]) if line else 0
        return 0
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("access", [Access(), Access(TOKEN, {"ada": "correct horse"})], ids=["open", "secret"])
async def test_what_no_browser_sends_is_answered_and_is_no_500(access: Access) -> None:
    async with web_of(access, limits=Limits(request_s=2.0)) as console:
        for name, request in REQUESTS.items():
            status = await status_of(console, request)
            assert status == 0 or 200 <= status < 500, (name, status)
        answer = await console.ask("/", headers={"Authorization": f"Bearer {TOKEN}"})
        assert answer.status == 200


async def test_no_place_in_the_events_breaks_a_console(kit: Kit) -> None:
    await Bucket.open(kit.api, f"b{kit.root}", replicas=1)
    async with console_of(kit) as console:
        page = (await console.ask("/")).body
        _, _, rest = page.partition('"at":"')
        run = rest.partition("-")[0].encode()
        assert run
        for number in (b"9" * 5000, b"-1", b"0", b"1e9", b"\xd9\xa1", b"\xb2", b"", b"0-0"):
            place = run + b"-" + number
            status = await status_of(
                console, b"GET /events?from=" + quote_from_bytes(place).encode() + b" HTTP/1.1\r\n" + HOST + b"\r\n"
            )
            assert status == 200, place
            status = await status_of(
                console, b"GET /events HTTP/1.1\r\n" + HOST + b"Last-Event-ID: " + place + b"\r\n\r\n"
            )
            assert status == 200, place


PIECES = st.one_of(
    st.binary(max_size=40).map(lambda raw: quote_from_bytes(raw).encode()),
    st.sampled_from([b"/", b"events", b"static", b"login", b"from=", b"?", b"&", b"%", b"%00", b"..", b"9" * 5000]),
)


@settings(max_examples=examples_of(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    method=st.sampled_from([b"GET", b"HEAD", b"POST", b"PUT", b"OPTIONS"]),
    path=st.lists(PIECES, max_size=8).map(b"".join),
    headers=st.lists(
        st.tuples(
            st.sampled_from([b"Authorization", b"Cookie", b"Last-Event-ID", b"If-None-Match", b"X-Forwarded-Proto"]),
            st.binary(max_size=60).map(lambda raw: raw.translate(None, bytes(range(32)) + b"\x7f")),
        ),
        max_size=4,
    ),
    body=st.binary(max_size=200),
)
def test_no_request_is_a_500(
    no_settings_of_this_machine: None,
    method: bytes,
    path: bytes,
    headers: list[tuple[bytes, bytes]],
    body: bytes,
) -> None:
    lines = b"".join(b"%b: %b\r\n" % pair for pair in headers)
    request = b"%b /%b HTTP/1.1\r\n%b%bContent-Length: %d\r\n\r\n%b" % (method, path, HOST, lines, len(body), body)

    async def ask() -> int:
        async with web_of(Access(TOKEN)) as console:
            return await status_of(console, request)

    status = asyncio.run(ask())
    assert status == 0 or 200 <= status < 500
