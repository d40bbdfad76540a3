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
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from parti.console.access import COOKIE, Access, Proxies, is_host, names_this_machine
from parti.console.document import Document
from parti.console.hub import Hub, Subscriber
from parti.telemetry.log_rate import LogRate
from parti.telemetry.tasks import beside

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


def build_web(hub: Hub, news: News, access: Access, proxies: Proxies | None = None) -> ASGIApp:
    """The whole application; `proxies` may say that they were reached by TLS."""
    proxies = proxies or Proxies()
    shelf, rate = _read_files(), LogRate()
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
            _warn(rate, "a wrong token was given", request.scope)
            wrong = '<p class="wrong" role="alert">That is not the token.</p>'
            return HTMLResponse(login_page.replace(_WRONG, wrong), 401)
        answer = RedirectResponse(".", 303)
        secure = _came_by_tls(request.scope, proxies, rate)
        answer.set_cookie(COOKIE, access.session, httponly=True, samesite="strict", secure=secure)
        return answer

    router = Router(
        [
            Route("/", page),
            Route("/login", login, methods=["POST"]),
            Route("/static/{name}", static),
            Route("/events", _Events(hub, news)),
        ],
        redirect_slashes=False,  # it would answer with an address made of the header Host
    )
    return _Guard(router, access, login_page, {"Content-Security-Policy": document.policy, **_HEADERS}, rate)


def _came_by_tls(scope: Scope, proxies: Proxies, rate: LogRate) -> bool:
    """Whether nobody could read this request on its way, as far as that is known."""
    if scope["scheme"] == "https":
        return True
    forwarded = Headers(scope=scope).get("x-forwarded-proto", "")
    if not forwarded:
        return False
    client = scope.get("client")
    if client and proxies.trusts(client[0]):
        return forwarded.partition(",")[0].strip().lower() == "https"
    _warn(rate, "X-Forwarded-Proto of an unknown proxy is ignored; name it in console_trusted_proxies", scope)
    return False


def _warn(rate: LogRate, event: str, scope: Scope) -> None:
    """Log what a client did, at most once in a while."""
    left_out = rate.passes(event)
    if left_out is not None:
        client = scope.get("client")
        _log.warning(event, client=client[0] if client else "", **({"left_out": left_out} if left_out else {}))


class _Guard:
    """Lets in who may look, adds the headers, and answers what goes wrong without telling what it was."""

    def __init__(
        self, app: ASGIApp, access: Access, login_page: str, headers: Mapping[str, str], rate: LogRate
    ) -> None:
        self._app = app
        self._access = access
        self._login_page = login_page
        self._headers = headers
        self._rate = rate

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
        except ClientDisconnect:
            _warn(self._rate, "a browser left in the middle of a form", scope)
        except Exception:
            _log.exception("a request failed", path=scope["path"])
            if not started:
                await PlainTextResponse("something went wrong; see the log\n", 500)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        """Why this request is not answered; None: it is."""
        headers, path = Headers(scope=scope), scope["path"]
        if not is_host(headers.get("host", "")):
            return PlainTextResponse("the header Host is missing or is no host\n", 400)
        if not self._access.required:
            if names_this_machine(headers.get("host", "")):
                return None
            return PlainTextResponse("this console is for this machine: open it as localhost\n", 421)
        if path.startswith("/static/") or (path == "/login" and self._access.takes_token):
            return None
        if self._access.admits(headers.get("authorization", ""), headers.get("cookie", "")):
            return None
        if headers.get("authorization"):
            _warn(self._rate, "a wrong secret was given", scope)
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
        if scope["method"] != "GET":
            await PlainTextResponse("only GET\n", 405, {"Allow": "GET"})(scope, receive, send)
            return
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
            flows = (_pump(send, subscriber, first), _left(receive), _end_of(ended))
            # A browser that has gone is no error, whoever notices it first.
            async with beside(*flows, name="console-browser", foreseen=OSError) as tasks:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
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


async def _end_of(ended: asyncio.Event) -> None:
    await ended.wait()


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
