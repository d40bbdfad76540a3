"""Requests to the console: any path, query, header and body, with and without a secret."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import unquote_to_bytes

from fuzz.feed import Feed
from fuzz.target import Target, WrongError
from parti.console.access import COOKIE, Access
from parti.console.hub import Hub
from parti.console.web import build_web

_TOKEN = "a-token-that-is-long-enough"
_SCOPE: dict[str, Any] = {
    "type": "http",
    "asgi": {"version": "3.0"},
    "http_version": "1.1",
    "scheme": "http",
    "root_path": "",
    "client": ("127.0.0.1", 1),
    "server": ("127.0.0.1", 8787),
}
_loop = asyncio.new_event_loop()


class _News:
    """News of no fleet."""

    def snapshot(self) -> bytes:
        """Nothing."""
        return b'{"at": "x.1", "picture": {"fleet": {}}}'

    def since(self, at: str) -> bytes | None:
        """The same for whoever knows it, nothing for others."""
        return b"" if at == "x.1" else None


_HUBS = [Hub() for _ in range(3)]
_APPS = [
    build_web(hub, _News(), access)
    for hub, access in zip(_HUBS, (Access(), Access(_TOKEN), Access(passwords={"ada": "correct horse"})), strict=True)
]


def one(data: bytes) -> None:
    """One request, in the form of HTTP: a line, headers, an empty line, the body."""
    number, text = (data[0] if data else 0) % len(_APPS), data[1:]
    head, _, body = text.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    method, _, rest = first.partition(b" ")
    target = rest.rpartition(b" ")[0] or b"/"
    path, _, query = target.partition(b"?")
    if not method.isalpha() or not method.isascii() or not path.startswith(b"/"):
        return  # h11 refuses it
    headers = []
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not name.strip() or not name.isascii() or b"\0" in value or b"\n" in value:
            return
        headers.append((name.strip().lower(), value.strip()))
    scope = {
        **_SCOPE,
        "method": method.decode().upper(),
        "path": unquote_to_bytes(path).decode("utf-8", "replace"),
        "raw_path": path,
        "query_string": query,
        "headers": headers,
    }
    _loop.run_until_complete(_ask(number, scope, Feed(body)))
    if len(_HUBS[number]):
        raise WrongError("a browser that is gone still counts")


async def _ask(number: int, scope: dict[str, Any], body: Feed) -> None:
    answers: list[dict[str, Any]] = []
    got_body = asyncio.Event()
    asked = False

    async def receive() -> dict[str, Any]:
        nonlocal asked
        if body:
            return {"type": "http.request", "body": body.take(5000), "more_body": True}
        if not asked:
            asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await got_body.wait()  # as servers do: the next news of a request is that its client is gone
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        answers.append(dict(message))
        if message["type"] == "http.response.body":
            got_body.set()

    async with asyncio.timeout(5):
        await _APPS[number](scope, receive, send)
    starts = [answer for answer in answers if answer["type"] == "http.response.start"]
    if len(starts) != 1:
        raise WrongError(f"a request has {len(starts)} answers")
    if starts[0]["status"] >= 500:
        raise WrongError(f"a request is answered with {starts[0]['status']}")
    names = {bytes(name).lower() for name, _ in starts[0]["headers"]}
    if not {b"content-security-policy", b"x-content-type-options", b"cache-control"} <= names:
        raise WrongError("an answer lacks the headers that keep others out")
    for _, value in starts[0]["headers"]:
        if b"\r" in value or b"\n" in value:
            raise WrongError("a header of an answer is two lines")
    opened = b"".join(bytes(answer.get("body", b"")) for answer in answers)
    if (
        number
        and b'"picture"' in opened
        and not any(name in {b"authorization", b"cookie"} for name, _ in scope["headers"])
    ):
        raise WrongError("the fleet is shown to somebody without a secret")


def seeds() -> list[bytes]:
    """Requests of browsers."""
    requests = [
        b"GET / HTTP/1.1\r\nHost: localhost:8787\r\n\r\n",
        b'GET /static/main.js HTTP/1.1\r\nHost: 127.0.0.1\r\nIf-None-Match: "x"\r\n\r\n',
        b"GET /events?from=x.1 HTTP/1.1\r\nHost: localhost\r\nLast-Event-ID: x.0\r\n\r\n",
        b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n\r\ntoken=abc&token=%00",
        b"POST /login HTTP/1.1\r\nHost: localhost\r\n\r\ntoken=" + _TOKEN.encode(),
        b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + _TOKEN.encode() + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Basic YWRhOmNvcnJlY3QgaG9yc2U=\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: [::1]:8787\r\nCookie: " + COOKIE.encode() + b"=x; a=b\r\n\r\n",
        b"HEAD /nothing HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    ]
    return [bytes((number,)) + request for number in range(3) for request in requests]


TARGET = Target("console", one, seeds)
