"""Does one partition whose handler sleeps delay the others?

    python -m benchmarks.slow_partition --rate 1000 --sleep 60

Messages come at a steady rate over all partitions, each with the time at which it was sent. Latency is the time from
there to the start of its handler. First without a sleeper, then with one (or `--sleepers`): a handler of partition 0
sleeps, while its own messages keep coming like all others. Once with an `async def` handler, once with a plain
function in a thread. Exit code 1 if the p99 of the other partitions more than doubles, or if some messages were never
handled.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Event
from pathlib import Path

import nats
from benchmarks.report import RESULTS, LiveLine, write_result
from benchmarks.traffic import connect
from nats.js.api import StreamConfig
from rich.console import Console
from rich.table import Table

import parti
from parti.embedded import Server
from parti.telemetry.logs import configure_logging

STREAM = "SLOW"
RATIO_LIMIT = 2.0
_WARM_UP_S = 2.0
_TAIL_S = 90.0
console = Console()


def publish(url: str, partitions: int, rate: float, stop: Event) -> None:
    """The publisher's process: evenly spread over time and partitions, each message with its send time."""
    asyncio.run(_publish(url, partitions, rate, stop))


async def _publish(url: str, partitions: int, rate: float, stop: Event) -> None:
    client = await connect(url)
    sent, started_s = 0, time.monotonic()
    try:
        while not stop.is_set():
            due = int(rate * (time.monotonic() - started_s))
            while sent < due:
                await client.publish(f"slow.{sent % partitions}", b"%d" % time.time_ns())
                sent += 1
            await client.flush()
            await asyncio.sleep(0.002)
    finally:
        await client.close()


