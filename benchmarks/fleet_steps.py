"""Start and stop real `parti worker` processes and see how the fleet shares the partitions after each change.

    python -m benchmarks.fleet_steps
    python -m benchmarks.fleet_steps --partitions 40 --strategies sticky --ends SIGKILL

The fleet grows over `--steps` and shrinks again, once by SIGTERM and once by SIGKILL, for each strategy and number of
partitions. In every other step down the rebalancer is among those that go. After each change:

- every partition has exactly one owner: by the claims, by the assignments, by what the workers say that they have
  applied, and by the filters of their consumers on the server;
- that is so within 3 s of the window's end. The window ends `scale_window_s` after the last join or leave (the
  cold-start window for the first worker), and `lease_ttl_s` after a SIGKILL;
- the changes of owner exceed the least possible number by at most 5 %;
- while nothing changes, nothing moves.

Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.fleet import Movement, Observer, Place, observing, shares
from benchmarks.fleet_processes import Processes, create_stream, worker_processes
from benchmarks.report import RESULTS
from benchmarks.verdicts import Verdict, conclude
from rich.console import Console
from rich.table import Table

from parti.config import Settings
from parti.embedded import Server
from parti.telemetry.logs import configure_logging

SETTLE_LIMIT_S = 3.0
EXCESS_LIMIT = 0.05
_JOIN_S = 60.0
"""Longest wait for processes to start: many Python processes at once on few cores take their time."""
_GIVE_UP_S = 30.0
_EXIT_S = 20.0
_DWELL_S = 2.0
console = Console(width=None if sys.stdout.isatty() else 150)


# ── one step ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Step:
    """One change of the fleet and what came of it."""

    partitions: int
    strategy: str
    before: int
    after: int
    how: str
    """`start`, `SIGTERM` or `SIGKILL`."""
    rebalancer_went: bool
    settled_s: float
    """From the last join, leave or kill until all was settled."""
    after_window_s: float
    """The same from the window's end; below zero when it was settled before."""
    movement: Movement
    least: int
    most: int
    """Partitions of the worker with the fewest and with the most."""
    stirred: int
    """Partitions that moved although nothing had changed any more."""
    problems: tuple[str, ...]

    @property
    def one_owner(self) -> bool:
        """Whether every partition had exactly one owner in the end."""
        return not self.problems

    @property
    def in_time(self) -> bool:
        """Whether it was settled soon enough."""
        return self.one_owner and self.after_window_s < SETTLE_LIMIT_S

    @property
    def excess(self) -> float:
        """By how much the movement exceeds the least possible.

        Every handover counts, save after a SIGKILL: leases end one by one, and what goes to a worker that is dead too
        has to be given once more.
        """
        moves = self.movement
        least = moves.minimum + moves.orphans
        count = moves.moved + moves.orphans if self.how == "SIGKILL" else moves.handovers
        return (count - least) / least if least else float(count > 0)

    @property
    def minimal(self) -> bool:
        """Whether no more was moved than had to be."""
        return self.excess <= EXCESS_LIMIT and not self.stirred


