"""How well do jobs of different sizes use the slots, and how long does a large one wait?

    python -m benchmarks.bench_jobs --jobs 500

A backlog of videos lies in a stream. Each is a job with a piece of work for each resolution up to its own, at the
costs of 1 (144p) to 64 (4K), which all run at once as far as there are slots; a piece is a sleep. The same backlog is
worked off, by real job workers on a real server,

- by parti, with its bounded look-ahead, and in strict order of arrival;
- with a plain semaphore over the slots: whoever fits goes, in no order;
- with a plain semaphore that counts jobs, as if all were alike;
- with max_ack_pending=1: one job at a time.

And once more by parti with one piece in each job, where there is less to choose from. Exit code 1 if parti uses less
than 95 % of the slots over the whole of the backlog, exceeds them, or a large piece is overtaken more often than
allowed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, LiveLine, write_result
from rich.console import Console
from rich.table import Table

from parti.config import Settings
from parti.embedded import Server
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jobs import Job, JobApp, LookAhead, WeightedScheduler
from parti.telemetry.logs import configure_logging

COSTS = (1, 2, 4, 8, 16, 32, 64)
"""144p, 240p, 360p, 480p, 720p, 1080p, 4K."""
SHARES = (10, 15, 25, 20, 15, 10, 5)
"""How many of a hundred videos have which resolution."""
SLOTS = 14
TARGET_PERCENT = 95.0
console = Console()

Slots = Callable[[Job, int], AbstractAsyncContextManager[object]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one way of working the backlog off has gone."""

    way: str
    jobs: int
    pieces: int
    seconds: float
    utilisation_percent: float
    """Slots in use, over the whole run; more than 100 when cost is not looked at."""
    peak_slots: int
    longest_large_wait_s: float
    """Longest wait of a piece that needs all slots, from asking for them."""
    longest_wait_s: float
    most_overtaken: int
    """How many pieces that asked later were served before a large one, at most."""


class Meter:
    """Counts slots in use and waits, in the same way for all ways."""

    def __init__(self) -> None:
        self.used = self.peak = 0
        self.area = 0.0
        self.began_s = self.changed_s = time.monotonic()
        self.large_waits: list[float] = []
        self.waits: list[float] = []
        self._asked = 0
        self._waiting_large: dict[int, int] = {}
        self.most_overtaken = 0

    def ask(self, slots: int) -> int:
        """A piece asks; returns its number."""
        self._asked += 1
        if slots == SLOTS:
            self._waiting_large[self._asked] = 0
        return self._asked

    def change(self, slots: int) -> None:
        """So many more, or less, are in use."""
        now_s = time.monotonic()
        self.area += self.used * (now_s - self.changed_s)
        self.changed_s = now_s
        self.used += slots
        self.peak = max(self.peak, self.used)

    def enter(self, number: int, slots: int, waited_s: float) -> None:
        """A piece has its slots."""
        self.change(slots)
        self.waits.append(waited_s)
        if slots == SLOTS:
            self.large_waits.append(waited_s)
            self.most_overtaken = max(self.most_overtaken, self._waiting_large.pop(number))
        for other in self._waiting_large:
            self._waiting_large[other] += other < number


class CountingSemaphore:
    """Slots that whoever fits may take, in no order; what one finds with a condition and a counter."""

    def __init__(self) -> None:
        self._free = SLOTS
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def slots(self, job: Job, cost: int) -> AsyncIterator[None]:
        """As many as it costs."""
        wanted = min(cost, SLOTS)
        async with self._changed:
            await self._changed.wait_for(lambda: self._free >= wanted)
            self._free -= wanted
        try:
            yield
        finally:
            async with self._changed:
                self._free += wanted
                self._changed.notify_all()


def backlog(options: argparse.Namespace, *, single: bool) -> list[dict[str, Any]]:
    """The same videos for everybody."""
    chance = random.Random(options.seed)
    videos = []
    for _ in range(options.jobs):
        height = chance.choices(range(len(COSTS)), SHARES)[0]
        costs = COSTS[height : height + 1] if single else COSTS[: height + 1]
        low, high = options.seconds / 2, options.seconds * 1.5
        videos.append({"pieces": [[cost, round(chance.uniform(low, high), 4)] for cost in costs]})
    return videos