@dataclass(frozen=True, slots=True)
class Latency:
    """Latencies of the other partitions in one phase, in milliseconds."""

    messages: int
    p50_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one kind of handler showed."""

    kind: str
    without: Latency
    asleep: Latency
    handled_while_asleep: int
    """Messages of other partitions whose handler began during the sleep."""
    sleeper_backlog: int
    """Messages that came for sleeping partitions in the meantime."""
    unhandled: int

    @property
    def ratio(self) -> float:
        """The p99 with a sleeper over the p99 without."""
        return self.asleep.p99_ms / self.without.p99_ms

    @property
    def passed(self) -> bool:
        """Whether the others were left alone."""
        return self.ratio <= RATIO_LIMIT and not self.unhandled


class Run:
    """One server, worker and publisher, through both phases."""

    def __init__(self, kind: str, options: argparse.Namespace) -> None:
        self._kind = kind
        self._options = options
        self._others: list[tuple[int, int]] = []
        self._own = 0
        self._own_before = 0
        self._armed = False
        self._slept_from_ns = 0
        self._sleepers = {f"slow.{n}" for n in range(options.sleepers)}
        self._awake = set(self._sleepers)
        self._line = LiveLine()

    def _app(self) -> parti.App:
        options = self._options
        app = parti.App(
            stream=STREAM,
            subject="slow.{partition}",
            partitions=[str(n) for n in range(options.partitions)],
            max_ack_pending=options.max_ack_pending,
        )
        if self._kind == "async":

            @app.handler
            async def handle(message: parti.Message) -> None:
                if self._begin(message):
                    await asyncio.sleep(options.sleep)

        else:

            @app.handler
            def handle_plain(message: parti.Message) -> None:
                if self._begin(message):
                    time.sleep(options.sleep)

        return app

    def _begin(self, message: parti.Message) -> bool:
        """Note a message; True when its handler is to sleep: once for each sleeper."""
        now_ns = time.time_ns()
        if message.subject not in self._sleepers:
            self._others.append((int(message.data), now_ns))
            return False
        self._own += 1
        if not self._armed or message.subject not in self._awake:
            return False
        self._awake.remove(message.subject)
        if not self._slept_from_ns:
            self._slept_from_ns, self._own_before = now_ns, self._own
        return True

    async def measure(self) -> Outcome:
        """Run both phases and wait until all that was sent is handled, however late."""
        options = self._options
        context = multiprocessing.get_context("spawn")
        stop = context.Event()
        async with Server() as server:
            client = await nats.connect(server.url)
            js = client.jetstream()
            await js.add_stream(StreamConfig(name=STREAM, subjects=["slow.*"]))
            arguments = (server.url, options.partitions, options.rate, stop)
            publisher = context.Process(target=publish, args=arguments, daemon=True)
            async with self._app().running(nats=server.url):
                publisher.start()
                try:
                    await self._wait(lambda: bool(self._others), 30, "the first message")
                    await self._wait(lambda: False, _WARM_UP_S, "warm-up")
                    base_ns = time.time_ns()
                    await self._wait(lambda: False, options.baseline, "baseline")
                    self._armed = True
                    await self._wait(lambda: bool(self._slept_from_ns), 30, "the sleeper")
                    end_ns = self._slept_from_ns + int(options.sleep * 1e9)
                    await self._wait(lambda: time.time_ns() >= end_ns, options.sleep + 5, "the sleep's end")
                finally:
                    stop.set()
                    await asyncio.to_thread(publisher.join, 10)
                sent = (await js.stream_info(STREAM)).state.messages
                await self._wait(lambda: len(self._others) + self._own >= sent, _TAIL_S, "the rest")
            await client.close()
        self._line.end()
        sleeping = [(sent_ns, at_ns) for sent_ns, at_ns in self._others if self._slept_from_ns <= sent_ns < end_ns]
        return Outcome(
            kind=self._kind,
            without=_latency([s for s in self._others if base_ns <= s[0] < self._slept_from_ns]),
            asleep=_latency(sleeping),
            handled_while_asleep=sum(self._slept_from_ns <= at_ns < end_ns for _, at_ns in self._others),
            sleeper_backlog=self._own - self._own_before,
            unhandled=sent - len(self._others) - self._own,
        )

    async def _wait(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        deadline_s = time.monotonic() + seconds
        while not done() and time.monotonic() < deadline_s:
            handled = len(self._others) + self._own
            self._line.show(f"{self._kind}: {what}, {deadline_s - time.monotonic():.0f} s left, handled {handled:,}")
            await asyncio.sleep(0.05)


def _latency(samples: list[tuple[int, int]]) -> Latency:
    values = sorted((at_ns - sent_ns) / 1e6 for sent_ns, at_ns in samples)
    cuts = statistics.quantiles(values, n=100)
    return Latency(len(values), round(cuts[49], 2), round(cuts[98], 2), round(values[-1], 2))


def _show(outcomes: list[Outcome], options: argparse.Namespace) -> None:
    asleep = f"{options.sleepers} of {options.partitions} partitions asleep for {options.sleep:g} s"
    table = Table(title=f"{asleep}, {options.rate:g} msg/s; ms")
    table.add_column("other partitions")
    for o in outcomes:
        table.add_column(o.kind, justify="right", style=None if o.passed else "red")

    def row(name: str, figure: Callable[[Outcome], str]) -> None:
        table.add_row(name, *map(figure, outcomes))

    row("p50 / p99 without", lambda o: f"{o.without.p50_ms:,.2f} / {o.without.p99_ms:,.2f}")
    row("p50 / p99 asleep", lambda o: f"{o.asleep.p50_ms:,.2f} / {o.asleep.p99_ms:,.2f}")
    row("max asleep", lambda o: f"{o.asleep.max_ms:,.2f}")
    row(f"p99 ratio (at most {RATIO_LIMIT:g})", lambda o: f"{o.ratio:.2f}")
    row("handled while asleep", lambda o: f"{o.handled_while_asleep:,} of {o.asleep.messages:,}")
    row("came for sleepers meanwhile", lambda o: f"{o.sleeper_backlog:,}")
    row("never handled", lambda o: f"{o.unhandled:,}")
    console.print(table)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partitions", type=int, default=200)
    parser.add_argument("--rate", type=float, default=1_000, help="messages a second over all partitions")
    parser.add_argument("--baseline", type=float, default=20, help="seconds without a sleeper")
    parser.add_argument("--sleep", type=float, default=60, help="seconds that the slow handler sleeps")
    parser.add_argument("--sleepers", type=int, default=1, help="partitions that sleep at the same time")
    parser.add_argument("--kinds", nargs="+", choices=("async", "plain"), default=["async", "plain"])
    parser.add_argument("--max-ack-pending", type=int, default=500)
    parser.add_argument("--name", default="slow_partition", help="name of the JSON result")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory for the JSON result")
    return parser.parse_args(arguments)


def main() -> int:
    """Parse, run, show, write."""
    options = parse()
    configure_logging("error", "console")
    outcomes = [asyncio.run(Run(kind, options).measure()) for kind in options.kinds]
    _show(outcomes, options)
    passed = all(o.passed for o in outcomes)
    settings = {k: v for k, v in vars(options).items() if k not in {"name", "results", "kinds"}}
    results = [{**asdict(o), "p99_ratio": round(o.ratio, 2), "passed": o.passed} for o in outcomes]
    path = write_result(options.name, {**settings, "handlers": results, "passed": passed}, options.results)
    console.print("passed" if passed else "FAILED", style="green" if passed else "red")
    console.print(f"written to {path}", soft_wrap=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
