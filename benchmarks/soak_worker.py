"""Run a worker at full rate for a long time and watch its memory.

    python -m benchmarks.soak_worker --seconds 300

Worker and publisher are processes of their own. The publisher keeps a backlog, so the worker never waits for work;
the stream is bounded, so the disk is too. Exit code 1 if the worker's resident memory in the last minute (median) is
more than 10 % or more than 20 MB above that of the first.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import nats
import psutil
from benchmarks.report import RESULTS, LiveLine, write_result
from benchmarks.traffic import BareSocket, connect
from nats.js.api import DiscardPolicy, StreamConfig
from rich.console import Console
from rich.table import Table

import parti
from parti.embedded import Server
from parti.telemetry.logs import configure_logging

STREAM = "SOAK"
CONSUMER = "parti-worker-0"
GROWTH_LIMIT_MB, GROWTH_LIMIT = 20.0, 0.10
BACKLOG_LOW, BACKLOG_HIGH = 10_000, 100_000
_MAX_MSGS = 400_000
_BURST, _AT_ONCE = 500, 5_000
_WARM_UP_MSGS = 20_000
console = Console()


def publish(url: str, partitions: int, size: int, stop: Event) -> None:
    """The publisher's process."""
    asyncio.run(_publish(url, partitions, size, stop))


