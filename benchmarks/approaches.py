"""One consumer for each partition, many streams, or one consumer for each worker: what does each cost?

    python -m benchmarks.approaches
    python -m benchmarks.approaches --only C,C+mirror
    python -m benchmarks.approaches --page          the page again, from the last result

The topologies of `benchmarks.topologies`, each on a fresh nats-server with the same readers and the same load: time
to create, memory, latency and server CPU at rising rates, drain of a backlog, recovery from a stall of all readers, a
worker that leaves. A whole run takes about ten minutes and writes `benchmarks/results/approaches.json` and
`docs/benchmarks/approaches.md`; a quick or partial one writes both to `build/approaches` unless told otherwise.

This measures and judges nothing: exit code 1 only when a phase failed, 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.approach_page import show, write_page
from benchmarks.approach_phases import Plan, Stage
from benchmarks.lean_readers import BATCH, SLOTS, Readers
from benchmarks.remote import Remote, RemoteError
from benchmarks.report import RESULTS, machine, write_result
from benchmarks.server_costs import ServerCosts
from benchmarks.stamped_load import PAYLOAD_BYTES, WINDOW, Load
from benchmarks.topologies import TOPOLOGIES, Size, Topology
from rich.console import Console

from parti.config import Settings
from parti.embedded import Server
from parti.errors import PartiError
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.telemetry.logs import configure_logging

ROOT = Path(__file__).parents[1]
NAME = "approaches"
DOCS, PARTIAL = ROOT / "docs" / "benchmarks", ROOT / "build" / NAME
QUICK = (
    Size(partitions=20, workers=2, streams=4),
    Plan(
        rates=(100, 200),
        warm_s=0.1,
        measure_s=0.3,
        idle_s=0.1,
        backlog=200,
        drain_limit_s=5.0,
        stall_rate=200,
        stall_s=0.2,
        before_stall_s=0.3,
        recovery_limit_s=3.0,
        rebalance_rate=100,
        rebalance_limit_s=5.0,
        patience_s=0.0,
        calm_s=0.05,
        quiet_s=0.25,
    ),
)
console = Console(width=None if sys.stdout.isatty() else 200)


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        """Leave with exit code 2."""
        self.exit(2, f"approaches: {message}\n")


async def measure(topology: Topology, plan: Plan, readers: Remote, load: Remote) -> dict[str, Any]:
    """All phases of one topology on a server of its own; a phase that fails is the last one."""
    began_s = time.monotonic()
    found: dict[str, Any] = {"title": topology.title}
    async with Server() as server:
        connection = await Connection.open(Settings(nats=(server.url,)), name=NAME)
        costs = ServerCosts(server.pid, readers.pid, load.pid, patience_s=plan.patience_s)
        stage = Stage(topology, plan, JetStreamApi(connection, timeout_s=30.0), costs, readers, load)
        steps: dict[str, Callable[[], Awaitable[dict[str, Any]]]] = {
            "create": stage.create,
            **{f"hold {rate} msg/s": partial(stage.hold, rate) for rate in plan.rates},
            "drain": stage.drain,
            "stall": stage.stall,
            "rebalance": stage.rebalance,
        }
        phase = "connect"
        try:
            async with asyncio.timeout(plan.limit_s):
                await readers.call("connect", server.url, topology.size.workers)
                await load.call("connect", server.url, list(topology.subjects))
                for phase, step in steps.items():
                    await costs.quiet()
                    note(found, phase, await _told(topology.key, phase, step()))
                found["oddities"] = await readers.call("oddities")
                found["sent"], _, found["refused"] = await load.call("count")
                await readers.call("close")
                await load.call("close")
        except (PartiError, RemoteError, TimeoutError) as error:
            found["failure"] = f"{phase}: {str(error) or 'not done in time'}"
        finally:
            await connection.close()
        found["rss_most_mb"] = costs.most_rss_mb
    found["took_s"] = round(time.monotonic() - began_s, 1)
    return found


def note(found: dict[str, Any], phase: str, figures: dict[str, Any]) -> None:
    """Put the figures of a phase where the page looks for them; less than at a lower rate is a collapse, too."""
    if phase == "create":
        found |= {**figures, "rates": []}
    elif phase.startswith("hold"):
        best = max((lower["delivered_per_s"] for lower in found["rates"]), default=0)
        fell = figures["delivered_per_s"] < 0.8 * best
        found["rates"].append({**figures, "collapsed": figures["collapsed"] or fell})
    else:
        found[phase] = figures


async def _told(key: str, phase: str, step: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """Say what came out of a phase as soon as it is there."""
    found = await step
    figures = ", ".join(f"{name} {value}" for name, value in found.items() if name != "curve")
    console.print(f"{key}, {phase}: {figures}", highlight=False, soft_wrap=True, style="dim")
    return found


async def run(keys: list[str], size: Size, plan: Plan) -> dict[str, Any]:
    """One topology after the other; readers and publisher are the same two processes for all."""
    described, began_s = machine(), time.monotonic()
    readers, load = Remote(Readers), Remote(Load)
    found: dict[str, Any] = {}
    try:
        for key in keys:
            topology = TOPOLOGIES[key](size)
            console.print(f"{key}: {topology.title}")
            found[key] = await measure(topology, plan, readers, load)
    finally:
        readers.close()
        load.close()
    shape = {"payload_bytes": PAYLOAD_BYTES, "batch": BATCH, "slots": SLOTS, "window": WINDOW}
    return {
        "machine": described,
        "settings": {**asdict(size), **shape, "plan": asdict(plan)},
        "took_s": round(time.monotonic() - began_s, 1),
        "topologies": found,
    }


def chosen(text: str) -> list[str]:
    """The topologies that are named, in their usual order."""
    names = [name.strip() for name in text.split(",")]
    if unknown := sorted(set(names) - set(TOPOLOGIES)):
        raise argparse.ArgumentTypeError(
            f"unknown topology {', '.join(map(repr, unknown))}: expected some of {','.join(TOPOLOGIES)}"
        )
    return [key for key in TOPOLOGIES if key in names]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=chosen, metavar="KEYS", help=f"some of {','.join(TOPOLOGIES)}")
    parser.add_argument("--quick", action="store_true", help="20 partitions and a few hundred messages: does it run?")
    parser.add_argument("--page", action="store_true", help="measure nothing; write the page from the last result")
    parser.add_argument("--results", type=Path, metavar="DIR", help="directory for the JSON result")
    parser.add_argument("--docs", type=Path, metavar="DIR", help="directory for the page and its plots")
    options = parser.parse_args(arguments)
    if options.page and (options.only or options.quick):
        parser.error("--page measures nothing: expected no --only and no --quick with it")
    whole = not options.only and not options.quick
    options.results = options.results or (RESULTS if whole else PARTIAL)
    options.docs = options.docs or (DOCS if whole else PARTIAL)
    for directory in (options.results, options.docs):
        if directory.exists() and not directory.is_dir():
            parser.error(f"{directory} is not a directory: name another")
    if options.page and not (options.results / f"{NAME}.json").is_file():
        parser.error(f"there is no {options.results / f'{NAME}.json'} to make a page from: run without --page first")
    return options


def main() -> int:
    """Parse, run, show, write."""
    options = parse()
    configure_logging("error", "console")
    if options.page:
        path = options.results / f"{NAME}.json"
    else:
        size, plan = QUICK if options.quick else (Size(), Plan())
        try:
            result = asyncio.run(run(options.only or list(TOPOLOGIES), size, plan))
        except PartiError as error:
            print(f"approaches: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
        path = write_result(NAME, result, options.results)
    # From the file, so that the page never says more than the result does.
    result = json.loads(path.read_text())
    show(result, console)
    page = write_page(result, options.docs)
    console.print(f"{path} and {page}", highlight=False, soft_wrap=True)
    return 1 if any("failure" in found for found in result["topologies"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
