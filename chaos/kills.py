"""SIGKILL workers at random under load, restart each, and see that others go on with what it had.

    python -m chaos.kills
    python -m chaos.kills --kills 20 --retention workqueue --seed 7

Each kill waits until every partition of the killed process is handled by somebody else; its replacement starts at
once. Must hold: nothing lost, order kept, repeats no more than what was in flight, and the partitions of a killed
worker are handled again within the lease and one second. Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import random
import sys

from benchmarks.report import LiveLine
from benchmarks.verdicts import Verdict

from chaos.outcome import Outcome, conclude, run_program
from chaos.site import Site, add_load_options, load_of, open_site
from chaos.timings import Spread, held_by, repeats_after, takeover_s

LATE_S = 1.0
"""What is allowed on top of the lease."""
_GIVE_UP_S = 60.0


async def run(options: argparse.Namespace) -> Outcome:
    """Do it."""
    chance = random.Random(options.seed)
    line = LiveLine()
    takeovers: list[float] = []
    async with open_site(load_of(options)) as site:
        await site.start()
        for number in range(options.kills):
            taken = await _kill_one(site, chance)
            takeovers += taken
            slowest_s = max(taken, default=0.0)
            line.show(f"kill {number + 1} of {options.kills}: {slowest_s:.2f} s, {site.notes.finished:,} handled")
        line.end()
        ending = await site.finish()
        late = sum(taken > options.ttl_s + LATE_S for taken in takeovers)
        spread = Spread.of(takeovers)
        repeats = Spread.of(_repeats_per_kill(site))
        return conclude(
            f"chaos_kills_{options.retention}",
            options,
            site,
            ending,
            repeats_allowed=True,
            verdicts=[
                Verdict(
                    f"handled by others within {options.ttl_s + LATE_S:g} s of the kill",
                    f"{spread}; {late} later",
                    bool(takeovers) and spread.p99_s <= options.ttl_s + LATE_S,
                )
            ],
            figures={
                "from kill to first message of each moved partition": spread,
                "repeats for each kill": {"p50": repeats.p50_s, "p99": repeats.p99_s, "max": repeats.max_s},
            },
        )


async def _kill_one(site: Site, chance: random.Random) -> list[float]:
    """Kill, restart, and wait for the others; returns how long each partition rested."""

    def at_work() -> list[int]:
        return [slot for slot, w in sorted(site.workers.running.items()) if held_by(site.notes, w.name)]

    # Those killed before may still be on their way back; somebody must be there to take over.
    await site.until(lambda: len(at_work()) > 1, 30.0)
    victim = site.workers.running[chance.choice(at_work())]
    await site.rest(chance.uniform(0.0, 0.5))
    rows = site.notes.rows()
    fault = await site.faults.kill(victim)
    site.notes.poll()
    theirs = held_by(site.notes, victim.name)
    site.workers.start(victim.slot)

    def rested() -> list[float | None]:
        return [takeover_s(site.notes, p, victim.name, fault.at_ns, rows.get(p, 0)) for p in theirs]

    await site.until(lambda: None not in rested(), _GIVE_UP_S)
    return [_GIVE_UP_S if taken is None else taken for taken in rested()]


def _repeats_per_kill(site: Site) -> list[float]:
    killed = {site.notes.process_index(fault.target) for fault in site.faults.all if fault.kind == "kill"}
    counts = dict.fromkeys(killed, 0.0)
    for calls in site.notes.calls.values():
        ordered = calls.by_start()
        for process in killed:
            counts[process] += sum(1 for _ in repeats_after(ordered, process))
    return list(counts.values())


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    add_load_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run_program(parse(), run))
