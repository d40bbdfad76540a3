"""A load ramp on one consumer with the policy `overflow`: when does the remote region help, and when not?

    python -m benchmarks.bench_overflow

`near` pulls without conditions, `far` with min_pending: it is to be served only while at least so many messages wait.
Each can do a fixed number of messages a second. The load rises above what near can do, and falls again. Every message
tells how many were pending when it was given out. Exit code 1 when far got one below its threshold, got none although
the threshold was passed, or a message was lost or came twice.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.priority_page import write_page
from benchmarks.report import RESULTS, LiveLine, machine, write_result

from parti.config import Settings
from parti.core.priority import Policy, PriorityGroup
from parti.embedded import Server
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.priority import ensure_consumer
from parti.jetstream.pull_client import PullClient
from parti.telemetry.logs import configure_logging

STREAM, CONSUMER, GROUP = "RAMP", "ramp", "jobs"
HANDS = 10
"""Messages that a region works on at a time."""
SAMPLE_S = 0.25
RAMP = (0.3, 0.6, 0.9, 1.2, 1.5, 1.8, 1.5, 1.2, 0.9, 0.6, 0.3)
"""The load in steps, as shares of what near can do."""


@dataclass
class Region:
    """A client that does so many messages a second, and what it saw."""

    name: str
    per_s: float
    min_pending: int = 0
    seqs: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    """How many were waiting when each message was given out, itself included."""

    async def work(self, client: PullClient) -> None:
        """Take messages until the client ends."""

        async def hand() -> None:
            async for message in client:
                self.seqs.append(message.seq)
                self.pending.append(message.delivery.pending + 1)
                await asyncio.sleep(HANDS / self.per_s)
                message.ack()

        await asyncio.gather(*(hand() for _ in range(HANDS)))


@dataclass(frozen=True, slots=True)
class Sample:
    """What happened in a quarter of a second, and what waited at its end."""

    at_s: float
    offered_per_s: float
    near_per_s: float
    far_per_s: float
    waiting: int


async def publish(api: JetStreamApi, steps: list[tuple[float, float]], offered: Counter[str]) -> None:
    """Offer each rate for its seconds."""
    for rate, seconds in steps:
        begin, sent = time.monotonic(), 0
        while (elapsed_s := time.monotonic() - begin) < seconds:
            due = int(rate * elapsed_s) - sent
            await asyncio.gather(*(api.publish("ramp.item", b"x" * 64) for _ in range(due)))
            sent += due
            offered["messages"] += due
            await asyncio.sleep(0.01)


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the ramp; returns samples and totals."""
    near = Region("near", args.near)
    far = Region("far", args.far, args.min_pending)
    steps = [(share * args.near, args.seconds / (len(RAMP) + 1)) for share in RAMP]
    offered: Counter[str] = Counter()
    samples: list[Sample] = []
    live = LiveLine()
    async with Server() as server:
        connection = await Connection.open(Settings(nats=(server.url,)), name="ramp")
        api = JetStreamApi(connection)
        await api.call(f"STREAM.CREATE.{STREAM}", {"name": STREAM, "subjects": ["ramp.>"], "storage": "memory"})
        await ensure_consumer(connection, STREAM, CONSUMER, PriorityGroup(GROUP, Policy.OVERFLOW))
        place: dict[str, Any] = {"stream": STREAM, "consumer": CONSUMER, "group": GROUP, "limit": HANDS}
        async with (
            PullClient(server.url, **place) as first,
            PullClient(server.url, min_pending=far.min_pending, **place) as second,
        ):
            works = [asyncio.create_task(near.work(first)), asyncio.create_task(far.work(second))]
            publishing = asyncio.create_task(publish(api, steps, offered))
            began, before = time.monotonic(), (time.monotonic(), 0, 0, 0)
            while True:
                await asyncio.sleep(SAMPLE_S)
                info = await api.consumer_info(STREAM, CONSUMER)
                now = (time.monotonic(), offered["messages"], len(near.seqs), len(far.seqs))
                took_s = now[0] - before[0]
                load, ours, theirs = (
                    round((new - old) / took_s, 1) for new, old in zip(now[1:], before[1:], strict=True)
                )
                samples.append(Sample(round(now[0] - began, 2), load, ours, theirs, info.pending))
                before = now
                live.show(f"{samples[-1].at_s:5.1f} s: waiting {info.pending:,}, far {samples[-1].far_per_s:g}/s")
                if publishing.done() and not info.pending and not info.ack_pending:
                    break
        await asyncio.gather(publishing, *works)
        await connection.close()
    live.end()
    seqs = Counter(near.seqs + far.seqs)
    return {
        "published": offered["messages"],
        "near": len(near.seqs),
        "far": len(far.seqs),
        "far_below_threshold": sum(pending < far.min_pending for pending in far.pending),
        "far_lowest_pending": min(far.pending, default=None),
        "far_median_pending": statistics.median(far.pending) if far.pending else None,
        "lost": offered["messages"] - len(seqs),
        "repeated": sum(count - 1 for count in seqs.values()),
        "most_waiting": max(sample.waiting for sample in samples),
        "samples": [asdict(sample) for sample in samples],
    }


def main() -> int:
    """Run, print, write JSON and page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=48.0)
    parser.add_argument("--near", type=float, default=400.0, help="messages a second that near can do")
    parser.add_argument("--far", type=float, default=400.0, help="messages a second that far can do")
    parser.add_argument("--min-pending", type=int, default=100)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=None, help="where the page goes; docs/benchmarks by default")
    args = parser.parse_args()
    configure_logging("error")
    described = machine()
    found = asyncio.run(measure(args))
    settings = {
        "seconds": args.seconds,
        "near": args.near,
        "far": args.far,
        "min_pending": args.min_pending,
        "lowest": min(RAMP) * args.near,
        "highest": max(RAMP) * args.near,
    }
    path = write_result("overflow", {"machine": described, "settings": settings, **found}, args.results)
    write_page(args.results, args.docs)
    print(
        f"published {found['published']:,}: near {found['near']:,}, far {found['far']:,}; far got "
        f"{found['far_below_threshold']} below its threshold of {args.min_pending} (lowest "
        f"{found['far_lowest_pending']}); lost {found['lost']}, repeated {found['repeated']}"
    )
    print(f"written to {path}")
    wrong = found["far_below_threshold"] or found["lost"] or found["repeated"]
    idle = found["far"] == 0 and found["most_waiting"] >= args.min_pending
    return 1 if wrong or idle else 0


if __name__ == "__main__":
    sys.exit(main())
