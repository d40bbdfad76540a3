"""Move partitions between live workers by orders, many times under load.

    python -m chaos.moves
    python -m chaos.moves --moves 100 --retention workqueue

Some partitions at a time are ordered to other workers with one change of the orders; the next ones follow when the
claims say that all are there. Those that move get `--hot-rate` messages a second each. Must hold: nothing lost,
nothing repeated, order kept. The pause of a moved partition is the time from the end of the old owner's last handler
to the start of the new owner's first, less the time in which no message was there. Exit code 1 if a rule was broken,
or if a partition did not move.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Mapping

from benchmarks.report import LiveLine
from benchmarks.verdicts import Verdict

from chaos.orders import obeyed, place
from chaos.outcome import Outcome, conclude, run_program
from chaos.site import Site, add_load_options, load_of, open_site
from chaos.timings import Spread, pauses

PAUSE_AIM_S = 0.1
_MOVE_S = 30.0
_WARM_UP_S = 0.3


async def run(options: argparse.Namespace) -> Outcome:
    """Do it."""
    chance = random.Random(options.seed)
    line = LiveLine()
    moved, took_s = 0, []
    stuck: dict[str, str] = {}
    async with open_site(load_of(options)) as site:
        await site.start()
        while moved < options.moves and not stuck:
            placements = choose_placements(site, chance, min(options.batch, options.moves - moved))
            _heat(site, placements, options.hot_rate)
            await site.rest(_WARM_UP_S)
            before, began_s = fences(site), time.monotonic()
            await place(site.bucket, placements)
            stuck = await obeyed(site.observer, placements, _MOVE_S)
            took_s.append(time.monotonic() - began_s)
            after = fences(site)
            moved += sum(after[p] > before[p] for p in placements)
            line.show(f"{moved} of {options.moves} moved, {site.notes.finished:,} handled")
        line.end()
        # The last ones are to be handled where they went.
        await site.rest(1.0)
        rests = pauses(site.notes, site.began_ns)
        ending = await site.finish()
        pause = Spread.of(rests.at_moves)
        return conclude(
            f"chaos_moves_{options.retention}",
            options,
            site,
            ending,
            verdicts=[Verdict("partitions moved as ordered", f"{moved} of {options.moves} {stuck or ''}", not stuck)],
            figures={
                "moves by the claims": moved,
                "moves by the handlers": len(rests.at_moves),
                f"time for an order of up to {options.batch} partitions": Spread.of(took_s),
                f"pause of a moved partition (aim: p99 under {PAUSE_AIM_S:g} s)": pause,
                "pause between two messages without a move": Spread.of(rests.otherwise),
            },
        )


def fences(site: Site) -> dict[str, int]:
    """The fence token of each partition, by the claims."""
    return {partition: claim.fence_token for partition, claim in site.observer.records.claims.items()}


def choose_placements(site: Site, chance: random.Random, number: int) -> dict[str, str]:
    """Some partitions, each with a worker that does not own it."""
    owners = site.observer.owners
    workers = sorted(w for w, member in site.observer.records.members.items() if member.state == "active")
    names = chance.sample(sorted(owners), min(number, len(owners)))
    return {p: chance.choice([worker for worker in workers if worker != owners[p]]) for p in names}


def _heat(site: Site, moving: Mapping[str, str], hot_rate: float) -> None:
    """Publish more to those that move, so that the pause is not hidden between two messages."""
    site.publisher.set_rates({p: hot_rate if p in moving else rate for p, rate in site.even_rates().items()})


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moves", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=10, help="partitions in one change of the orders")
    parser.add_argument("--hot-rate", type=float, default=150.0, help="messages a second to each that moves")
    add_load_options(parser, partitions=40, rate=200.0, takes_ms=(0.0, 2.0))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run_program(parse(), run))
