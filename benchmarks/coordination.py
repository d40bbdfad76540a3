"""How fast the fleet agrees: elections, membership, discovery and assignment, and what the bucket takes for it.

    python -m benchmarks.coordination
    python -m benchmarks.coordination --rounds 2 --operations 100

First single operations on a bucket of the size of a fleet of 100 workers and 2,000 partitions, then a fleet of real
`parti worker` processes whose rebalancer is told to leave, and killed, again and again. The figures of seed 004 are
what it is held against: election 20-50 ms, operations 5-15 ms, membership below 1 s by system events, discovery
below 100 ms. Times are those at which an observer with a watch of its own saw the records. Exit code 1 if one of the
figures is not met.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import nats
from benchmarks.control_plane import (
    Ledger,
    Timing,
    compare_writes,
    time_decisions,
    time_discovery,
    time_operations,
    timed,
)
from benchmarks.fleet import Observer, Place, observing
from benchmarks.fleet_processes import Processes, create_stream, worker_processes
from benchmarks.report import RESULTS
from benchmarks.verdicts import Verdict, conclude
from pydantic import SecretStr
from rich.console import Console
from rich.table import Table

from parti.config import Settings
from parti.embedded import Server
from parti.jetstream.system_events import SystemEvents
from parti.model.fleet import LeaderRecord, MemberRecord, key_of
from parti.telemetry.logs import configure_logging

ELECTION_MS, OPERATION_MS, DETECTION_MS, DISCOVERY_MS = 50.0, 15.0, 1_000.0, 100.0
_LEADER = key_of("leader", "rebalancer")
_WORKERS = 4
_GIVE_UP_S = 60.0
_REST_S = 2.0
_PING_S = 1.0
_SYSTEM_ACCOUNT = """
accounts {
  SYS { users: [{ user: sys, password: sys }] }
  APP { jetstream: enabled, users: [{ user: app, password: app }] }
}
system_account: SYS
no_auth_user: app
"""
console = Console(width=None if sys.stdout.isatty() else 150)


@dataclass(slots=True)
class Samples:
    """Durations in seconds, by what was measured."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, what: str, seconds: float) -> None:
        """One more."""
        self.seconds.setdefault(what, []).append(seconds)

    def timings(self) -> list[Timing]:
        """All of them, summed up."""
        return [Timing.of(what, seconds) for what, seconds in self.seconds.items()]


class Drill:
    """A fleet whose rebalancer is made to go, again and again."""

    def __init__(
        self, observer: Observer, processes: Processes, partitions: list[str], settings: Settings, samples: Samples
    ) -> None:
        self.disconnected_s: dict[str, float] = {}
        """When the server said that a client is gone, by client."""
        self._observer = observer
        self._processes = processes
        self._partitions = partitions
        self._settings = settings
        self._samples = samples

    def note_disconnect(self, client: str, _reason: str) -> None:
        """The server says that a client is gone."""
        self.disconnected_s.setdefault(client, time.monotonic())

    async def join(self) -> None:
        """Start workers until there are enough, and see how long it takes until they own their share."""
        observer, samples = self._observer, self._samples
        began_s, offset_s = time.monotonic(), time.time() - time.monotonic()
        missing = _WORKERS - len(self._processes.running)
        first = not self._processes.running
        self._processes.start(missing)
        await self._settled()
        came = observer.arrivals(began_s)
        for key, at_s in came.items():
            record = observer.records.members[key.partition(".")[2]]
            samples.add("join: lease written to seen", at_s - (record.started_at.timestamp() - offset_s))
        if not first:
            took_s = observer.changed_s - max(came.values())
            samples.add("join to owning its share, without the window", took_s - self._settings.scale_window_s)

    async def leave(self) -> None:
        """Let the rebalancer leave in good order."""
        observer, samples, leader = self._observer, self._samples, self._observer.leader
        began_s = time.monotonic()
        await self._end(leader, signal.SIGTERM)
        await self._settled()
        gone_s = observer.departures(began_s)[key_of("ids", leader)]
        samples.add("leave: SIGTERM to seen", gone_s - began_s)
        samples.add("leave to owned by others", observer.changed_s - gone_s)
        ended_s, elected_s = self._succession(began_s)
        samples.add("election after the leader resigned", elected_s - ended_s)

    async def crash(self, *, rebalancer: bool) -> None:
        """Kill the rebalancer, or another worker."""
        observer, samples, settings = self._observer, self._samples, self._settings
        members, leader = observer.records.members, observer.leader
        worker = leader if rebalancer else next(w for w in members if w != leader)
        name = f"crash{' of the rebalancer' * rebalancer}{', takeover' * settings.takeover_on_disconnect}"
        key, client = key_of("ids", worker), members[worker].client
        killed_s = time.monotonic()
        await self._end(worker, signal.SIGKILL)
        await self._settled()
        gone_s = observer.departures(killed_s)[key]
        samples.add(f"{name}: SIGKILL to the server's event", self.disconnected_s[client] - killed_s)
        samples.add(f"{name}: SIGKILL to lost", gone_s - killed_s)
        if not settings.takeover_on_disconnect:
            samples.add(
                f"{name}: end of the lease to lost", gone_s - self._renewed_s(key, gone_s) - settings.lease_ttl_s
            )
        samples.add(f"{name}: SIGKILL to owned by others", observer.changed_s - killed_s)
        if rebalancer:
            ended_s, elected_s = self._succession(killed_s)
            term_ended_s = self._renewed_s(_LEADER, ended_s) + settings.leader_ttl_s
            samples.add("election after the lease of a killed leader was seen to end", elected_s - ended_s)
            samples.add("the same from the end of the lease", elected_s - term_ended_s)
            samples.add("the same from the SIGKILL", elected_s - killed_s)

    async def _end(self, worker: str, how: signal.Signals) -> None:
        going = self._processes.end([self._observer.records.members[worker].pid], how)
        await asyncio.to_thread(lambda: [process.wait(_GIVE_UP_S) for process in going])

    async def _settled(self) -> None:
        left = await self._observer.settle(self._partitions, len(self._processes.running), _GIVE_UP_S)
        if left:
            raise TimeoutError(f"the fleet did not settle: {left}; logged: {self._processes.complaints()}")
        await asyncio.sleep(_REST_S)

    def _succession(self, since_s: float) -> tuple[float, float]:
        """When the lease of a leader was seen to be gone, and when the next one was seen."""
        seen = self._observer.of(_LEADER, since_s)
        ended_s = next(s.at_s for s in seen if s.record is None)
        return ended_s, next(s.at_s for s in seen if s.record is not None and s.at_s >= ended_s)

    def _renewed_s(self, key: str, before_s: float) -> float:
        """When a lease was last seen to be renewed."""
        seen = [s.at_s for s in self._observer.of(key) if s.at_s < before_s and _is_live(s.record)]
        return max(seen)


