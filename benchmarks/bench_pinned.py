"""What does a pinned group cost? One client drains the same stream with and without one, in one run.

    python -m benchmarks.bench_pinned

The ways: a consumer without a group; one with the policy pinned_client; the same while a second client stands by. All
use parti's pull client with an acknowledgement for each message of 256 B, and decode a JSON document of that size for
each, as the least that a handler does. Two further ways do nothing with a message: then the server is what limits,
and what the pin's header costs it is seen. Rounds are interleaved, in another order each, ratios are taken within a
round, and medians count. Exit code 1 when a client that decodes is pinned and below 0.95 x without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.drains import STREAM, Source, connect, filled
from benchmarks.priority_page import write_page
from benchmarks.report import RESULTS, LiveLine, machine, write_result

from parti.core.priority import Policy, PriorityGroup
from parti.jetstream.priority import ensure_consumer
from parti.jetstream.pull_client import PullClient
from parti.telemetry.logs import configure_logging

GROUP = "g"
LIMIT = 2_000
LEAST = 0.95
DOCUMENT = json.dumps({"id": "a" * 20, "tool": "etch1", "values": [1.5, 2.5, 3.5], "text": "y" * 160}).encode()


@dataclass(frozen=True, slots=True)
class Way:
    """One way to drain the stream."""

    name: str
    pinned: bool = False
    standby: bool = False
    works: bool = True


PLAIN = Way("no group")
PINNED = Way("pinned", pinned=True)
BARE = Way("no group, nothing done", works=False)
BARE_PINNED = Way("pinned, nothing done", pinned=True, works=False)
WAYS = (PLAIN, PINNED, Way("pinned, one stands by", pinned=True, standby=True), BARE, BARE_PINNED)


async def drain(source: Source, way: Way, name: str) -> float:
    """Messages a second, from the first to the last, of one client on a fresh consumer."""
    connection = await connect(source.url)
    group = PriorityGroup(GROUP, Policy.PINNED, timeout_s=30.0) if way.pinned else None
    await ensure_consumer(connection, STREAM, name, group, max_ack_pending=2 * LIMIT)
    place: dict[str, Any] = {"stream": STREAM, "consumer": name, "group": GROUP if group else "", "limit": LIMIT}
    async with AsyncExitStack() as opened:
        client = await opened.enter_async_context(PullClient(connection, **place))
        (await anext(client)).ack()  # who gets the first message is pinned
        if way.standby:
            await opened.enter_async_context(PullClient(source.url, **place))
        began, left = time.perf_counter(), source.messages - 1
        async for message in client:
            if way.works:
                json.loads(DOCUMENT)
            message.ack()
            left -= 1
            if not left:
                break
        rate = (source.messages - 1) / (time.perf_counter() - began)
    await source.api.delete_consumer(STREAM, name)
    await connection.close()
    return rate


async def run(args: argparse.Namespace) -> dict[Way, list[float]]:
    """All ways in each round."""
    live = LiveLine()
    rates: dict[Way, list[float]] = {way: [] for way in WAYS}
    live.show(f"publishing {args.messages:,} messages")
    async with filled(args.messages, subjects=1) as source:
        await drain(source, PLAIN, "warm")
        for number in range(args.rounds):
            turned = WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]
            for way in turned if number % 2 else turned[::-1]:
                live.show(f"round {number + 1} of {args.rounds}: {way.name}")
                rates[way].append(await drain(source, way, f"c{number}-{WAYS.index(way)}"))
    live.end()
    return rates


def summary(way: Way, rates: dict[Way, list[float]]) -> dict[str, Any]:
    """Medians of one way; `times_plain` against the one without a group that does as much."""
    plain = rates[PLAIN if way.works else BARE]
    return {
        "msg_per_s": round(statistics.median(rates[way])),
        "times_plain": round(statistics.median(a / b for a, b in zip(rates[way], plain, strict=True)), 3),
        "of_medians": round(statistics.median(rates[way]) / statistics.median(plain), 3),
        "rounds_msg_per_s": [round(rate) for rate in rates[way]],
    }


def main() -> int:
    """Run, print, write JSON and page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=None, help="where the page goes; docs/benchmarks by default")
    args = parser.parse_args()
    configure_logging("error")
    described = machine()
    rates = asyncio.run(run(args))
    ways = {way.name: summary(way, rates) for way in WAYS}
    settings = {"messages": args.messages, "rounds": args.rounds, "limit": LIMIT}
    path = write_result("pinned", {"machine": described, "settings": settings, "ways": ways}, args.results)
    write_page(args.results, args.docs)
    for name, row in ways.items():
        rounds = " ".join(f"{rate / 1000:.0f}k" for rate in row["rounds_msg_per_s"])
        ratios = f"{row['times_plain']:.3f} x ({row['of_medians']:.3f} of the medians)"
        print(f"{name:<24} {row['msg_per_s']:>9,} msg/s   {ratios}   {rounds}")
    print(f"written to {path}")
    return 0 if ways[PINNED.name]["times_plain"] >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
