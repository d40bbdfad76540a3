"""Restart all workers one after the other under load: each gets its own partitions back, and nobody else's move.

    python -m chaos.rolling
    python -m chaos.rolling --workers 4 --rounds 3

Each worker has an identity. It is told to leave (SIGTERM), and started again with the same identity when it has left;
the next one follows when it handles its partitions again. Must hold: owners after are the owners before, each
partition was in no other hands in between, nothing lost, order kept, nothing repeated. Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import random
import sys

from benchmarks.report import LiveLine
from benchmarks.verdicts import Verdict

from chaos.outcome import Outcome, conclude, run_program
from chaos.site import Site, add_load_options, load_of, open_site
from chaos.timings import Spread, held_by, pauses

_RETURN_S = 40.0


async def run(options: argparse.Namespace) -> Outcome:
    """Do it."""
    chance = random.Random(options.seed)
    line = LiveLine()
    codes: list[int] = []
    late: list[str] = []
    async with open_site(load_of(options)) as site:
        await site.start(lambda slot: site.workers.start(slot, identity=_identity(slot)))
        await site.rest(1.0)
        before = site.observer.owners
        for number in range(options.rounds):
            for slot in chance.sample(range(options.workers), options.workers):
                codes.append(await _restart(site, slot, late))
                line.show(f"round {number + 1}, slot {slot}: {site.notes.finished:,} handled")
        line.end()
        after = site.observer.owners
        rests = pauses(site.notes, site.began_ns)
        ending = await site.finish()
        moved = [p for p, owner in before.items() if after.get(p) != owner]
        strayed = _strayed(site, options.rounds)
        return conclude(
            f"chaos_rolling_{options.retention}",
            options,
            site,
            ending,
            verdicts=[
                Verdict(
                    "partitions keep their owners",
                    f"{len(moved)} of {len(before)} did not",
                    bool(before) and not moved,
                ),
                Verdict("partitions were in nobody else's hands", f"{len(strayed)} were {strayed[:3]}", not strayed),
                Verdict("workers leave with exit code 0", f"{sorted(set(codes))}", not any(codes)),
                Verdict("workers are back in time", f"{len(late)} late {late[:3]}", not late),
            ],
            figures={
                "rest of a partition at a restart": Spread.of(rests.at_moves),
                "rest between two messages otherwise": Spread.of(rests.otherwise),
            },
        )


def _identity(slot: int) -> str:
    return f"host-{slot}"


async def _restart(site: Site, slot: int, late: list[str]) -> int:
    """SIGTERM, start again, and wait until all that it had is handled by it again; returns the exit code."""
    old = site.workers.running[slot]
    site.notes.poll()
    theirs = held_by(site.notes, old.name)
    code = await site.faults.terminate(old)
    new = site.workers.start(slot, identity=_identity(slot))
    back = await site.until(lambda: set(theirs) <= set(held_by(site.notes, new.name)), _RETURN_S)
    if not back or not theirs:
        late.append(new.name)
    return code


def _strayed(site: Site, rounds: int) -> list[str]:
    """Partitions that had another owner in between; others have one fence token for each life of their worker."""
    fences = {p: {call.fence for call in calls.by_start()} for p, calls in site.notes.calls.items()}
    return sorted(p for p, found in fences.items() if len(found) != rounds + 1)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="how often each worker is restarted")
    add_load_options(parser, workers=10, partitions=40)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run_program(parse(), run))
