"""Consoles of a test's own, and two ways to look at them: a browser, and a reader of their events."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from playwright.async_api import Page, async_playwright
from tests.integration.conftest import Kit

from parti.config import Settings
from parti.console.access import Access
from parti.console.connections import Limits
from parti.console.hub import Hub
from parti.console.server import prepare, running_console, serving, url_of
from parti.console.web import build_web
from parti.coordination.control_plane import ControlPlane
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection

ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


class Nothing:
    """News of no fleet."""

    def __init__(self, snapshot: bytes = b'{"picture": {}}') -> None:
        self._snapshot = snapshot

    def snapshot(self) -> bytes:
        return self._snapshot

    def since(self, at: str) -> bytes | None:
        return None


@dataclass(frozen=True, slots=True)
class Console:
    url: str
    hub: Hub

    async def ask(self, path: str = "/", method: str = "GET", **given: Any) -> Answer:
        return await asyncio.to_thread(ask, self.url, path, method, **given)


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: str


def ask(url: str, path: str, method: str, *, headers: Mapping[str, str] | None = None, body: str = "") -> Answer:
    """One request, whose redirection is not followed."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    with contextlib.closing(connection):
        connection.request(method, path, body=body, headers=dict(headers or {}))
        found = connection.getresponse()
        # Of events only the beginning, because they have no end.
        text = found.read1(100) if path == "/events" and found.status == 200 else found.read()
        return Answer(found.status, dict(found.getheaders()), text.decode())


@asynccontextmanager
async def web_of(
    access: Access,
    hub: Hub | None = None,
    *,
    limits: Limits | None = None,
    snapshot: bytes = b'{"picture": {}}',
    **settings: Any,
) -> AsyncIterator[Console]:
    """The web side alone, without a fleet."""
    hub = Hub() if hub is None else hub
    listener, _ = prepare(Settings(console_port=0))
    async with serving(build_web(hub, Nothing(snapshot), access, **settings), hub, listener, limits):
        yield Console(url_of(listener), hub)


@asynccontextmanager
async def console_of(kit: Kit, **given: Any) -> AsyncIterator[Console]:
    """The console of a kit's fleet, in this process."""
    settings = Settings(
        nats=(given.pop("nats", kit.url),),
        bucket=f"b{kit.root}",
        prefix=f"w{kit.root}",
        dead_letter_stream=f"d{kit.root}",
        console_port=0,
        ping_interval_s=0.5,
        reconnect_wait_s=0.1,
        **given,
    )
    connection = await Connection.open(settings, name="console")
    try:
        plane = await ControlPlane.open(connection, JetStreamApi(connection), settings.bucket, replicas=1)
        listener, access = prepare(settings)
        async with running_console(plane, settings, listener, access, look_s=0.3) as hub:
            yield Console(url_of(listener), hub)
    finally:
        await connection.close()


class Events:
    """Reads the events of a console and applies them, as the page does."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.picture: dict[str, dict[str, Any]] = {}
        self.names: list[str] = []
        self._reader = reader

    async def next(self) -> str:
        """Take in one event and return its name."""
        name = ""
        while line := (await self._reader.readline()).decode().strip("\r\n"):
            field, _, value = line.partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                self._take(name, json.loads(value))
        if name:
            self.names.append(name)
        return name

    def _take(self, name: str, body: dict[str, Any]) -> None:
        if name == "snapshot":
            self.picture = body["picture"]
            return
        for section, change in body["changes"].items():
            for key in change["gone"]:
                del self.picture[section][key]
            self.picture[section].update(change["set"])

    async def until(self, condition: Callable[[dict[str, dict[str, Any]]], bool], timeout_s: float = 20.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not self.picture or not condition(self.picture):
                await self.next()


@asynccontextmanager
async def events_of(console: Console, since: str = "") -> AsyncIterator[Events]:
    place = urlsplit(console.url)
    # HTTP/1.0: an answer without an end comes as it is, not in chunks.
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=1 << 24)
    writer.write(f"GET /events?from={since} HTTP/1.0\r\nHost: {place.netloc}\r\n\r\n".encode())
    try:
        await reader.readuntil(b"\r\n\r\n")
        yield Events(reader)
    finally:
        writer.transport.abort()


@asynccontextmanager
async def browser_page(chromium: str, excused: str = "net::ERR_", **context: Any) -> AsyncIterator[Page]:
    """A page of a browser of the test's own; at the end nothing may have gone wrong in it but what is excused."""
    complaints: list[str] = []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=list(ARGUMENTS))
        try:
            page = await browser.new_page(**{"viewport": {"width": 1440, "height": 1000}, **context})
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
            yield page
        finally:
            await browser.close()
    # What the browser says of an event source that was interrupted is no mistake of the page.
    assert [text for text in complaints if excused not in text] == []


async def seen_s(page: Page, condition: str, timeout_s: float = 20.0) -> float:
    """Wait in the page until a condition holds; returns the wall clock's time of that."""
    script = f"""() => new Promise((resolve) => {{
        const look = () => ({condition}) ? resolve(Date.now()) : setTimeout(look, 10);
        look();
    }})"""
    async with asyncio.timeout(timeout_s):
        return float(await page.evaluate(script)) / 1000
