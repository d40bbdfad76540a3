"""Scale a fleet from 25 to 100 workers and back while messages flow, and look what it cost.

    python -m benchmarks.fleet_scale
    python -m benchmarks.fleet_scale --small 5 --large 15 --partitions 200 --rate 100

The workers live in few processes: one for the rebalancer alone, so that its CPU time can be told, the others shared
out over `--hosts`. Must come out: up and down in less than a minute together; every partition with exactly one owner
in the end; nothing lost, handled twice or out of order; a bounded number of consumer updates for each worker.
Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from benchmarks.audit import MSG_ID, Findings, Handled, audit, read_back
from benchmarks.fleet import Movement, Observer, Place, observing, shares
from benchmarks.fleet_hosts import Costs, Hosts
from benchmarks.fleet_processes import create_stream
from benchmarks.report import RESULTS
from benchmarks.verdicts import Verdict, conclude
from rich.console import Console
from rich.table import Table

from parti.embedded import Server
from parti.errors import PartiError
from parti.telemetry.logs import configure_logging

LIMIT_S = 60.0
UPDATES_LIMIT = 8
"""Consumer updates of one worker in one change of size, at most: joins and leaves are to be coalesced."""
_GIVE_UP_S = 90.0
_AT_ONCE = 200
console = Console(width=None if sys.stdout.isatty() else 150)


# ── messages ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Traffic:
    """Numbered messages over all partitions at a steady rate, each acknowledged by the stream."""

    def __init__(self, observer: Observer, partitions: Sequence[str], rate: float) -> None:
        self.sent_s: dict[str, float] = {}
        """When each message was sent, by its id."""
        self._api = observer.api
        self._subject = observer.place.template.replace("{p}", "{}")
        self._partitions = partitions
        self._rate = rate
        self._under_way: set[asyncio.Task[None]] = set()

    async def _run(self) -> None:
        began_s = time.monotonic()
        while True:
            due = int(self._rate * (time.monotonic() - began_s))
            while len(self.sent_s) < due and len(self._under_way) < _AT_ONCE:
                number = len(self.sent_s)
                self.sent_s[str(number)] = time.monotonic()
                task = asyncio.create_task(self._send(number))
                self._under_way.add(task)
                task.add_done_callback(self._under_way.discard)
            await asyncio.sleep(0.005)

    async def _send(self, number: int) -> None:
        subject = self._subject.format(self._partitions[number * 7919 % len(self._partitions)])
        while True:
            try:
                await self._api.publish(subject, b"x" * 128, headers={MSG_ID: str(number)})
            except PartiError:
                continue  # The same id again: the stream stores it once.
            return

    @asynccontextmanager
    async def flowing(self) -> AsyncIterator[None]:
        """Send for the length of a block; in the end all of it is stored."""
        sending = asyncio.create_task(self._run())
        try:
            yield
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            await asyncio.gather(*self._under_way)


# ── one run ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Phase:
    """One change of size."""

    before: int
    after: int
    joined_s: float
    """From the order until the last worker had come or gone."""
    settled_s: float
    """From the order until every partition was settled."""
    movement: Movement
    updates: tuple[int, int]
    """Consumer updates of a worker, mean x 100 and most."""
    skipped: int
    """Updates that were not sent because nothing had changed, all workers together."""
    rebalancer_cpu_s: float
    """CPU time of the process that holds the rebalancer, and one worker, in this phase."""
    workers_cpu_s: float
    """CPU time of all other workers."""
    server_cpu_s: float
    plans: int
    plan_ms: float
    """CPU time of the slowest decision."""
    plans_cpu_s: float
    batches: tuple[tuple[int, float], ...]
    """Claims in each batch, and milliseconds that it took."""
    latency_ms: tuple[float, float, float]
    """From the sending of a message to its handler: p50, p99, longest."""
    unclean: int
    """Workers that left without having stored everything."""
    failures: tuple[str, ...]
    """Why workers did not start at the first try."""
    problems: tuple[str, ...]


class Run:
    """A fleet that changes its size, seen from outside; `hosts` does what it is told."""

    def __init__(self, observer: Observer, hosts: Hosts, partitions: Sequence[str], server_pid: int) -> None:
        self._observer = observer
        self._hosts = hosts
        self._server = psutil.Process(server_pid)
        self._partitions = partitions
        self._costs: list[Costs] = []
        self.phases: list[Phase] = []
        self.spans_s: list[tuple[float, float]] = []

    def _server_cpu_s(self) -> float:
        used = self._server.cpu_times()
        return used.user + used.system

    async def change(self, after: int) -> None:
        """Order another size, wait until all is settled, and note what it took."""
        observer, server_cpu_s = self._observer, self._server_cpu_s()
        before, owners, began_s = len(observer.records.members), observer.owners, time.monotonic()
        said = {w: (h.updates, h.updates_skipped) for w, h in observer.records.health.items()}
        await self._hosts.resize(after)
        left = await observer.settle(self._partitions, after, _GIVE_UP_S)
        ended_s = time.monotonic() if left else observer.changed_s
        costs = (await self._hosts.resize(after))[1]
        came_or_went = [*observer.arrivals(began_s).values(), *observer.departures(began_s).values()]
        updates = [h.updates - said.get(w, (0, 0))[0] for w, h in observer.records.health.items()]
        skipped = [h.updates_skipped - said.get(w, (0, 0))[1] for w, h in observer.records.health.items()]
        past = self._costs or [Costs() for _ in costs]
        cpu = [now.cpu_s - was.cpu_s for now, was in zip(costs, past, strict=True)]
        plans = costs[0].plans_s[len(past[0].plans_s) :]
        self.spans_s.append((began_s, ended_s))
        self.phases.append(
            Phase(
                before=before,
                after=after,
                joined_s=round(max(came_or_went, default=began_s) - began_s, 2),
                settled_s=round(ended_s - began_s, 2),
                movement=observer.movement(owners, began_s),
                updates=(round(100 * statistics.fmean(updates)), max(updates)),
                skipped=sum(skipped),
                rebalancer_cpu_s=round(cpu[0], 2),
                workers_cpu_s=round(sum(cpu[1:]), 2),
                server_cpu_s=round(self._server_cpu_s() - server_cpu_s, 2),
                plans=len(plans),
                plan_ms=round(1000 * max(plans, default=0), 1),
                plans_cpu_s=round(sum(plans), 3),
                batches=tuple((n, round(1000 * s, 1)) for n, s in costs[0].batches[len(past[0].batches) :]),
                latency_ms=(0, 0, 0),
                unclean=sum(now.unclean - was.unclean for now, was in zip(costs, past, strict=True)),
                failures=tuple(
                    text for now, was in zip(costs, past, strict=True) for text in now.failures[len(was.failures) :]
                ),
                problems=tuple([left] if left else await observer.verify(self._partitions)),
            )
        )
        self._costs = costs


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a whole run showed."""

    phases: list[Phase]
    findings: Findings
    messages: int
    shares: tuple[int, int]

    @property
    def up_and_down_s(self) -> float:
        """Both changes together."""
        return sum(phase.settled_s for phase in self.phases[1:])


