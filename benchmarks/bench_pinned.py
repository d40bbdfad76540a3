"""What does a pinned group cost? The same stream is drained with and without one, in one run.

    python -m benchmarks.bench_pinned
    python -m benchmarks.bench_pinned --shared

A worker, as users run it: an app with `standby` and without. A pull client that stands alone: a consumer without a
group, one with the policy pinned_client, the same while a second one stands by. For each message they decode a JSON
document of 256 B, as the least that anybody does; further ways do nothing with it, or decode the document and encode
it again. Messages are of 256 B and have no headers of their own, which is the worst case; each is acknowledged.

Reader and server have a core of their own each, so that neither slows the other down by what it takes of a core that
both want: what is measured is the reader, as with a server elsewhere. With `--shared` they have all cores together.

Rounds go through the ways forwards and backwards in turn, ratios are taken within a round, and medians count. How far
they can be trusted is said by an interval that holds the median of nine in ten samples of the rounds. What reader and
server have used is told besides. Exit code 1 when one that decodes is pinned and below 0.95 x without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.drains import PATTERN, STREAM, Drained, Source, connect, cpu_of, filled
from benchmarks.priority_page import write_page
from benchmarks.report import RESULTS, LiveLine, machine, write_result

import parti
from parti.core.priority import Policy, PriorityGroup
from parti.jetstream.priority import ensure_consumer
from parti.jetstream.pull_client import PullClient
from parti.telemetry.logs import configure_logging

GROUP = "g"
LIMIT = 2_000
LEAST = 0.95
WARM = 2_000
"""Messages that a worker handles before the time counts: its pulls begin small."""
PARTITIONS = 8
DOCUMENT = json.dumps({"id": "a" * 20, "tool": "etch1", "values": [1.5, 2.5, 3.5], "text": "y" * 160}).encode()
_WINDOW_S = 0.1
_DRAIN_S = 120.0
_SAMPLES = 400


@dataclass(frozen=True, slots=True)
class Way:
    """One way to drain the stream."""

    name: str
    against: str = ""
    """The name of the way without a group that does as much; empty: this is one."""
    worker: bool = False
    standby: bool = False
    work: Callable[[], object] = lambda: json.loads(DOCUMENT)
    """What is done for each message."""
    least: float = 0.0
    """What its ratio must reach."""

    @property
    def pinned(self) -> bool:
        """Whether its consumer has a group."""
        return bool(self.against)


def _nothing() -> None:
    pass


def _anew() -> None:
    json.dumps(json.loads(DOCUMENT))


WAYS = (
    Way("worker", worker=True),
    Way("worker, pinned (standby)", "worker", worker=True, least=LEAST),
    Way("client"),
    Way("client, pinned", "client", least=LEAST),
    Way("client, pinned, one stands by", "client", standby=True),
    Way("client that encodes too", work=_anew),
    Way("client that encodes too, pinned", "client that encodes too", work=_anew),
    Way("client that does nothing", work=_nothing),
    Way("client that does nothing, pinned", "client that does nothing", work=_nothing),
)


class Meter:
    """Rate, and what reader and server use for a message, from `begin` to `read`."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def begin(self) -> None:
        """The time counts from now on."""
        self._began = (time.perf_counter(), time.process_time(), cpu_of(self._source.server_pid))

    def read(self, messages: int) -> Drained:
        """What so many messages took."""
        seconds, reader, server = self._began
        return Drained(
            messages,
            time.perf_counter() - seconds,
            time.process_time() - reader,
            cpu_of(self._source.server_pid) - server,
        )


async def drain(source: Source, way: Way, name: str) -> Drained:
    """What one reader takes on a fresh consumer."""
    return await (_drain_as_worker if way.worker else _drain_as_client)(source, way, name)