async def _publish(url: str, partitions: int, size: int, stop: Event) -> None:
    """Fill the backlog up to its upper mark, again and again; the server is asked how long it is."""
    payload = b"x" * size
    command = b"PUB soak.%d %d\r\n%b\r\n"
    bursts = [
        b"".join(command % (n % partitions, size, payload) for n in range(first, first + _BURST))
        for first in range(0, partitions, _BURST)
    ]
    client = await connect(url)
    js = client.jetstream()
    bare = BareSocket(url)
    turn = 0
    try:
        while not stop.is_set():
            backlog = (await js.consumer_info(STREAM, CONSUMER)).num_pending or 0
            # Little at a time: the server counts a message only when it is stored, and drops what is too much.
            room = min(BACKLOG_HIGH - backlog, _AT_ONCE)
            for _ in range(room // _BURST):
                bare.send(bursts[turn % len(bursts)])
                turn += 1
            await asyncio.sleep(0.02)
    finally:
        bare.close()
        await client.close()


def work(url: str, handled: Synchronized[int], stop: Event) -> None:
    """The worker's process."""
    configure_logging("error", "console")
    asyncio.run(_work(url, handled, stop))


async def _work(url: str, handled: Synchronized[int], stop: Event) -> None:
    app = parti.App(stream=STREAM, subject="soak.{partition}", fleet=False)
    count = 0

    @app.handler
    async def handle(message: parti.Message) -> None:
        nonlocal count
        count += 1

    async with app.running(nats=url):
        while not stop.is_set():
            await asyncio.sleep(0.1)
            handled.value = count
    handled.value = count


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at the worker."""

    at_s: float
    handled: int
    rss_mb: float
    backlog: int


class Soak:
    """A server, a publisher and a worker for a while, and what was seen."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._context = multiprocessing.get_context("spawn")
        self._handled: Synchronized[int] = self._context.Value("q", 0)
        self.line = LiveLine()
        self.samples: list[Sample] = []

    async def measure(self) -> None:
        """Take samples until the time is over."""
        options = self._options
        stop = self._context.Event()
        async with Server() as server:
            client = await nats.connect(server.url)
            js = client.jetstream()
            await js.add_stream(
                StreamConfig(name=STREAM, subjects=["soak.*"], max_msgs=_MAX_MSGS, discard=DiscardPolicy.OLD)
            )
            worker = self._context.Process(target=work, args=(server.url, self._handled, stop), daemon=True)
            arguments = (server.url, options.partitions, options.size, stop)
            publisher = self._context.Process(target=publish, args=arguments, daemon=True)
            with _ended(stop, publisher, worker):
                worker.start()
                await self._until_consumer(js)
                publisher.start()
                await self._until_warm()
                await self._watch(js, psutil.Process(worker.pid))
            await client.close()
        self.line.end()

    async def _until_consumer(self, js: Any) -> None:
        async with asyncio.timeout(30):
            while (await js.stream_info(STREAM)).state.consumer_count == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def _until_warm(self) -> None:
        async with asyncio.timeout(60):
            while self._handled.value < _WARM_UP_MSGS:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def _watch(self, js: Any, process: psutil.Process) -> None:
        options, started_s = self._options, time.monotonic()
        interval_s = min(5.0, options.seconds / 10)
        next_s = 0.0
        while (at_s := time.monotonic() - started_s) <= options.seconds:
            if at_s >= next_s:
                next_s += interval_s
                backlog = (await js.consumer_info(STREAM, CONSUMER)).num_pending
                rss_mb = process.memory_info().rss / 1e6
                self.samples.append(Sample(round(at_s, 1), self._handled.value, round(rss_mb, 2), backlog))
                self.line.show(
                    f"{at_s:.0f} of {options.seconds:g} s: handled {self._handled.value:,}, "
                    f"backlog {backlog:,}, RSS {rss_mb:.1f} MB"
                )
            await asyncio.sleep(0.05)

    def result(self) -> dict[str, Any]:
        """Throughput and growth."""
        options, samples = self._options, self.samples
        window_s = min(60.0, options.seconds / 3)
        first_mb = statistics.median(s.rss_mb for s in samples if s.at_s <= window_s)
        last_mb = statistics.median(s.rss_mb for s in samples if s.at_s >= samples[-1].at_s - window_s)
        growth_mb = last_mb - first_mb
        elapsed_s = samples[-1].at_s - samples[0].at_s
        backlogs = [s.backlog for s in samples]
        return {
            "seconds": options.seconds,
            "partitions": options.partitions,
            "message_bytes": options.size,
            "handled": samples[-1].handled - samples[0].handled,
            "msgs_per_s": round((samples[-1].handled - samples[0].handled) / elapsed_s),
            "rss_first_mb": round(first_mb, 2),
            "rss_last_mb": round(last_mb, 2),
            "rss_max_mb": max(s.rss_mb for s in samples),
            "growth_mb": round(growth_mb, 2),
            "growth_percent": round(100 * growth_mb / first_mb, 2),
            "backlog_min": min(backlogs),
            "backlog_median": round(statistics.median(backlogs)),
            "backlog_max": max(backlogs),
            "passed": growth_mb <= GROWTH_LIMIT_MB and growth_mb <= GROWTH_LIMIT * first_mb,
            "samples": [asdict(s) for s in samples],
        }


@contextlib.contextmanager
def _ended(stop: Event, *processes: Any) -> Iterator[None]:
    """See that the processes are gone in the end."""
    try:
        yield
    finally:
        stop.set()
        for process in processes:
            if process.pid is not None:
                process.join(20)
                process.kill()
                process.join()


def _show(result: dict[str, Any]) -> None:
    table = Table(title=f"{result['seconds']:g} s at full rate")
    table.add_column("what")
    table.add_column("figure", justify="right")
    table.add_row("handled", f"{result['handled']:,}")
    table.add_row("throughput", f"{result['msgs_per_s']:,} msg/s")
    backlogs = "{backlog_min:,} / {backlog_median:,} / {backlog_max:,}".format(**result)
    table.add_row(f"backlog min / median / max (wanted: {BACKLOG_LOW:,} to {BACKLOG_HIGH:,})", backlogs)
    table.add_row("RSS first / last / max", "{rss_first_mb} / {rss_last_mb} / {rss_max_mb} MB".format(**result))
    table.add_row("growth", "{growth_mb:+} MB, {growth_percent:+} %".format(**result))
    console.print(table)
    console.print("passed" if result["passed"] else "FAILED", style="green" if result["passed"] else "red")


def main() -> int:
    """Parse, run, show, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--partitions", type=int, default=2_000)
    parser.add_argument("--size", type=int, default=256, help="bytes of a message")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory for the JSON result")
    options = parser.parse_args()
    configure_logging("error", "console")
    soak = Soak(options)
    asyncio.run(soak.measure())
    result = soak.result()
    _show(result)
    console.print(f"written to {write_result('soak_worker', result, options.results)}", soft_wrap=True)
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
