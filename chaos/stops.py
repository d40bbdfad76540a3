"""SIGSTOP a worker for three leases under load, then SIGCONT: it must notice that it is no longer the owner.

    python -m chaos.stops
    python -m chaos.stops --stops 20 --retention interest

While a worker is stopped, others take over what it had; when it wakes it holds messages, timers and a lease that is
long over. Must hold: no handler of it starts after the next owner's first, nothing lost, order kept, and handled
again only what it had in flight. Every third time it is the rebalancer that is stopped. Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import random
import sys

from benchmarks.report import LiveLine
from benchmarks.verdicts import Verdict

from chaos.outcome import Outcome, conclude, run_program
from chaos.site import Site, add_load_options, load_of, open_site
from chaos.timings import Spread, held_by, takeover_s
from chaos.workers import WorkerProcess

LEASES = 3
_RETURN_S = 30.0


async def run(options: argparse.Namespace) -> Outcome:
    """Do it."""
    chance = random.Random(options.seed)
    line = LiveLine()
    takeovers: list[float] = []
    kept = 0
    async with open_site(load_of(options)) as site:
        await site.start()
        for number in range(options.stops):
            victim = _choose(site, chance, leader=number % 3 == 2)
            taken, left = await _stop_one(site, victim, chance)
            takeovers += taken
            kept += left
            line.show(
                f"stop {number + 1} of {options.stops}: {len(taken)} taken over, {site.notes.finished:,} handled"
            )
        line.end()
        ending = await site.finish()
        spread = Spread.of(takeovers)
        return conclude(
            f"chaos_stops_{options.retention}",
            options,
            site,
            ending,
            repeats_allowed=True,
            verdicts=[
                Verdict(
                    f"others took over during each of {options.stops} stops of {LEASES * options.ttl_s:g} s",
                    f"{spread}; {kept} not",
                    bool(takeovers) and not kept,
                )
            ],
            figures={"from stop to first message of each moved partition": spread},
        )


def _choose(site: Site, chance: random.Random, *, leader: bool) -> WorkerProcess:
    member = site.observer.records.members.get(site.observer.leader)
    found = site.workers.by_pid(member.pid) if leader and member else None
    return found or site.workers.running[chance.choice(sorted(site.workers.running))]


async def _stop_one(site: Site, victim: WorkerProcess, chance: random.Random) -> tuple[list[float], int]:
    """Stop and wake; returns how long partitions rested that were taken over, and how many were not."""
    await site.until(lambda: bool(held_by(site.notes, victim.name)), _RETURN_S)
    await site.rest(chance.uniform(0.0, 0.5))
    rows = site.notes.rows()
    fault = site.faults.stop(victim)
    site.notes.poll()
    theirs = held_by(site.notes, victim.name)
    await site.rest(LEASES * site.load.ttl_s)
    site.notes.poll()
    rested = [takeover_s(site.notes, p, victim.name, fault.at_ns, rows.get(p, 0)) for p in theirs]
    site.faults.wake(victim, fault)
    # It comes back as a member and is given something.
    await site.until(lambda: bool(held_by(site.notes, victim.name)), _RETURN_S)
    return [taken for taken in rested if taken is not None], rested.count(None)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=10)
    # Calls that take longer are more often in the middle when the process is stopped.
    add_load_options(parser, takes_ms=(0.0, 20.0))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run_program(parse(), run))