async def _drain_as_worker(source: Source, way: Way, name: str) -> Drained:
    app = parti.App(
        stream=STREAM,
        subject=PATTERN.replace("*", "{p}"),
        partitions=[str(number) for number in range(PARTITIONS)],
        nats=source.url,
        worker_id="w",
        standby=way.pinned,
        bucket=name,
        prefix=name,
        max_ack_pending=LIMIT,
        cold_start_window_s=_WINDOW_S,
        scale_window_s=_WINDOW_S,
        hot_mirror="off",
    )
    done, handled, meter, work = asyncio.Event(), 0, Meter(source), way.work
    warm = min(WARM, source.messages // 2)

    async def handle(message: parti.Message) -> None:
        nonlocal handled
        work()
        handled += 1
        if handled == warm:
            meter.begin()
        elif handled == source.messages:
            done.set()

    app.handler(handle)
    async with app.running(log_level="error"), asyncio.timeout(_DRAIN_S):
        await done.wait()
        drained = meter.read(source.messages - warm)
    await source.api.delete_consumer(STREAM, f"{name}-w")
    return drained


async def _drain_as_client(source: Source, way: Way, name: str) -> Drained:
    connection = await connect(source.url)
    group = PriorityGroup(GROUP, Policy.PINNED, timeout_s=30.0) if way.pinned else None
    await ensure_consumer(connection, STREAM, name, group, max_ack_pending=2 * LIMIT)
    place: dict[str, Any] = {"stream": STREAM, "consumer": name, "group": GROUP if group else "", "limit": LIMIT}
    async with AsyncExitStack() as opened:
        client = await opened.enter_async_context(PullClient(connection, **place))
        (await anext(client)).ack()  # who gets the first message is pinned
        if way.standby:
            await opened.enter_async_context(PullClient(source.url, **place))
        meter, work, left = Meter(source), way.work, source.messages - 1
        meter.begin()
        async for message in client:
            work()
            message.ack()
            left -= 1
            if not left:
                break
        drained = meter.read(source.messages - 1)
    await source.api.delete_consumer(STREAM, name)
    await connection.close()
    return drained


async def run(args: argparse.Namespace) -> dict[Way, list[Drained]]:
    """All ways in each round."""
    live = LiveLine()
    drains: dict[Way, list[Drained]] = {way: [] for way in WAYS}
    live.show(f"publishing {args.messages:,} messages")
    async with filled(args.messages, subjects=PARTITIONS) as source:
        if not args.shared:
            part(source.server_pid)
        await drain(source, WAYS[2], "warm")
        for number in range(args.rounds):
            # What is compared is always measured one right after the other.
            for way in WAYS if number % 2 else WAYS[::-1]:
                live.show(f"round {number + 1} of {args.rounds}: {way.name}")
                drains[way].append(await drain(source, way, f"c{number}-{WAYS.index(way)}"))
    live.end()
    return drains


def part(server_pid: int) -> None:
    """Give this process and the server a core of their own each; threads that they start stay there."""
    ours, theirs, *_ = sorted(os.sched_getaffinity(0))
    for thread in Path(f"/proc/{server_pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {theirs})
    os.sched_setaffinity(0, {ours})


def summary(way: Way, drains: dict[Way, list[Drained]]) -> dict[str, Any]:
    """Medians of one way; `times_plain` against the one without a group that does as much."""
    plain = drains[next(other for other in WAYS if other.name == (way.against or way.name))]
    ratios = [a.msg_per_s / b.msg_per_s for a, b in zip(drains[way], plain, strict=True)]
    return {
        "msg_per_s": round(statistics.median(each.msg_per_s for each in drains[way])),
        "times_plain": round(statistics.median(ratios), 3),
        "interval": [round(bound, 3) for bound in interval(ratios)],
        "least": way.least,
        "reader_us": round(statistics.median(each.reader_us for each in drains[way]), 2),
        "server_us": round(statistics.median(each.server_us for each in drains[way]), 2),
        "rounds_msg_per_s": [round(each.msg_per_s) for each in drains[way]],
    }


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Between which two the median of nine in ten samples of the rounds lies."""
    chance = random.Random(1)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(_SAMPLES))
    return medians[_SAMPLES // 20], medians[-_SAMPLES // 20 - 1]


def main() -> int:
    """Run, print, write JSON and page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=80_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--shared", action="store_true", help="reader and server share all cores")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=None, help="where the page goes; docs/benchmarks by default")
    args = parser.parse_args()
    if not args.shared and len(os.sched_getaffinity(0)) < 2:
        parser.error("one core cannot be parted; use --shared")
    configure_logging("error")
    described = machine()
    drains = asyncio.run(run(args))
    ways = {way.name: summary(way, drains) for way in WAYS}
    settings = {"messages": args.messages, "rounds": args.rounds, "limit": LIMIT}
    path = write_result(
        "pinned_shared" if args.shared else "pinned",
        {"machine": described, "settings": settings, "ways": ways},
        args.results,
    )
    write_page(args.results, args.docs)
    for name, row in ways.items():
        low, high = row["interval"]
        ratio = f"{row['times_plain']:.3f} x ({low:.3f} to {high:.3f})"
        cpu = f"{row['reader_us']:.1f} + {row['server_us']:.1f} us"
        print(f"{name:<32} {row['msg_per_s']:>9,} msg/s   {ratio}   {cpu}")
    print(f"written to {path}")
    missed = [name for name, row in ways.items() if row["times_plain"] < row["least"]]
    print(f"below {LEAST} x: {'; '.join(missed) or 'none of those that must not be'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
