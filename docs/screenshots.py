"""Take the pictures of docs/console.md: `make screenshots`. A real fleet, a real console, Chromium without a window.

Needs Chromium (`make tools`) and playwright (extra `dev`). Each picture is one moment of the same fleet: at rest, the
dead letters, dark colours, and while partitions move to a worker that has just come.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from playwright.async_api import Locator, Page, async_playwright

import parti
from parti.app.worker import Worker
from parti.config import Settings
from parti.console.server import prepare, running_console, url_of
from parti.coordination.control_plane import ControlPlane
from parti.embedded import Server
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jobs import Job, JobApp
from parti.telemetry.logs import configure_logging

PICTURES = Path(__file__).parent / "console"
BROWSER = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
WIDTH, HEIGHT = 1440, 960
CHAMBERS = [f"etch{tool}.c{chamber}" for tool in range(1, 61) for chamber in range(1, 9)]
FLEET: dict[str, Any] = {
    "cold_start_window_s": 1.0,
    "scale_window_s": 1.0,
    "min_rebalance_interval_s": 0.5,
    "lease_ttl_s": 6.0,
    "leader_ttl_s": 6.0,
    "log_level": "error",
}
REJECTED = ("wafer id is missing", "recipe r-17 is not known", "negative pressure: -3.2")
RATE = 400.0
WARM_UP_S = 75.0
_rng = random.Random(7)
HELD = ("c5", "c6", "c7", "c8")
_gate = asyncio.Event()
"""While it is closed, handlers of the chambers above do not end, and their partitions cannot be let go."""


async def main() -> None:
    """Take all pictures."""
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("screenshots: chromium is not installed; run 'make tools' as root, or install it yourself")
    configure_logging("critical")  # the dead letters are wanted
    # The pictures are to show no name of the machine that they were taken on.
    socket.gethostname = lambda: "fab-a"
    PICTURES.mkdir(exist_ok=True)
    _gate.set()
    async with Server() as server, AsyncExitStack() as stack:
        settings = Settings(nats=(server.url,), console_port=0)
        connection = await stack.enter_async_context(_connected(settings))
        api = JetStreamApi(connection)
        await api.ensure_stream({"name": "FAB", "subjects": ["fab.>"], "storage": "memory", "allow_direct": True})
        workers = [await stack.enter_async_context(_worker(server.url)) for _ in range(5)]
        await _until(lambda: _settled(workers))
        await stack.enter_async_context(_background(_publish(api)))
        await stack.enter_async_context(_jobs(server.url, api))
        plane = await ControlPlane.open(connection, api, settings.bucket, replicas=1)
        listener, access = prepare(settings)
        await stack.enter_async_context(running_console(plane, settings, listener, access))
        playwright = await stack.enter_async_context(async_playwright())
        profile = stack.enter_context(tempfile.TemporaryDirectory())
        browser = await playwright.chromium.launch_persistent_context(
            profile,
            executable_path=chromium,
            args=list(BROWSER),
            viewport={"width": WIDTH, "height": HEIGHT},
            color_scheme="light",
        )
        page = browser.pages[0]
        await page.goto(url_of(listener))
        await page.wait_for_selector("html[data-drawn]")
        # The plots are to have something to show.
        await asyncio.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else WARM_UP_S)
        await _take_all(page, stack, server.url)
        await browser.close()


async def _take_all(page: Page, stack: AsyncExitStack, url: str) -> None:
    await _save(page, "overview")
    await page.locator("#letters").scroll_into_view_if_needed()
    await _save(page, "dead-letters", page.locator("#letters"))
    await page.evaluate("scrollTo(0, 0)")
    await page.locator("#theme input[value=dark]").check(force=True)
    await asyncio.sleep(0.6)
    await _save(page, "dark")
    await page.locator("#theme input[value=light]").check(force=True)
    _gate.clear()
    await asyncio.sleep(5)  # by now each of these chambers has had a message
    await stack.enter_async_context(_worker(url))
    await _save(page, "move", await _in_the_middle(page))
    _gate.set()


async def _in_the_middle(page: Page) -> Locator:
    """Wait until some partitions have come to the new worker and others are still on their way."""
    async with asyncio.timeout(60):
        await page.evaluate(
            """() => new Promise((resolve) => {
                const look = () => {
                    const blocks = document.querySelectorAll("#map .block");
                    const come = blocks[5]?.querySelectorAll(".cell[data-state=owned]").length ?? 0;
                    const away = document.querySelectorAll("#map [data-state=preparing], #map [data-state=moving]");
                    if (come >= 12 && away.length >= 12) resolve();
                    else requestAnimationFrame(look);
                };
                look();
            })"""
        )
    return page.locator("#partitions")


async def _save(page: Page, name: str, part: Locator | None = None) -> None:
    file = PICTURES / f"{name}.png"
    await (part or page).screenshot(path=file)
    print(f"{file.relative_to(PICTURES.parent.parent)}: {file.stat().st_size / 1000:.0f} kB")


# ── the fleet ─────────────────────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def _connected(settings: Settings) -> AsyncIterator[Connection]:
    connection = await Connection.open(settings, name="screenshots")
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def _worker(url: str) -> AsyncIterator[Worker]:
    app = parti.App(stream="FAB", subject="fab.{tool}.{chamber}", partitions=CHAMBERS, nats=url, **FLEET)

    @app.handler
    async def handle(message: parti.Message) -> None:
        await asyncio.sleep(0.001 + 0.004 * _rng.random())
        if message.partition.id.endswith(HELD):
            await _gate.wait()
        if message.seq % 1500 == 0:
            raise parti.Reject(REJECTED[message.seq // 1500 % len(REJECTED)])

    worker = app.worker()
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop()


async def _publish(api: JetStreamApi) -> None:
    """Messages at a rate that goes up and down a little, the way a fab does."""
    due = time.monotonic()
    while True:
        rate = RATE * (1 + 0.35 * _rng.random())
        for _ in range(20):
            await api.send(f"fab.{_rng.choice(CHAMBERS)}", b"{}", headers={})
        due = max(due + 20 / rate, time.monotonic() - 1.0)
        await asyncio.sleep(max(0.0, due - time.monotonic()))


@asynccontextmanager
async def _jobs(url: str, api: JetStreamApi) -> AsyncIterator[None]:
    app = JobApp(stream="MEDIA", subject="media.>", nats=url, max_capacity=8, log_level="error", drain_timeout_s=1.0)

    @app.handler
    async def handle(job: Job) -> None:
        if job.json["minutes"] == 0:
            raise parti.Reject("not a video: no moov atom")
        async with job.slots(2):
            for percent in range(100):
                job.progress(percent, f"{job.json['name']}, 720p")
                await asyncio.sleep(job.json["minutes"] * 0.6)

    async with app.running():
        for number in range(12):
            work = {"name": f"lot-{number}", "minutes": 0 if number == 4 else 2 + number}
            await api.publish("media.uploaded", json.dumps(work).encode())
        yield


@asynccontextmanager
async def _background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _settled(workers: list[Worker]) -> bool:
    sizes = [len(worker.partitions) for worker in workers]
    return sum(sizes) == len(CHAMBERS) and max(sizes) - min(sizes) <= 1


async def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the fleet did not settle within a minute"
        await asyncio.sleep(0.05)


if __name__ == "__main__":
    asyncio.run(main())
