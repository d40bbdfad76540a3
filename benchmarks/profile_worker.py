"""Where the time of a message goes in a worker: a profile, grouped by what the code is for.

    python -m benchmarks.profile_worker --messages 200000

The worker of `benchmarks.bench_worker` (contender c: ordered, async handler that does nothing) drains a stream under
Python's own profiler. A profiler makes calls dearer than they are, so only the shares are meant; microseconds are the
shares of what a message takes without the profiler, CPU time of the process, measured first.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import sys
import time
from collections import defaultdict
from pathlib import Path

import nats
from benchmarks.bench_worker import Bench, contender_b, contender_c, fill
from benchmarks.report import RESULTS, write_result
from rich.console import Console
from rich.table import Table

from parti.embedded import Server
from parti.telemetry.logs import configure_logging

GROUPS = (
    ("reading the protocol", ("jetstream/protocol.py", "jetstream/wire.py")),
    ("pull engine", ("jetstream/pull.py", "core/batch.py", "core/pull_status.py")),
    ("lanes: order and positions", ("worker/lanes.py", "worker/roster.py", "core/lane.py", "model/message.py")),
    ("running handlers", ("worker/runners.py", "benchmarks/bench_worker.py", "telemetry/instruments.py")),
    ("acknowledgements", ("worker/acks.py",)),
    ("rest of parti", ("/parti/",)),
    ("client library", ("/nats/",)),
    ("event loop and sockets", ("asyncio/", "selectors.py", "select", "socket")),
)


def group_of(file: str, function: str) -> str:
    """What a function is for."""
    text = f"{file} {function}"
    return next((name for name, places in GROUPS if any(place in text for place in places)), "built-in functions")


def shares_of(profile: cProfile.Profile) -> dict[str, float]:
    """Each group's part of the time; built-in functions count to whoever calls them."""
    stats = pstats.Stats(profile)
    spent: dict[str, float] = defaultdict(float)
    for (file, _, function), (_, _, own_s, _, callers) in stats.stats.items():  # type: ignore[attr-defined]
        if file != "~":
            spent[group_of(file, function)] += own_s
            continue
        if "poll" in function or "epoll" in function:
            continue  # waiting is not work
        for (caller, _, name), (_, _, by_caller_s, _) in callers.items():
            spent[group_of(caller, name)] += by_caller_s
    total = sum(spent.values()) or 1.0
    return {name: spent_s / total for name, spent_s in sorted(spent.items(), key=lambda item: -item[1])}


async def cpu_us(contender: object, bench: Bench, name: str) -> float:
    """CPU time of this process for one message."""
    began_s = time.process_time()
    await contender(bench, name)  # type: ignore[operator]
    return (time.process_time() - began_s) / bench.messages * 1e6


async def measure(messages: int, subjects: int, max_ack_pending: int) -> tuple[float, float, cProfile.Profile]:
    """CPU time a message takes in bare pulls and in parti, and parti's profile."""
    async with Server() as server:
        client = await nats.connect(server.url)
        await fill(client, messages, subjects)
        await client.close()
        bench = Bench(server.url, messages, max_ack_pending, max_ack_pending * 2 // 5)
        bare = min([await cpu_us(contender_b, bench, f"bare-{n}") for n in range(3)])
        ours = min([await cpu_us(contender_c, bench, f"ours-{n}") for n in range(3)])
        profile = cProfile.Profile()
        profile.enable()
        try:
            await contender_c(bench, "profiled")
        finally:
            profile.disable()
    return bare, ours, profile


def main() -> int:
    """Run, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--subjects", type=int, default=2_000)
    parser.add_argument("--max-ack-pending", type=int, default=2_000)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    configure_logging("error")
    bare, ours, profile = asyncio.run(measure(options.messages, options.subjects, options.max_ack_pending))
    shares = shares_of(profile)
    table = Table(title=f"a message in a worker: {ours:.1f} us of CPU time; in bare pulls {bare:.1f} us")
    for column in ("part", "share", "us"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for name, share in shares.items():
        table.add_row(name, f"{share:.0%}", f"{share * ours:.2f}")
    Console().print(table)
    path = write_result(
        "profile_worker",
        {"bare_us": round(bare, 2), "parti_us": round(ours, 2), "ratio": round(ours / bare, 2), "shares": shares},
        options.results,
    )
    print(f"written to {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
