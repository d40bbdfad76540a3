"""The console over HTTP: the page, its files, its events, and the form that asks for the token.

Every answer carries headers that keep other sites out and let nothing run but the page's own files. Only GET and HEAD
are answered, except for the form.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Mapping
from importlib.resources import files
from typing import Protocol
from urllib.parse import parse_qs

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from parti.console.access import COOKIE, Access, names_this_machine
from parti.console.document import Document
from parti.console.hub import Hub, Subscriber

_log = structlog.get_logger("parti.console")

_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
_MOST_FORM = 4096
_ALIVE_S = 15.0
_GOODBYE_S = 0.1
_WRONG = "<!-- wrong -->"


class News(Protocol):
    """What is told of the fleet."""

    def snapshot(self) -> bytes:
        """Everything that is known, as JSON; `at` in it says after which change."""

    def since(self, at: str) -> bytes | None:
        """The events after a change; None: they are no longer known, and only a snapshot helps."""


def build_web(hub: Hub, news: News, access: Access) -> ASGIApp:
    """The whole application."""
    shelf = _read_files()
    login_page = shelf["login.html"][0].decode()
    document = Document({name: content.decode() for name, (content, _, _) in shelf.items()})

    async def page(request: Request) -> Response:
        return HTMLResponse(document.fill(news.snapshot()))

    async def static(request: Request) -> Response:
        # Asked for again each time, and then seldom sent: a new version of parti is seen at once.
        return _file(shelf, request.path_params["name"], "no-cache", request)

    async def login(request: Request) -> Response:
        token = await _token_in(request)
        if not access.is_token(token):
            _log.warning("a wrong token was given", client=request.client.host if request.client else "")
            wrong = '<p class="wrong" role="alert">That is not the token.</p>'
            return HTMLResponse(login_page.replace(_WRONG, wrong), 401)
        answer = RedirectResponse(".", 303)
        secure = request.url.scheme == "https"
        answer.set_cookie(COOKIE, access.session, httponly=True, samesite="strict", secure=secure)
        return answer

    router = Router(
        [
            Route("/", page),
            Route("/login", login, methods=["POST"]),
            Route("/static/{name}", static),
            Route("/events", _Events(hub, news)),
        ]
    )
    return _Guard(router, access, login_page, {"Content-Security-Policy": document.policy, **_HEADERS})


class _Guard:
    """Lets in who may look, adds the headers, and answers what goes wrong without telling what it was."""

    def __init__(self, app: ASGIApp, access: Access, login_page: str, headers: Mapping[str, str]) -> None:
        self._app = app
        self._access = access
        self._login_page = login_page
        self._headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers.update(self._headers)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        try:
            await (self._refusal(scope) or self._app)(scope, receive, send_with_headers)
        except Exception:
            _log.exception("a request failed", path=scope["path"])
            if not started:
                await PlainTextResponse("something went wrong; see the log\n", 500)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        """Why this request is not answered; None: it is."""
        headers, path = Headers(scope=scope), scope["path"]
        if not self._access.required:
            if names_this_machine(headers.get("host", "")):
                return None
            return PlainTextResponse("this console is for this machine: open it as localhost\n", 421)
        if path.startswith("/static/") or (path == "/login" and self._access.takes_token):
            return None
        if self._access.admits(headers.get("authorization", ""), headers.get("cookie", "")):
            return None
        if headers.get("authorization"):
            client = scope.get("client")
            _log.warning("a wrong secret was given", client=client[0] if client else "")
        asked = path == "/" and self._access.takes_token
        answer = HTMLResponse(self._login_page, 401) if asked else PlainTextResponse("say who you are\n", 401)
        for scheme in self._access.schemes:
            answer.headers.append("WWW-Authenticate", scheme)
        return answer


class _Events:
    """`/events`: what a browser does not know yet, then all changes, until it leaves or is too slow."""

    def __init__(self, hub: Hub, news: News) -> None:
        self._hub = hub
        self._news = news

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._hub.full:
            await PlainTextResponse("too many browsers look at this console\n", 503)(scope, receive, send)
            return
        ended = asyncio.Event()
        request = Request(scope)
        # A browser that comes back by itself says what it had last; the address still says what the page began with.
        known = request.headers.get("last-event-id") or request.query_params.get("from", "")
        missed = self._news.since(known)
        first = b"retry: 1000\n\n" + (_whole(self._news.snapshot()) if missed is None else missed)
        # Nothing is awaited between the news and this: no change is missed.
        with self._hub.subscribed(ended.set) as subscriber:
            tasks = [
                asyncio.create_task(_pump(send, subscriber, first)),
                asyncio.create_task(_left(receive)),
                asyncio.create_task(ended.wait()),
            ]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        if subscriber.dropped and not self._hub.closed:
            _log.info("a browser did not read and was dropped; it may come back", browsers=len(self._hub))
        # A browser that does not read does not take this either; its connection is closed all the same.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GOODBYE_S):
                await send({"type": "http.response.body", "body": b""})


def _whole(snapshot: bytes) -> bytes:
    return b"event: snapshot\ndata: %b\n\n" % snapshot


async def _pump(send: Send, subscriber: Subscriber, first: bytes) -> None:
    headers = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": first, "more_body": True})
    while True:
        try:
            async with asyncio.timeout(_ALIVE_S):
                event = await subscriber.next()
        except TimeoutError:
            event = b": still here\n\n"
        if event is None:
            return
        await send({"type": "http.response.body", "body": event, "more_body": True})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _token_in(request: Request) -> str:
    """The token of a form; empty for anything else."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MOST_FORM:
            return ""
    try:
        return parse_qs(body.decode(), max_num_fields=4).get("token", [""])[0].strip()
    except ValueError:
        return ""


def _read_files() -> dict[str, tuple[bytes, str, str]]:
    """Content, type and tag of each file of the page."""
    shelf = {}
    for file in files("parti.console").joinpath("static").iterdir():
        kind = _TYPES.get(f".{file.name.rpartition('.')[2]}")
        if kind:
            content = file.read_bytes()
            shelf[file.name] = (content, kind, f'"{hashlib.sha256(content).hexdigest()[:16]}"')
    return shelf


def _file(shelf: dict[str, tuple[bytes, str, str]], name: str, caching: str, request: Request) -> Response:
    if name not in shelf:
        return PlainTextResponse("not found\n", 404)
    content, kind, tag = shelf[name]
    headers = {"Cache-Control": caching, "ETag": tag}
    if caching != "no-store" and request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=kind, headers=headers)
