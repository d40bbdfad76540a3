"""A fleet under a steady load: 25 workers with 80 subjects each, with the hot mirror and without, side by side.

    python -m benchmarks.fleet_load --rates 20000 --seconds 60

For each way of reading and each number of worker processes, on a server of its own: a file stream of 2,000 subjects,
messages of 256 bytes that carry when they were sent, a steady rate for a while, then a stall of all workers (their
processes get SIGSTOP for two seconds) under the same rate. Reported: end-to-end latency, CPU and memory of server and
workers, redeliveries, what was lost, repeated or out of order, and how long after the stall the backlog was gone and
the latency as before. `--climb` then raises the rate until it no longer holds.

Publisher, server and workers share the machine. Exit code 1 when a message was lost, repeated or out of order, or
when with the mirror the backlog of the stall is not gone, or the latency not as before, within ten seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from array import array
from collections import defaultdict
from pathlib import Path
from typing import Any

import nats
import psutil
from benchmarks.arrivals import Arrivals
from benchmarks.fleet_page import main as write_page
from benchmarks.lean_readers import STAMP
from benchmarks.remote import Remote
from benchmarks.report import RESULTS, write_result
from benchmarks.stamped_load import Load
from nats.js.api import StreamConfig
from rich.console import Console
from rich.table import Table

import parti
from parti.app.worker import Worker
from parti.embedded import Server
from parti.telemetry.logs import configure_logging

STREAM, TEMPLATE = "LOAD", "load.{key}"
WARM_S, DRAIN_S, CLIMB_S = 4.0, 40.0, 10.0
RECOVERED_S = 10.0


class FleetHost:
    """Some workers of the fleet in one process, and what their handlers saw."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []
        self._seen = bytearray(1 << 22)
        self._last: dict[str, int] = defaultdict(int)
        self._at_ns, self._age_ns = array("q"), array("q")
        self._handled = self._repeated = self._out_of_order = 0

    async def start(self, url: str, workers: int, keys: list[str], settings: dict[str, Any]) -> None:
        """Start so many workers."""
        app = parti.App(stream=STREAM, subject=TEMPLATE, partitions=keys, nats=url, **settings)
        app.handler(self._handle)
        self._workers = [app.worker() for _ in range(workers)]
        await asyncio.gather(*(worker.start() for worker in self._workers))

    async def _handle(self, message: parti.Message) -> None:
        stamp, number = STAMP.unpack_from(message.data)
        now = time.time_ns()
        if number >= len(self._seen):
            self._seen.extend(bytes(number))
        self._repeated += self._seen[number]
        self._seen[number] = 1
        self._out_of_order += message.seq <= self._last[message.subject]
        self._last[message.subject] = message.seq
        self._at_ns.append(now)
        self._age_ns.append(now - stamp)
        self._handled += 1

    def mark(self) -> None:
        """Begin a new phase."""
        self._at_ns, self._age_ns = array("q"), array("q")

    def state(self) -> dict[str, int]:
        """Partitions owned, workers on the mirror, and counters."""
        metrics = [worker.metrics for worker in self._workers]
        return {
            "owned": sum(len(worker.partitions) for worker in self._workers),
            "inside": sum(int(m.mirror_inside.value) for m in metrics),
            "received": sum(m.messages.value for m in metrics),
            "redelivered": sum(m.redeliveries.value for m in metrics),
            "parked": sum(m.parked.value for m in metrics),
            "handled": self._handled,
            "repeated": self._repeated,
            "out_of_order": self._out_of_order,
            "pid": os.getpid(),
        }

    def take(self) -> tuple[bytes, bytes, bytes]:
        """When each message of this phase came, how old it was, and which numbers have come since the start."""
        return self._at_ns.tobytes(), self._age_ns.tobytes(), bytes(self._seen)

    async def stop(self) -> None:
        """Stop the workers."""
        await asyncio.gather(*(worker.stop() for worker in self._workers))