class Steps:
    """A fleet that is made larger and smaller."""

    def __init__(
        self,
        observer: Observer,
        processes: Processes,
        partitions: Sequence[str],
        settings: Settings,
        *,
        dwell_s: float = _DWELL_S,
    ) -> None:
        self._observer = observer
        self.processes = processes
        self._partitions = partitions
        self._settings = settings
        self._dwell_s = dwell_s

    async def grow(self, after: int) -> Step:
        """Start workers until there are so many."""
        observer, before = self._observer, len(self.processes.running)
        owners, began_s = observer.owners, time.monotonic()
        self.processes.start(after - before)
        await observer.await_members(after, _JOIN_S)
        problem = await observer.settle(self._partitions, after, _GIVE_UP_S)
        last_s = max(observer.arrivals(began_s).values(), default=began_s)
        settings = self._settings
        window_s = settings.scale_window_s if before else settings.cold_start_window_s
        return await self._finish(before, after, "start", False, owners, began_s, last_s, window_s, problem)

    async def shrink(self, after: int, how: signal.Signals, *, rebalancer_goes: bool) -> Step:
        """Stop workers until there are so many, with the rebalancer among them or not."""
        observer, before = self._observer, len(self.processes.running)
        owners, members = observer.owners, observer.records.members
        # The rebalancer is the last one to be chosen, or the first.
        chosen = sorted(members, key=lambda worker: (worker == observer.leader) != rebalancer_goes)[: before - after]
        began_s = time.monotonic()
        going = self.processes.end([members[worker].pid for worker in chosen], how)
        last_s = time.monotonic()
        codes = await asyncio.to_thread(lambda: [process.wait(_EXIT_S) for process in going])
        problem = await observer.settle(self._partitions, after, _GIVE_UP_S)
        if how is signal.SIGTERM:
            last_s = max(observer.departures(began_s).values(), default=last_s)
            window_s = self._settings.scale_window_s
            if any(codes):
                problem = problem or f"exit codes {codes}"
        else:
            window_s = max(self._settings.lease_ttl_s, self._settings.leader_ttl_s if rebalancer_goes else 0.0)
        return await self._finish(
            before, after, how.name, rebalancer_goes, owners, began_s, last_s, window_s, problem
        )

    async def _finish(
        self,
        before: int,
        after: int,
        how: str,
        rebalancer_went: bool,
        owners: Mapping[str, str],
        began_s: float,
        last_s: float,
        window_s: float,
        problem: str,
    ) -> Step:
        observer = self._observer
        settled_s = time.monotonic() if problem else observer.changed_s
        movement = observer.movement(owners, began_s)
        problems = [problem] if problem else await observer.verify(self._partitions)
        await asyncio.sleep(self._dwell_s)
        least, most = shares(observer.owners, observer.records.members)
        return Step(
            partitions=len(self._partitions),
            strategy=self._settings.strategy,
            before=before,
            after=after,
            how=how,
            rebalancer_went=rebalancer_went,
            settled_s=round(settled_s - last_s, 3),
            after_window_s=round(settled_s - last_s - window_s, 3),
            movement=movement,
            least=least,
            most=most,
            stirred=sum(h.at_s > settled_s for h in observer.handovers),
            problems=tuple(problems),
        )


@asynccontextmanager
async def steps_on(
    place: Place, partitions: Sequence[str], settings: Mapping[str, Any], *, dwell_s: float = _DWELL_S
) -> AsyncIterator[Steps]:
    """A fleet without a worker so far; the stream must exist."""
    checked = Settings(nats=(place.url,), **settings)
    with worker_processes(place, partitions, settings) as processes:
        async with observing(place) as observer:
            yield Steps(observer, processes, partitions, checked, dwell_s=dwell_s)


# ── a whole run ───────────────────────────────────────────────────────────────────────────────────────────────────


async def up_and_down(
    count: int, strategy: str, how: signal.Signals, options: argparse.Namespace
) -> tuple[list[Step], Counter[str]]:
    """Grow over all steps and shrink again, on a server of its own."""
    # A single worker has to be able to take everything.
    settings = {"strategy": strategy, "max_subjects": max(count, 500), "capacity": max(count, 500)}
    done: list[Step] = []

    def note(step: Step) -> None:
        done.append(step)
        line = f"{step.before} -> {step.after} {step.how}, settled {step.after_window_s:+.2f} s"
        console.print(f"  {count} {strategy}: {line} {'; '.join(step.problems)}")

    async with Server() as server:
        place = Place(server.url, "STEPS", "steps.{p}")
        await create_stream(server.url, place.stream, "steps.*", options.storage)
        partitions = [f"p{n}" for n in range(count)]
        async with steps_on(place, partitions, settings, dwell_s=options.dwell) as steps:
            for after in options.steps:
                note(await steps.grow(after))
            for number, after in enumerate(reversed(options.steps[:-1])):
                note(await steps.shrink(after, how, rebalancer_goes=bool(number % 2)))
            return done, steps.processes.complaints()