async def measure(
    way: str, options: argparse.Namespace, slots: Slots, *, single: bool = False, **settings: Any
) -> Outcome:
    """Work the whole backlog off in one way."""
    videos = backlog(options, single=single)
    pieces = sum(len(video["pieces"]) for video in videos)
    line, meter, done = LiveLine(), Meter(), 0

    async def work(job: Job, cost: int, seconds: float) -> None:
        need = min(cost, SLOTS)
        number, asked_s = meter.ask(need), time.monotonic()
        async with slots(job, cost):
            meter.enter(number, need, time.monotonic() - asked_s)
            await asyncio.sleep(seconds)
            meter.change(-need)

    async def handle(job: Job) -> None:
        nonlocal done
        await asyncio.gather(*(work(job, cost, seconds) for cost, seconds in job.json["pieces"]))
        done += 1

    async with Server() as server:
        connection = await Connection.open(Settings(nats=(server.url,)), name="bench")
        api = JetStreamApi(connection)
        await api.call("STREAM.CREATE.VIDEOS", {"name": "VIDEOS", "subjects": ["videos"], "retention": "workqueue"})
        for begin in range(0, len(videos), 100):
            documents = [json.dumps(video).encode() for video in videos[begin : begin + 100]]
            await asyncio.gather(*(api.publish("videos", document) for document in documents))
        app = JobApp(stream="VIDEOS", subject="videos", nats=server.url, **settings)
        app.handler(handle)
        meter.began_s = meter.changed_s = time.monotonic()
        async with app.running():
            while done < len(videos):
                line.show(f"{way}: {done:,} of {len(videos):,} jobs")
                await asyncio.sleep(0.02)
        await connection.close()
    line.end()
    seconds = meter.changed_s - meter.began_s
    return Outcome(
        way=way,
        jobs=len(videos),
        pieces=pieces,
        seconds=round(seconds, 2),
        utilisation_percent=round(100 * meter.area / (SLOTS * seconds), 1),
        peak_slots=meter.peak,
        longest_large_wait_s=round(max(meter.large_waits, default=0.0), 2),
        longest_wait_s=round(max(meter.waits), 2),
        most_overtaken=meter.most_overtaken,
    )


def parti_slots(job: Job, cost: int) -> AbstractAsyncContextManager[object]:
    """The scheduler of the worker."""
    return job.slots(cost)


async def run(options: argparse.Namespace) -> list[Outcome]:
    """All ways, one after the other."""
    outcomes = [
        await measure("parti", options, parti_slots, overtakings=options.overtakings),
        await measure("parti, strict order", options, parti_slots, look_ahead=0),
        await measure("semaphore over slots", options, CountingSemaphore().slots),
    ]
    counted = asyncio.Semaphore(SLOTS)

    @asynccontextmanager
    async def one_permit(job: Job, cost: int) -> AsyncIterator[None]:
        async with counted:
            yield

    outcomes.append(await measure("semaphore over pieces", options, one_permit))
    shared = WeightedScheduler(SLOTS, look_ahead=LookAhead(overtakings=options.overtakings))
    outcomes.append(
        await measure(
            "max_ack_pending=1", options, lambda job, cost: shared.acquire(cost, label=job.id), max_capacity=1
        )
    )
    single = await measure("parti, 1 piece a job", options, parti_slots, single=True, overtakings=options.overtakings)
    return [*outcomes, single]


def show(outcomes: list[Outcome], options: argparse.Namespace) -> None:
    """One table."""
    table = Table(title=f"{options.jobs} jobs in {SLOTS} slots, pieces of about {options.seconds:g} s")
    table.add_column("way", no_wrap=True)
    for title in ("pieces", "took s", "used %", "peak", "wait large s", "wait s", "overtaken"):
        table.add_column(title, justify="right")
    for o in outcomes:
        table.add_row(
            o.way,
            f"{o.pieces:,}",
            f"{o.seconds:.1f}",
            f"{o.utilisation_percent:.1f}",
            str(o.peak_slots),
            f"{o.longest_large_wait_s:.1f}",
            f"{o.longest_wait_s:.1f}",
            f"{o.most_overtaken:,}",
        )
    console.print(table)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=0.12, help="mean length of a piece")
    parser.add_argument("--overtakings", type=int, default=LookAhead().overtakings)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--name", default="bench_jobs", help="name of the JSON result")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory for the JSON result")
    return parser.parse_args(arguments)


def main() -> int:
    """Parse, run, show, write."""
    options = parse()
    configure_logging("error", "console")
    outcomes = asyncio.run(run(options))
    show(outcomes, options)
    best = outcomes[0]
    within = best.utilisation_percent >= TARGET_PERCENT and best.peak_slots <= SLOTS
    passed = within and best.most_overtaken <= options.overtakings
    settings = {k: v for k, v in vars(options).items() if k not in {"name", "results"}}
    data = {**settings, "slots": SLOTS, "ways": [asdict(o) for o in outcomes], "passed": passed}
    path = write_result(options.name, data, options.results)
    console.print("passed" if passed else "FAILED", style="green" if passed else "red")
    console.print(f"written to {path}", soft_wrap=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