class Run:
    """One fleet on one server."""

    def __init__(self, options: argparse.Namespace, mirror: str, processes: int) -> None:
        self._options = options
        self._mirror = mirror
        self._processes = processes
        self._keys = [f"k{n}" for n in range(options.subjects)]
        self._hosts: list[Remote] = []
        self._pids: list[int] = []

    async def measure(self) -> dict[str, Any]:
        """Start everything, load it, stall it, stop it."""
        options = self._options
        with Server() as server:
            client = await nats.connect(server.url)
            await client.jetstream().add_stream(
                StreamConfig(name=STREAM, subjects=["load.*"], max_bytes=4 << 30, allow_direct=True)
            )
            load = Remote(Load)
            self._hosts = [Remote(FleetHost) for _ in range(self._processes)]
            try:
                await load.call("connect", server.url, [f"load.{key}" for key in self._keys])
                started_s = await self._start(server.url)
                result: dict[str, Any] = {
                    "mirror": self._mirror,
                    "processes": self._processes,
                    "assigned_s": round(started_s, 2),
                }
                self._server = psutil.Process(server.pid)
                result["rates"] = []
                for rate in options.rates:
                    result["rates"].append(await self._steady(load, rate))
                    print(f"  {result['rates'][-1]}", flush=True)
                result |= await self._verify(load)
                if options.climb and self._mirror != "off" and not any(rate["collapsed"] for rate in result["rates"]):
                    result["climb"] = await self._climb(load)
                return result
            finally:
                for remote in (*self._hosts, load):
                    remote.close()
                await client.close()

    async def _start(self, url: str) -> float:
        """Start the workers; returns after how long all partitions are owned (and read from the mirror)."""
        options, began_s = self._options, time.monotonic()
        settings = {
            "hot_mirror": self._mirror,
            "max_ack_pending": options.max_ack_pending,
            "hot_mirror_max_bytes": options.mirror_mib << 20,
        }
        shares = [options.workers // self._processes] * self._processes
        shares[0] += options.workers - sum(shares)
        await asyncio.gather(
            *(h.call("start", url, n, self._keys, settings) for h, n in zip(self._hosts, shares, strict=True))
        )
        async with asyncio.timeout(60):
            while True:
                states = await self._states()
                inside = sum(s["inside"] for s in states)
                if sum(s["owned"] for s in states) == len(self._keys) and (
                    self._mirror != "on" or inside == options.workers
                ):
                    break
                await asyncio.sleep(0.1)
        self._pids = [s["pid"] for s in states]
        return time.monotonic() - began_s

    async def _states(self) -> list[dict[str, int]]:
        return [await host.call("state") for host in self._hosts]

    def _cpu(self) -> tuple[float, float]:
        """CPU seconds of the server and of the workers so far."""
        server = self._server.cpu_times()
        workers = [psutil.Process(pid).cpu_times() for pid in self._pids]
        return server.user + server.system, sum(w.user + w.system for w in workers)

    async def _steady(self, load: Remote, rate: int) -> dict[str, Any]:
        """A steady rate, then a stall under it."""
        seconds = self._options.seconds
        for host in self._hosts:
            await host.call("mark")
        before = await self._states()
        first = (await load.call("count"))[0]
        await load.call("start", rate)
        await asyncio.sleep(WARM_S)
        began_ns, cpu = time.time_ns(), self._cpu()
        await asyncio.sleep(seconds)
        ended_ns, cpu_after = time.time_ns(), self._cpu()
        memory = self._server.memory_info().rss, sum(psutil.Process(p).memory_info().rss for p in self._pids)
        states = await self._states()
        self._signal(signal.SIGSTOP)
        stalled_ns = time.time_ns()
        await asyncio.sleep(self._options.stall)
        self._signal(signal.SIGCONT)
        resumed_ns = time.time_ns()
        await asyncio.sleep(self._options.watch)
        sent = await load.call("stop", limit_s=60)
        ended_all_ns = time.time_ns()
        arrivals = await self._arrivals([(ns, number - first, stored - first) for ns, number, stored in sent])
        steady = arrivals.steady(rate, began_ns, ended_ns)
        came = arrivals.came_until(ended_ns) - arrivals.came_until(began_ns)
        received = sum(s["received"] for s in states) - sum(s["received"] for s in before)
        redelivered = sum(s["redelivered"] for s in states) - sum(s["redelivered"] for s in before)
        recovery = arrivals.recovery(rate, stalled_ns, resumed_ns, ended_all_ns)
        recovery.pop("curve")
        recovery["drained_s"] = _drained_s(arrivals, rate / 10, resumed_ns, ended_all_ns)
        return {
            "rate": rate,
            **steady,
            "p95_ms": arrivals.percentile_ms(0.95, began_ns, ended_ns),
            "server_us_per_msg": round((cpu_after[0] - cpu[0]) / max(1, came) * 1e6, 1),
            "workers_us_per_msg": round((cpu_after[1] - cpu[1]) / max(1, came) * 1e6, 1),
            "server_cores": round((cpu_after[0] - cpu[0]) / seconds, 2),
            "workers_cores": round((cpu_after[1] - cpu[1]) / seconds, 2),
            "server_mb": round(memory[0] / 1e6),
            "workers_mb": round(memory[1] / 1e6),
            "redelivery_ratio": round(redelivered / max(1, received), 6),
            "inside": sum(s["inside"] for s in states),
            "stall": recovery,
        }

    async def _arrivals(self, sent: list[tuple[int, int, int]]) -> Arrivals:
        pairs: list[tuple[int, int]] = []
        for host in self._hosts:
            at, age, _ = await host.call("take", limit_s=60)
            at_ns, age_ns = array("q"), array("q")
            at_ns.frombytes(at)
            age_ns.frombytes(age)
            pairs += zip(at_ns, age_ns, strict=True)
        pairs.sort()
        return Arrivals(array("q", (at for at, _ in pairs)), array("q", (age for _, age in pairs)), sent)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids:
            os.kill(pid, number)

    async def _verify(self, load: Remote) -> dict[str, Any]:
        """Wait until all is handled, or for long enough, and count what is wrong."""
        sent, _, refused = await load.call("count")
        began_s = time.monotonic()
        while time.monotonic() - began_s < DRAIN_S:
            states = await self._states()
            if sum(s["handled"] for s in states) >= sent - refused:
                break
            await asyncio.sleep(0.2)
        handled = sum(s["handled"] for s in states)
        repeated = sum(s["repeated"] for s in states)
        return {
            "sent": sent - refused,
            "handled": handled,
            "unhandled_at_the_end": sent - refused - (handled - repeated),
            "drained": handled - repeated >= sent - refused,
            "drained_after_s": round(time.monotonic() - began_s, 1),
            "repeated": repeated,
            "out_of_order": sum(s["out_of_order"] for s in states),
        }

    async def _climb(self, load: Remote) -> list[dict[str, Any]]:
        """Raise the rate until it does not hold."""
        steps: list[dict[str, Any]] = []
        for rate in range(self._options.rates[-1] + 5_000, 60_001, 5_000):
            for host in self._hosts:
                await host.call("mark")
            first = (await load.call("count"))[0]
            await load.call("start", rate)
            await asyncio.sleep(WARM_S / 2)
            began_ns = time.time_ns()
            await asyncio.sleep(CLIMB_S)
            ended_ns = time.time_ns()
            sent = await load.call("stop", limit_s=60)
            arrivals = await self._arrivals([(ns, number - first, stored - first) for ns, number, stored in sent])
            step = {"rate": rate, **arrivals.steady(rate, began_ns, ended_ns)}
            step["holds"] = (
                not step["collapsed"]
                and min(step["sent_per_s"], step["delivered_per_s"]) >= 0.98 * rate
                and (step["p99_ms"] or 1e9) < 1_000
            )
            steps.append(step)
            if not step["holds"]:
                break
            await self._verify(load)
        return steps


def _drained_s(arrivals: Arrivals, small: float, resumed_ns: int, ended_ns: int) -> float | None:
    """Seconds until the backlog of the stall was small for the first time; None if it never was.

    A busy machine makes it large again for a moment, which is not the stall's doing.
    """
    times = range(resumed_ns, ended_ns, 20_000_000)
    return next((round((ns - resumed_ns) / 1e9, 2) for ns in times if arrivals.backlog(ns) < small), None)


def show(runs: list[dict[str, Any]]) -> None:
    """Print the comparison."""
    table = Table(title="25 x 80 on a file stream: a steady rate, then a stall of all workers")
    columns = (
        "mirror",
        "processes",
        "rate",
        "delivered/s",
        "p50 ms",
        "p99 ms",
        "server us",
        "workers us",
        "MB server",
    )
    for column in (*columns, "redelivered", "gone after s", "p99 back s", "lost", "repeated", "disorder"):
        table.add_column(column, justify="right")
    for run in runs:
        for rate in run["rates"]:
            gone, back = rate["stall"]["drained_s"], rate["stall"]["p99_back_s"]
            table.add_row(
                run["mirror"],
                str(run["processes"]),
                f"{rate['rate']:,}",
                f"{rate['delivered_per_s']:,}" + (" collapsed" if rate["collapsed"] else ""),
                *(str(rate[key]) for key in ("p50_ms", "p99_ms", "server_us_per_msg", "workers_us_per_msg")),
                str(rate["server_mb"]),
                f"{rate['redelivery_ratio']:.4%}",
                "never" if gone is None else str(gone),
                "never" if back is None else str(back),
                "0" if run["drained"] else f"{run['unhandled_at_the_end']:,} waiting",
                str(run["repeated"]),
                str(run["out_of_order"]),
            )
    console = Console(width=180)
    console.print(table)
    for run in runs:
        for step in run.get("climb", ()):
            console.print(f"climb, mirror {run['mirror']}, {run['processes']} processes: {step}")


def passed(runs: list[dict[str, Any]]) -> bool:
    """Whether nothing was lost, repeated or out of order, and the mirror kept what it promises."""
    clean = all(not run["repeated"] and not run["out_of_order"] for run in runs)
    mirrored = [run for run in runs if run["mirror"] != "off"]
    stalls = [rate["stall"] for run in mirrored for rate in run["rates"]]
    back = [stall[key] for stall in stalls for key in ("drained_s", "p99_back_s")]
    return clean and all(run["drained"] for run in mirrored) and all(s is not None and s <= RECOVERED_S for s in back)


async def run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every way of reading with every number of processes, one after the other."""
    runs = []
    for processes in options.processes:
        for mirror in options.mirrors:
            print(f"mirror {mirror}, {processes} worker process(es): running", flush=True)
            runs.append(await Run(options, mirror, processes).measure())
    return runs


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=25)
    parser.add_argument("--subjects", type=int, default=2_000)
    parser.add_argument("--rates", type=int, nargs="+", default=[20_000])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--mirrors", nargs="+", choices=("on", "auto", "off"), default=["on", "off"])
    parser.add_argument("--stall", type=float, default=2.0, help="seconds for which all workers are stopped")
    parser.add_argument("--watch", type=float, default=12.0, help="seconds under load after the stall")
    parser.add_argument("--mirror-mib", type=int, default=256, help="size of the mirror, in MiB")
    parser.add_argument("--max-ack-pending", type=int, default=500)
    parser.add_argument("--climb", action="store_true", help="then raise the rate until it does not hold")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--result", default="fleet_load", help="name of the JSON file, without ending")
    options = parser.parse_args()
    if options.workers < max(options.processes):
        parser.error(f"{options.workers} workers cannot fill {max(options.processes)} processes; use fewer processes")
    configure_logging("error", "console")
    runs = asyncio.run(run_all(options))
    show(runs)
    good = passed(runs)
    data = {"settings": {**vars(options), "results": ""}, "good": good, "runs": runs}
    path = write_result(options.result, data, options.results)
    if options.results == RESULTS and options.result == "fleet_load":
        write_page()
    print(f"{'passed' if good else 'FAILED'}; written to {path.name}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
