"""Move partitions while a cluster of three servers loses its stream leader, by SIGKILL and by step-down.

    python -m chaos.cluster
    python -m chaos.cluster --moves 10 --retention workqueue --losses step-down

For each move (or `--batch` of them) the order is written, and some milliseconds later the leader of the stream is
lost; every other time it is the leader of the control plane's bucket. A killed node starts again a second later, and
the next move waits until all replicas have caught up. Must hold: nothing lost, order kept, every partition arrives.

While a stream elects its leader nobody can renew a lease; where that takes longer than the lease, partitions may get
another owner, which repeats what was in flight. Exit code 1 if a rule was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time

from benchmarks.report import LiveLine
from benchmarks.verdicts import Verdict

from chaos.moves import choose_placements, fences
from chaos.orders import obeyed, place
from chaos.outcome import Outcome, conclude, run_program
from chaos.servers import healed, kill_leader, step_down, streams
from chaos.site import Site, add_load_options, load_of, open_site
from chaos.timings import Spread, pauses

LOSSES = ("kill", "step-down")
_MOVE_S = 60.0
_DOWN_S = 1.0


async def run(options: argparse.Namespace) -> Outcome:
    """Do it."""
    chance = random.Random(options.seed)
    line = LiveLine()
    done = dict.fromkeys(options.losses, 0)
    took_s: dict[str, list[float]] = {loss: [] for loss in options.losses}
    stuck: dict[str, str] = {}
    async with open_site(load_of(options, nodes=3, drain_s=120.0)) as site:
        await site.start()
        for loss in options.losses:
            while done[loss] < options.moves and not stuck:
                bucket = len(took_s[loss]) % 2 == 1
                moved, seconds, stuck = await _move(site, chance, loss, options.batch, bucket=bucket)
                done[loss] += moved
                took_s[loss].append(seconds)
                line.show(f"{loss}: {done[loss]} of {options.moves} moved, {site.notes.finished:,} handled")
        line.end()
        await site.rest(1.0)
        rests = pauses(site.notes, site.began_ns)
        ending = await site.finish()
        return conclude(
            f"chaos_cluster_{options.retention}",
            options,
            site,
            ending,
            repeats_allowed=True,
            verdicts=[
                Verdict(
                    f"moved while the leader was lost by {loss}",
                    f"{done[loss]} {stuck or ''}",
                    done[loss] >= options.moves,
                )
                for loss in options.losses
            ],
            figures={
                **{f"time from order to arrival, {loss}": Spread.of(took_s[loss]) for loss in options.losses},
                "pause at changes of owner": Spread.of(rests.at_moves),
            },
        )


async def _move(
    site: Site, chance: random.Random, loss: str, number: int, *, bucket: bool
) -> tuple[int, float, dict[str, str]]:
    """Order, lose the leader, wait, heal; returns how many moved, how long it took, and what did not arrive."""
    placements = choose_placements(site, chance, number)
    before, began_s = fences(site), time.monotonic()
    await place(site.bucket, placements)
    await asyncio.sleep(chance.uniform(0.0, 0.15))
    stream = streams(site)[bucket]
    if loss == "kill":
        outage = site.faults.outage("node kill", stream, leases=True)
        node = await kill_leader(site, stream)
        await site.rest(_DOWN_S)
        await site.cluster.restart(node)
        arriving = asyncio.create_task(obeyed(site.observer, placements, _MOVE_S))
        await healed(site)
        outage.undone()
        stuck = await arriving
    else:
        await step_down(site, stream)
        stuck = await obeyed(site.observer, placements, _MOVE_S)
        await healed(site)
    took_s = time.monotonic() - began_s
    after = fences(site)
    return sum(after[p] > before[p] for p in placements), took_s, stuck


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moves", type=int, default=50, help="for each kind of loss")
    parser.add_argument("--batch", type=int, default=1, help="partitions that move during one loss")
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    add_load_options(parser, workers=3, partitions=12, rate=200.0, ttl_s=5.0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run_program(parse(), run))