def _is_live(record: MemberRecord | LeaderRecord | None) -> bool:
    return record is not None and (isinstance(record, LeaderRecord) or record.state == "active")


async def ping(url: str, expected: int) -> float:
    """Ask all workers to show up as NATS micro services; returns how long it took to hear of all, or infinity."""
    client = await nats.connect(url)
    try:
        heard, complete = set[bytes](), asyncio.Event()

        async def on_answer(msg: Any) -> None:
            heard.add(msg.data)
            if len(heard) >= expected:
                complete.set()

        inbox = client.new_inbox()
        await client.subscribe(inbox, cb=on_answer)
        await client.flush()
        began_s = time.perf_counter()
        await client.publish("$SRV.PING.parti", b"", reply=inbox)
        with suppress(TimeoutError):
            async with asyncio.timeout(_PING_S):
                await complete.wait()
                return time.perf_counter() - began_s
        return float("inf")
    finally:
        await client.close()


async def drill(options: argparse.Namespace, samples: Samples, *, takeover: bool) -> None:
    """Elections, joins, leaves and crashes of a real fleet; with `takeover` it hears the server's system events."""
    chosen: dict[str, Any] = {"system_user": "sys", "system_password": "sys", "takeover_on_disconnect": True}
    chosen = chosen if takeover else {}
    async with Server(config=_SYSTEM_ACCOUNT) as server:
        place = Place(server.url, "AGREE", "agree.{p}")
        await create_stream(server.url, place.stream, "agree.*")
        partitions = [f"p{n}" for n in range(options.partitions)]
        settings = Settings(nats=(server.url,), **chosen)
        with worker_processes(place, partitions, chosen) as processes:
            async with observing(place) as observer:
                fleet = Drill(observer, processes, partitions, settings, samples)
                events = SystemEvents(
                    settings.model_copy(update={"user": "sys", "password": SecretStr("sys")}),
                    on_connect=lambda ref: None,
                    on_disconnect=fleet.note_disconnect,
                )
                await events.start()
                try:
                    await fleet.join()
                    if not takeover:
                        await _discover(server.url, samples)
                    for number in range(options.rounds):
                        console.print(f"round {number + 1} of {options.rounds}{', takeover' * takeover}")
                        await fleet.crash(rebalancer=False)
                        await fleet.join()
                        if not takeover:
                            await fleet.leave()
                            await fleet.join()
                            await fleet.crash(rebalancer=True)
                            await fleet.join()
                finally:
                    await events.stop()


