"""Migrate thousands of per-partition consumers to a fleet and back, under load, with real processes on both sides.

    python -m chaos.migration --retention workqueue
    python -m chaos.migration --partitions 40 --workers 4 --hosts 2 --old-processes 2 --kill

Old workers (`examples.legacy.worker`, plain nats-py) read a durable consumer per partition; `parti migrate` is run as
an operator runs it: plan, shadow, validate, switch, validate, cleanup, and after a while `--rollback`. With `--kill`
each of them is first started and ended with SIGKILL while it works. Must hold, by what handlers on both sides noted:
nothing lost, nothing handled twice, order kept; as many consumers as there are partitions before, as many as there
are workers after. Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
from benchmarks.report import LiveLine
from benchmarks.verdicts import Verdict

from chaos.checker import check
from chaos.handler_options import ENV_OPTIONS, ENV_PROCESS, HandlerOptions
from chaos.notes import Notes
from chaos.outcome import Outcome, conclude, run_program
from chaos.site import STREAM, TEMPLATE, Ending, Site, add_load_options, load_of, open_site
from chaos.timings import Spread
from chaos.workers import ROOT, spawn
from parti.coordination.migration_desk import LEASE

OLD = "old"
"""How the names of old processes, and of their notes, begin."""
_READY_S = 180.0
_TOOL_S = 400.0
_TRIES = 3
_EXIT_S = 60.0
_LOOK_S = 0.005
_BRIEF = ("shadow", "cleanup")
"""Phases that last for a fraction of a second."""
_BRIEF_S = 0.03


@dataclass(slots=True)
class Cast:
    """The processes of a run besides the publisher."""

    site: Site
    options: argparse.Namespace
    old: list[subprocess.Popen[bytes]] = field(default_factory=list)
    hosts: list[subprocess.Popen[bytes]] = field(default_factory=list)
    again: list[str] = field(default_factory=list)
    """Why the tool had to be run again, though nobody had killed it."""
    killed: dict[str, int] = field(default_factory=dict)
    """How often the tool was killed while it worked, by phase."""

    # ── starting ──────────────────────────────────────────────────────────────────────────────────────────────

    async def start_old(self) -> None:
        """Start the old workers and wait until every partition has a consumer that is pulled."""
        site, names = self.site, list(self.site.load.names)
        for n in range(self.options.old_processes):
            mine = names[n :: self.options.old_processes]
            command = [sys.executable, "-m", "examples.legacy.worker", "--nats", site.server.url, "--stream", STREAM]
            command += ["--subject", TEMPLATE.replace("{p}", "{}"), "--consumer", f"{OLD}-{{}}"]
            command += ["--notes", str(site.directory / f"{OLD}-{n}.notes"), "--takes-ms", str(site.load.takes_ms[1])]
            command += ["--wait", str(self.options.wait), *mine]
            self.old.append(spawn(command, site.directory, f"{OLD}-{n}.log"))
        await self._until("old consumers", lambda: self._pulled(names))

    async def _pulled(self, names: Sequence[str]) -> bool:
        infos = await self.site.observer.api.consumers(STREAM)
        return sum(bool(info.waiting) for info in infos) >= 0.9 * len(names) and len(infos) >= len(names)

    async def start_fleet(self) -> None:
        """Start the workers of parti, several in a process, and wait until all are there."""
        each = -(-self.site.load.workers // self.options.hosts)
        left = self.site.load.workers
        for n in range(self.options.hosts):
            number = min(each, left)
            left -= number
            command = [sys.executable, "-m", "chaos.hosts", str(number)]
            self.hosts.append(spawn(command, self.site.directory, f"w{n}.log", extra=self._environment(f"w{n}")))
        await self._until("workers", self._all_there)

    async def _all_there(self) -> bool:
        return len(self.site.observer.records.members) >= self.site.load.workers

    async def _until(self, what: str, condition: Any) -> None:
        deadline_s = time.monotonic() + _READY_S
        while not await condition():
            gone = [p.args for p in (*self.old, *self.hosts) if p.poll() is not None]
            if gone or time.monotonic() > deadline_s:
                raise RuntimeError(f"{what} did not come up; ended: {len(gone)} processes")
            await asyncio.sleep(0.2)

    def _environment(self, process: str) -> dict[str, str]:
        site = self.site
        handler = HandlerOptions(
            stream=STREAM,
            template=TEMPLATE,
            partitions=site.load.names,
            notes=str(site.directory),
            takes_ms=site.load.takes_ms,
            seed=site.load.seed,
        )
        return {
            ENV_OPTIONS: msgspec.json.encode(handler).decode(),
            ENV_PROCESS: process,
            "PARTI_NATS": site.server.url,
        }

    # ── the tool ──────────────────────────────────────────────────────────────────────────────────────────────

    async def migrate(self, *arguments: str, codes: Sequence[int] = (0,)) -> dict[str, Any]:
        """Run `parti migrate …` and return what it says."""
        chance = random.Random(f"{self.options.seed} {arguments}")
        name = arguments[-1] if "--rollback" in arguments else arguments[arguments.index("--phase") + 1]
        if self.options.kill:
            after_s = chance.uniform(0.0, _BRIEF_S) if name in _BRIEF else chance.uniform(*self.options.kill_after)
            if await self._kill_at_work(self._tool(arguments), after_s):
                self.killed[name] = self.killed.get(name, 0) + 1
        for _ in range(_TRIES):
            process = self._tool(arguments)
            out, err = await asyncio.to_thread(process.communicate, timeout=_TOOL_S)
            if process.returncode != 1 or out:
                break
            self.again.append(err.decode().strip())  # a busy server did not answer: an operator runs it again
        if process.returncode not in codes:
            said = f"{err.decode()[-500:]} {out.decode()[:1500]}"
            raise RuntimeError(f"parti migrate {' '.join(arguments)} ended with {process.returncode}: {said}")
        answer: dict[str, Any] = json.loads(out)
        return answer

    async def _kill_at_work(self, process: subprocess.Popen[bytes], after_s: float) -> bool:
        """SIGKILL so long after it has taken the lease of migrations; False when it was quicker."""
        before = await self.site.bucket.get(LEASE)
        seen = before.revision if before else 0
        while process.poll() is None:
            entry = await self.site.bucket.get(LEASE)
            if entry and entry.value and entry.revision > seen:
                break
            await asyncio.sleep(_LOOK_S)
        try:
            await asyncio.to_thread(process.communicate, timeout=after_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            await asyncio.to_thread(process.communicate)
            return True
        return False

    def _tool(self, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "parti", "migrate", *arguments, "--json"]
        return subprocess.Popen(
            command,
            cwd=self.site.directory,
            env={**os.environ, "PYTHONPATH": str(ROOT), **self._environment("tool")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────

    async def end(self) -> list[int]:
        """SIGTERM to all; returns the exit codes."""
        processes = [*self.old, *self.hosts]
        for process in processes:
            process.send_signal(signal.SIGTERM)
        return [await asyncio.to_thread(process.wait, _EXIT_S) for process in processes]

    def close(self) -> None:
        """Kill what is left."""
        for process in (*self.old, *self.hosts):
            if process.poll() is None:
                process.kill()
            process.wait()


async def run(options: argparse.Namespace) -> Outcome:
    """Do it."""
    line = LiveLine()
    figures: dict[str, Any] = {}
    async with open_site(load_of(options, max_consumers=options.partitions + 3 * options.workers)) as site:
        cast = Cast(site, options)
        try:
            steps = await _migrate(cast, line, figures)
            ending = await _settle(cast)
        finally:
            cast.close()
        there, back = pauses_of_switches(site.notes)
        names = {index: process.name for index, process in enumerate(site.notes.processes)}
        calls = [call for calls in site.notes.calls.values() for call in calls.since(0)]
        by_old = sum(names[call.process].startswith(OLD) for call in calls)
        return conclude(
            f"chaos_migration_{options.retention}{'_kills' if options.kill else ''}",
            options,
            site,
            ending,
            verdicts=[
                Verdict("consumers before, after, and rolled back", f"{steps}", steps == _expected(options)),
                Verdict(
                    "handled by both sides",
                    f"{by_old:,} by old ones, {len(calls) - by_old:,} by the fleet",
                    0 < by_old < len(calls),
                ),
                *_kill_verdicts(cast),
            ],
            figures=figures
            | {
                "rest of a partition that went to the fleet": Spread.of(there),
                "rest of a partition that went back": Spread.of(back),
                "tool killed in": cast.killed,
                "tool run again because": cast.again,
            },
        )


def _expected(options: argparse.Namespace) -> list[int]:
    return [options.partitions, options.workers, options.partitions]


def _kill_verdicts(cast: Cast) -> list[Verdict]:
    if not cast.options.kill:
        return []
    phases = {"shadow", "validate", "switch", "cleanup", "--rollback"}
    return [Verdict("tool killed in every phase", f"{cast.killed}", phases <= cast.killed.keys())]


async def _migrate(cast: Cast, line: LiveLine, figures: dict[str, Any]) -> list[int]:
    """There and back; returns the numbers of consumers before, after and rolled back."""
    site, options = cast.site, cast.options
    began_s = time.monotonic()
    await cast.start_old()
    figures["old consumers made and pulled, s"] = round(time.monotonic() - began_s, 1)
    site.publisher.set_rates(site.even_rates())
    await site.until(lambda: len(site.notes.calls) == options.partitions, _READY_S)
    site.began_ns = time.time_ns()
    counts = [await _consumers(site, OLD)]
    what = ("chaos.handler:app", "--consumers", f"{OLD}-{{partition}}", "--workers", str(options.workers))
    pace = ("--at-once", str(options.at_once), "--yes")
    windows = ("--windows", str(options.windows), "--window", str(options.window))
    for number, arguments in enumerate(
        [
            ("run", *what, "--phase", "shadow"),
            ("run", *windows, "--phase", "validate"),
            ("run", *pace, "--phase", "switch"),
            ("run", *windows, "--phase", "validate"),
            ("run", "--yes", "--phase", "cleanup"),
            ("run", *pace, "--rollback"),
        ]
    ):
        answer = await cast.migrate(*arguments)
        title = f"{number + 1} {answer['action']}"
        figures[f"{title}, s"] = answer["took_s"]
        if answer["rests_s"]:
            figures[f"{title}: a batch of up to {options.at_once} rested, s"] = Spread.of(answer["rests_s"])
        line.show(f"{answer['action']}: {answer['summary']}; {site.notes.finished:,} handled")
        if answer["action"] == "shadow":
            await cast.start_fleet()
        if answer["action"] == "cleanup":
            counts.append(await _all_consumers(site))
            await site.rest(options.rest)
        site.notes.poll()
    counts.append(await _consumers(site, OLD))
    await site.rest(options.rest)
    line.end()
    return counts


async def _all_consumers(site: Site) -> int:
    """Consumers of the stream, and of its hot mirror, which a fleet that lagged may read instead."""
    api = site.observer.api
    streams = [name for name in await api.stream_names() if not name.startswith("KV_")]
    return len({consumer for stream in streams for consumer in await api.consumer_names(stream)})


async def _consumers(site: Site, prefix: str) -> int:
    return sum(name.startswith(prefix) for name in await site.observer.api.consumer_names(STREAM))


async def _settle(cast: Cast) -> Ending:
    """Let everything be handled while all processes run, then end them, and judge."""
    site = cast.site
    clock_ns = time.time_ns() - time.monotonic_ns()
    published = await site.publisher.stop()
    await site.until(lambda: not site.notes.unfinished, site.load.drain_s)
    # What is handled twice for no reason may come a little later.
    await site.rest(2.0)
    crashed = [f"pid {p.pid} ended with {p.poll()}" for p in (*cast.old, *cast.hosts) if p.poll() is not None]
    left = (await site.observer.api.stream_info(STREAM)).messages
    codes = await cast.end()
    site.notes.poll(everything=True)
    number_holdings(site.notes)
    findings = check(site.notes, (), in_flight_s=site.load.in_flight_s)
    jump_s = abs(time.time_ns() - time.monotonic_ns() - clock_ns) / 1e9
    return Ending(findings, published, codes, crashed, 0, left, jump_s)


# ── judging ───────────────────────────────────────────────────────────────────────────────────────────────────────


def number_holdings(notes: Notes) -> None:
    """Give calls of old workers, which have no fence, one that grows with each change of sides.

    The checker's rule about two owners at once goes by fences. Of the fleet's own only what changes is kept.
    """
    for calls in notes.calls.values():
        in_order = calls.by_start()
        numbers: dict[tuple[int, int], int] = {}
        last, number = None, 0
        for call in in_order:
            side = (call.fence, call.fence and 1)
            if side != last:
                last, number = side, number + 1
            numbers[call.seq, call.start_ns] = number
        calls.refence(lambda call: numbers[call.seq, call.start_ns])  # noqa: B023 - called at once


def pauses_of_switches(notes: Notes) -> tuple[list[float], list[float]]:
    """From the end of one side's last call to the start of the other's first, less the time without a message.

    Those of partitions that went to the fleet, and of those that went back.
    """
    there: list[float] = []
    back: list[float] = []
    for partition, calls in notes.calls.items():
        sent = notes.sent.get(partition, {})
        for before, after in pairwise(calls.by_start()):
            was_old, is_old = (notes.processes[call.process].name.startswith(OLD) for call in (before, after))
            if was_old != is_old and before.end_ns:
                rest_s = max(0.0, (after.start_ns - max(before.end_ns, sent.get(after.seq, 0))) / 1e9)
                (back if is_old else there).append(rest_s)
    return there, back


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old-processes", type=int, default=4, help="processes of old workers")
    parser.add_argument("--hosts", type=int, default=5, help="processes that the fleet's workers share")
    parser.add_argument("--at-once", type=int, default=100, help="partitions that rest at the same time")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--window", type=float, default=5.0)
    parser.add_argument("--wait", type=float, default=15.0, help="seconds that a request of an old worker waits")
    parser.add_argument("--rest", type=float, default=10.0, help="seconds of load after the cleanup and at the end")
    parser.add_argument("--kill", action="store_true", help="end the tool with SIGKILL once in each phase")
    parser.add_argument(
        "--kill-after",
        type=float,
        nargs=2,
        default=(0.1, 0.8),
        metavar=("LEAST", "MOST"),
        help="seconds after a phase has begun; brief ones at once",
    )
    add_load_options(parser, partitions=2000, workers=25, rate=250.0, takes_ms=(0.0, 4.0), ttl_s=5.0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run_program(parse(), run))