async def measure(options: argparse.Namespace) -> Outcome:
    """Start small, grow, shrink; messages flow from the first size on."""
    partitions = [f"p{n}" for n in range(options.partitions)]
    async with Server() as server:
        place = Place(server.url, "SCALE", "scale.{p}")
        await create_stream(server.url, place.stream, "scale.*", options.storage)
        hosts = Hosts(options.hosts, place, partitions, {})
        try:
            async with observing(place) as observer:
                run, traffic = (
                    Run(observer, hosts, partitions, server.pid),
                    Traffic(observer, partitions, options.rate),
                )
                await hosts.start_rebalancer()
                await run.change(options.small)
                console.print(f"{options.small} workers settled after {run.phases[0].settled_s} s")
                async with traffic.flowing():
                    for size in (options.large, options.small):
                        await asyncio.sleep(options.dwell)
                        await run.change(size)
                        console.print(f"{run.phases[-1].before} -> {size} settled after {run.phases[-1].settled_s} s")
                    await asyncio.sleep(options.dwell)
                owned = shares(observer.owners, observer.records.members)
                await _until_handled(hosts, options.small, len(traffic.sent_s))
            journal = await hosts.end()
            stored = await read_back(server.url, place.stream)
        finally:
            hosts.close()
    findings = audit(stored, journal, traffic.sent_s)
    return Outcome(_with_latencies(run, traffic, journal), findings, len(stored), owned)