def judge(steps: Sequence[Step]) -> list[Verdict]:
    """What must be shown, against what was seen."""
    broken = [step for step in steps if not step.one_owner]
    late = max(steps, key=lambda step: step.after_window_s)
    wasteful = max(steps, key=lambda step: step.excess)
    return [
        Verdict(
            "after each change every partition has exactly one owner",
            f"{len(steps) - len(broken)} of {len(steps)} changes",
            not broken,
        ),
        Verdict(
            f"settled within {SETTLE_LIMIT_S:g} s of the window's end",
            f"latest {late.after_window_s:+.2f} s ({late.before} -> {late.after} {late.how}, {late.strategy})",
            all(step.in_time for step in steps),
        ),
        Verdict(
            f"movement within {EXCESS_LIMIT:.0%} of the minimum",
            f"largest excess {wasteful.excess:.1%} ({wasteful.before} -> {wasteful.after} {wasteful.how})",
            all(step.excess <= EXCESS_LIMIT for step in steps),
        ),
        Verdict(
            "nothing moves while nothing changes",
            f"{sum(step.stirred for step in steps)} partitions moved",
            not any(step.stirred for step in steps),
        ),
    ]


def show(steps: Sequence[Step]) -> None:
    """Print the table."""
    table = Table(title="workers as real processes; times in seconds")
    names = ("partitions", "strategy", "workers", "by", "settled", "after window", "moved", "least", "orphans")
    for name in (*names, "handovers", "per worker", ""):
        table.add_column(name, justify="left" if name in {"strategy", "by", ""} else "right")
    for step in steps:
        moves = step.movement
        good = step.one_owner and step.in_time and step.minimal
        table.add_row(
            f"{step.partitions:,}",
            step.strategy,
            f"{step.before} -> {step.after}",
            f"{step.how}{', rebalancer too' if step.rebalancer_went else ''}",
            f"{step.settled_s:.2f}",
            f"{step.after_window_s:+.2f}",
            f"{moves.moved:,}",
            f"{moves.minimum:,}",
            f"{moves.orphans:,}",
            f"{moves.handovers:,}",
            f"{step.least}-{step.most}",
            "ok" if good else f"NOT MET {'; '.join(step.problems)}",
            style=None if good else "red",
        )
    console.print(table)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2, 3, 5, 10], help="sizes of the fleet")
    parser.add_argument("--partitions", type=int, nargs="+", default=[2_000, 40])
    parser.add_argument("--strategies", nargs="+", choices=("sticky", "hash"), default=["sticky", "hash"])
    parser.add_argument("--ends", nargs="+", choices=("SIGTERM", "SIGKILL"), default=["SIGTERM", "SIGKILL"])
    parser.add_argument("--dwell", type=float, default=_DWELL_S, help="seconds of rest after each change")
    parser.add_argument("--storage", choices=("file", "memory"), default="file")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory for the JSON result")
    return parser.parse_args(arguments)


def main() -> int:
    """Parse, run, show, write."""
    options = parse()
    configure_logging("error", "console")
    steps: list[Step] = []
    complaints: Counter[str] = Counter()
    for count in options.partitions:
        for strategy in options.strategies:
            for how in options.ends:
                console.print(f"{count:,} partitions, {strategy}, down by {how}")
                done, said = asyncio.run(up_and_down(count, strategy, signal.Signals[how], options))
                steps += done
                complaints += said
    show(steps)
    for text, times in complaints.most_common(10):
        console.print(f"logged {times} x: {text}", style="dim", highlight=False)
    figures = {
        "complaints": dict(complaints.most_common(20)),
        "steps": [{**asdict(step), "excess": round(step.excess, 4)} for step in steps],
    }
    return conclude("fleet_steps", options, judge(steps), figures, console)


if __name__ == "__main__":
    sys.exit(main())
