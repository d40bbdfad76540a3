"""Kill the server again and again while messages flow through a worker, and look for the damage.

    python -m benchmarks.outage_worker --messages 100000 --kills 3 --partitions 200

The publisher is a process of its own; it repeats whatever the server has not acknowledged. In the end the stream is
read back and compared with what the handler noted: nothing lost, nothing handled twice, each partition in stream
order, and after each kill the first message handled within 3 s of JetStream answering again. Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
import time
from dataclasses import asdict
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import nats
from benchmarks.audit import MSG_ID, Findings, Handled, audit, first_at_or_after, read_back
from benchmarks.report import RESULTS, LiveLine, write_result
from benchmarks.traffic import SteadyPublisher, answering_again
from nats.js.api import StreamConfig
from rich.console import Console
from rich.table import Table

import parti
from parti.embedded import Server
from parti.telemetry.logs import configure_logging

STREAM = "OUTAGE"
RESUME_LIMIT_S = 3.0
_LEAD = 5_000
_STALL_S = 60.0
console = Console()


def publish(url: str, count: int, partitions: int, rate: float, handled: Synchronized[int]) -> None:
    """The publisher's process: `rate` messages a second, but never far ahead of the worker."""
    started_s = time.monotonic()

    def may_send(number: int) -> bool:
        return number < rate * (time.monotonic() - started_s) and number < handled.value + _LEAD

    publisher = SteadyPublisher(url, count, lambda n: f"outage.{n * 7919 % partitions}")
    asyncio.run(publisher.run(may_send))


class Run:
    """One run: a server, a worker in this process, a publisher in another."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.journal: list[Handled] = []
        self.resumed_s: list[float] = []
        self.down_s: list[float] = []
        self.elapsed_s = 0.0
        context = multiprocessing.get_context("spawn")
        self._handled = context.Value("q", 0)
        self._context = context
        self.line = LiveLine()

    def _app(self) -> parti.App:
        app = parti.App(
            stream=STREAM, subject="outage.{partition}", partitions=[str(n) for n in range(self.options.partitions)]
        )

        @app.handler
        async def handle(message: parti.Message) -> None:
            entry = Handled(message.subject, message.seq, message.headers.get(MSG_ID, ""), time.monotonic())
            self.journal.append(entry)
            if not message.seq % 10:
                await asyncio.sleep(0.002)  # So that a kill finds handlers in the middle of their work.

        return app

    async def measure(self) -> Findings:
        """Run to the end and compare."""
        options = self.options
        async with Server() as server:
            client = await nats.connect(server.url)
            await client.jetstream().add_stream(StreamConfig(name=STREAM, subjects=["outage.*"]))
            await client.close()
            arguments = (server.url, options.messages, options.partitions, options.rate, self._handled)
            publisher = self._context.Process(target=publish, args=arguments, daemon=True)
            publisher.start()
            started_s = time.monotonic()
            try:
                async with self._app().running(nats=server.url):
                    for kill in range(1, options.kills + 1):
                        await self._until_handled(options.messages * kill // (options.kills + 1), f"kill {kill}")
                        await self._kill(server)
                    await self._until_handled(options.messages, "the end")
                    self.elapsed_s = time.monotonic() - started_s
                await asyncio.to_thread(publisher.join, _STALL_S)
            finally:
                if publisher.is_alive():
                    publisher.terminate()
                    publisher.join()
            stored = await read_back(server.url, STREAM)
        return audit(stored, self.journal, map(str, range(options.messages)))

    async def _kill(self, server: Server) -> None:
        killed_s = time.monotonic()
        await server.kill()
        _, answered_s = await asyncio.gather(server.restart(), asyncio.to_thread(answering_again, server.url, STREAM))
        self.down_s.append(answered_s - killed_s)
        first = None
        while first is None and time.monotonic() < answered_s + _STALL_S:
            await asyncio.sleep(0.005)
            first = first_at_or_after(self.journal, answered_s)
        self.resumed_s.append(first.at_s - answered_s if first else float("inf"))

    async def _until_handled(self, goal: int, what: str) -> None:
        """Wait; give up when nothing was handled for a minute, since the comparison then tells what is missing."""
        seen, moved_s = -1, time.monotonic()
        while len(self.journal) < goal and time.monotonic() < moved_s + _STALL_S:
            if len(self.journal) > seen:
                seen, moved_s = len(self.journal), time.monotonic()
            self._handled.value = len(self.journal)
            self.line.show(f"handled {seen:,} of {self.options.messages:,}, waiting for {what}")
            await asyncio.sleep(0.02)
        self._handled.value = len(self.journal)


def _result(run: Run, findings: Findings) -> dict[str, Any]:
    options = run.options
    return {
        "messages": options.messages,
        "partitions": options.partitions,
        "kills": options.kills,
        "rate": options.rate,
        "handled": len(run.journal),
        "elapsed_s": round(run.elapsed_s, 2),
        **asdict(findings),
        "down_s": [round(s, 3) for s in run.down_s],
        "resumed_s": [round(s, 3) for s in run.resumed_s],
    }


def _show(result: dict[str, Any], passed: bool) -> None:
    table = Table(title=f"{result['kills']} SIGKILLs of the server under {result['messages']:,} messages")
    table.add_column("what")
    table.add_column("found", justify="right")
    table.add_column("expected", justify="right")
    table.add_row("handled", f"{result['handled']:,}", f"{result['messages']:,}")
    for name in ("unpublished", "lost", "repeated", "out_of_order", "altered"):
        table.add_row(name.replace("_", " "), f"{result[name]:,}", "0")
    for number, (down_s, resumed_s) in enumerate(zip(result["down_s"], result["resumed_s"], strict=True), 1):
        table.add_row(
            f"kill {number}: down {down_s:.2f} s, first handled after the answer",
            f"{resumed_s:.3f} s",
            f"< {RESUME_LIMIT_S:g} s",
        )
    console.print(table)
    console.print("passed" if passed else "FAILED", style="green" if passed else "red")


def main() -> int:
    """Parse, run, show, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--partitions", type=int, default=200)
    parser.add_argument("--rate", type=float, default=6_000, help="most messages published a second")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory for the JSON result")
    options = parser.parse_args()
    configure_logging("error", "console")
    run = Run(options)
    findings = asyncio.run(run.measure())
    run.line.end()
    result = _result(run, findings)
    whole = result["handled"] == options.messages
    passed = findings.clean and whole and all(s < RESUME_LIMIT_S for s in run.resumed_s)
    _show(result, passed)
    path = write_result("outage_worker", {**result, "passed": passed}, options.results)
    console.print(f"written to {path}", soft_wrap=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