async def _discover(url: str, samples: Samples) -> None:
    for _ in range(20):
        took_s = await ping(url, _WORKERS)
        samples.add(f"$SRV.PING.parti: answers of all {_WORKERS} workers", took_s)


async def measure_bucket(options: argparse.Namespace) -> list[Timing]:
    """Single operations on a bucket of the size of a fleet."""
    async with Server() as server, observing(Place(server.url, "NONE", "none.{p}")) as observer:
        await observer.stop()
        ledger = Ledger(observer.plane.bucket)
        await ledger.fill()
        return [
            *await time_operations(ledger, options.operations),
            *await compare_writes(ledger, 5),
            await time_discovery(observer.plane, 10),
            await timed("read all members and leaders", 20, lambda n: observer.plane.read("ids.>", "leader.*")),
        ]


# ── what came out ─────────────────────────────────────────────────────────────────────────────────────────────────


def judge(timings: Mapping[str, Timing]) -> list[Verdict]:
    """The figures of seed 004, against what was seen."""
    found: list[Verdict] = []

    def hold(what: str, limit_ms: float, figure: Callable[[Timing], float], unit: str, key: str) -> None:
        timing = timings.get(key)
        value = figure(timing) if timing else float("inf")
        found.append(Verdict(f"{what} (seed 004: {limit_ms:g} ms)", f"{unit} {value:.1f} ms", value <= limit_ms))

    def p50(timing: Timing) -> float:
        return timing.p50_ms

    def p99(timing: Timing) -> float:
        return timing.p99_ms

    hold("election after a resignation", ELECTION_MS, p50, "p50", "election after the leader resigned")
    seen = "election after the lease of a killed leader was seen to end"
    hold("election after the end of a lease", ELECTION_MS, p50, "p50", seen)
    for operation in ("get a key from the leader", "compare-and-set of a key", "heartbeat: lease, then health"):
        hold(operation, OPERATION_MS, p99, "p99", operation)
    hold("a killed worker seen by system events", DETECTION_MS, p99, "p99", "crash: SIGKILL to the server's event")
    hold("the same with takeover on disconnect", DETECTION_MS, p99, "p99", "crash, takeover: SIGKILL to lost")
    hold("a worker that leaves is seen", DETECTION_MS, p99, "p99", "leave: SIGTERM to seen")
    hold("a worker that joins is seen", DETECTION_MS, p99, "p99", "join: lease written to seen")
    hold("discovery by $SRV.PING", DISCOVERY_MS, p99, "p99", f"$SRV.PING.parti: answers of all {_WORKERS} workers")
    hold("discovery by the bucket", DISCOVERY_MS, p50, "p50", "read all members and leaders")
    batched, pipelined = (next(t for w, t in timings.items() if way in w) for way in ("atomic", "pipelined"))
    found.append(
        Verdict(
            "claims are written in the faster way, atomic batches",
            f"{batched.p50_ms:.0f} ms against {pipelined.p50_ms:.0f} ms for 2,000",
            batched.p50_ms <= pipelined.p50_ms,
        )
    )
    return found


def show(timings: Mapping[str, Timing]) -> None:
    """Print the table."""
    table = Table(title="what agreeing takes, in milliseconds")
    for name in ("what", "n", "p50", "p99", "max"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for t in timings.values():
        table.add_row(t.what, str(t.count), *(f"{ms:,.2f}" for ms in (t.p50_ms, t.p99_ms, t.max_ms)))
    console.print(table)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=1_000, help="repetitions of the single operations")
    parser.add_argument("--rounds", type=int, default=5, help="leaves and crashes of the rebalancer")
    parser.add_argument("--partitions", type=int, default=200, help="partitions of the fleet of processes")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory for the JSON result")
    return parser.parse_args(arguments)


async def measure(options: argparse.Namespace) -> dict[str, Timing]:
    """All figures, by what they are of."""
    console.print("decisions")
    timings = [*time_decisions("sticky", 7), *time_decisions("hash", 7)]
    console.print("operations")
    timings += await measure_bucket(options)
    samples = Samples()
    await drill(options, samples, takeover=False)
    await drill(options, samples, takeover=True)
    return {timing.what: timing for timing in [*timings, *samples.timings()]}


def main() -> int:
    """Parse, run, show, write."""
    options = parse()
    configure_logging("error", "console")
    timings = asyncio.run(measure(options))
    show(timings)
    figures = {
        "timings": [asdict(timing) for timing in timings.values()],
    }
    return conclude("coordination", options, judge(timings), figures, console)


if __name__ == "__main__":
    sys.exit(main())