async def _until_handled(hosts: Hosts, size: int, messages: int, timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while (await hosts.resize(size))[0] < messages and time.monotonic() < deadline_s:  # noqa: ASYNC110
        await asyncio.sleep(0.2)
    await asyncio.sleep(1.0)  # For what should not come: repeats.


def _with_latencies(run: Run, traffic: Traffic, journal: Sequence[Handled]) -> list[Phase]:
    phases = []
    for phase, (began_s, ended_s) in zip(run.phases, run.spans_s, strict=True):
        values = sorted(
            1000 * (entry.at_s - sent_s)
            for entry in journal
            if began_s <= (sent_s := traffic.sent_s.get(entry.id, 0.0)) < ended_s
        )
        cuts = statistics.quantiles(values, n=100) if len(values) > 1 else [0.0] * 99
        longest = values[-1] if values else 0.0
        latency = (round(cuts[49], 1), round(cuts[98], 1), round(longest, 1))
        phases.append(Phase(**{**{f: getattr(phase, f) for f in phase.__slots__}, "latency_ms": latency}))
    return phases


# ── what came out ─────────────────────────────────────────────────────────────────────────────────────────────────


def judge(outcome: Outcome) -> list[Verdict]:
    """What must be shown, against what was seen."""
    phases, findings = outcome.phases[1:], outcome.findings
    problems = [problem for phase in phases for problem in phase.problems]
    most = max(phase.updates[1] for phase in phases)
    sizes = " -> ".join(str(n) for n in (phases[0].before, *(phase.after for phase in phases)))
    found = ", ".join(f"{name.replace('_', ' ')} {number}" for name, number in asdict(findings).items())
    return [
        Verdict(
            f"{sizes} workers in under {LIMIT_S:g} s",
            f"{outcome.up_and_down_s:.1f} s",
            outcome.up_and_down_s < LIMIT_S,
        ),
        Verdict(
            "every partition has exactly one owner after each change",
            "; ".join(problems) or f"{outcome.shares[0]}-{outcome.shares[1]} for each worker in the end",
            not problems,
        ),
        Verdict(
            f"nothing lost, repeated or out of order in {outcome.messages:,} messages",
            f"{found}, unclean leaves {sum(phase.unclean for phase in phases)}",
            findings.clean and not any(phase.unclean for phase in phases),
        ),
        Verdict(
            f"at most {UPDATES_LIMIT} consumer updates of a worker in one change",
            f"most {most}, {sum(phase.skipped for phase in phases)} suppressed",
            most <= UPDATES_LIMIT,
        ),
    ]


def show(outcome: Outcome) -> None:
    """Print the table."""
    table = Table(title="a fleet that changes its size under traffic")
    table.add_column("what")
    for phase in outcome.phases:
        table.add_column(f"{phase.before} -> {phase.after}", justify="right")
    rows = {
        "last worker came or went after": lambda p: f"{p.joined_s} s",
        "settled after": lambda p: f"{p.settled_s} s",
        "moved / least possible / orphans": lambda p: (
            f"{p.movement.moved} / {p.movement.minimum} / {p.movement.orphans}"
        ),
        "handovers": lambda p: f"{p.movement.handovers}",
        "consumer updates of a worker, mean / most": lambda p: f"{p.updates[0] / 100:.2f} / {p.updates[1]}",
        "suppressed updates": lambda p: f"{p.skipped}",
        "CPU of the rebalancer's process / of all other workers / of the server": lambda p: (
            f"{p.rebalancer_cpu_s} / {p.workers_cpu_s} / {p.server_cpu_s} s"
        ),
        "decisions, CPU of all / of the slowest": lambda p: f"{p.plans}, {p.plans_cpu_s} s / {p.plan_ms} ms",
        "batches, claims in all": lambda p: f"{len(p.batches)}, {sum(n for n, _ in p.batches)}",
        "batch, most claims / slowest": lambda p: (
            f"{max((n for n, _ in p.batches), default=0)} / {max((ms for _, ms in p.batches), default=0)} ms"
        ),
        "failed starts": lambda p: f"{len(p.failures)}",
        "message to handler p50 / p99 / max": lambda p: " / ".join(f"{ms:,.0f}" for ms in p.latency_ms) + " ms",
    }
    for name, figure in rows.items():
        table.add_row(name, *map(figure, outcome.phases))
    console.print(table)
    for failure in {failure for phase in outcome.phases for failure in phase.failures}:
        console.print(f"a worker did not start: {failure}", style="yellow", highlight=False)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=int, default=25)
    parser.add_argument("--large", type=int, default=100)
    parser.add_argument("--hosts", type=int, default=5, help="processes for the workers besides the rebalancer")
    parser.add_argument("--partitions", type=int, default=2_000)
    parser.add_argument("--rate", type=float, default=500, help="messages a second")
    parser.add_argument("--dwell", type=float, default=3.0, help="seconds of rest before each change")
    parser.add_argument("--storage", choices=("file", "memory"), default="file")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory for the JSON result")
    return parser.parse_args(arguments)


def main() -> int:
    """Parse, run, show, write."""
    options = parse()
    configure_logging("error", "console")
    outcome = asyncio.run(measure(options))
    show(outcome)
    figures = {
        "up_and_down_s": round(outcome.up_and_down_s, 2),
        "messages": outcome.messages,
        **asdict(outcome.findings),
        "phases": [asdict(phase) for phase in outcome.phases],
    }
    return conclude("fleet_scale", options, judge(outcome), figures, console)


if __name__ == "__main__":
    sys.exit(main())
