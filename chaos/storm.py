"""Everything at once for a while: kills, stops, restarts, cuts, lost servers, moves, joins and leaves, from a seed.

    python -m chaos.storm --seconds 120 --seed 42
    python -m chaos.storm --nodes 3 --retention workqueue

Must hold at the end: nothing lost, order kept, one owner at a time, fence tokens that grow, and repeated only what
was in flight when a process was killed, stopped or cut off. Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

from benchmarks.report import LiveLine
from benchmarks.verdicts import Verdict
from tests.integration.proxy import Proxy, proxy_to

from chaos.moves import choose_placements
from chaos.orders import place
from chaos.outcome import Outcome, conclude, run_program
from chaos.servers import healed, kill_leader, step_down, streams
from chaos.site import Site, add_load_options, load_of, open_site
from chaos.timings import Spread, pauses
from chaos.workers import WorkerProcess
from parti.embedded import Server
from parti.errors import PartiError

Action = Callable[[random.Random], Awaitable[None]]
_CALM_S = 30.0


class Storm:
    """Does one thing after the other to workers, servers and orders."""

    def __init__(self, site: Site, chance: random.Random, proxies: Sequence[Proxy]) -> None:
        self._site = site
        self._chance = chance
        self._proxies = proxies
        """Workers of the first slots connect through these."""
        self._busy: set[int] = set()
        """Slots that something is done to at the moment."""

    async def run(self, seconds: float) -> None:
        """Let it rage, and undo everything in the end."""
        until_s = time.monotonic() + seconds
        workers: list[Action] = [self._kill, self._stop, self._restart, self._cut, self._join, self._leave]
        servers: list[Action] = (
            [self._lose_node, self._step_down] if self._site.load.nodes > 1 else [self._lose_server]
        )
        await asyncio.gather(
            self._repeat(workers, until_s, 0.5, 3.0),
            self._repeat(workers, until_s, 0.5, 3.0),
            self._repeat(servers, until_s, 8.0, 20.0),
            self._repeat([self._move], until_s, 0.5, 2.0),
        )

    async def _repeat(self, actions: Sequence[Action], until_s: float, least_s: float, most_s: float) -> None:
        # Each actor has its own chance, or what one chooses would depend on how fast the others are.
        chance = random.Random(self._chance.random())
        while time.monotonic() < until_s:
            await asyncio.sleep(chance.uniform(least_s, most_s))
            await chance.choice(actions)(chance)

    # ── workers ───────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, slot: int) -> None:
        """Start a worker, through a proxy in the first slots."""
        self._site.workers.start(slot, url=self._proxies[slot].url if slot < len(self._proxies) else None)

    def _choose(self, chance: random.Random, slots: Sequence[int]) -> WorkerProcess | None:
        free = [slot for slot in slots if slot not in self._busy and slot in self._site.workers.running]
        return self._site.workers.running[chance.choice(free)] if free else None

    async def _kill(self, chance: random.Random) -> None:
        if worker := self._choose(chance, sorted(self._site.workers.running)):
            self._busy.add(worker.slot)
            await self._site.faults.kill(worker)
            await asyncio.sleep(chance.uniform(0.0, 2.0))
            self.start(worker.slot)
            self._busy.discard(worker.slot)

    async def _stop(self, chance: random.Random) -> None:
        if worker := self._choose(chance, sorted(self._site.workers.running)):
            self._busy.add(worker.slot)
            fault = self._site.faults.stop(worker)
            await asyncio.sleep(chance.choice([0.2, 1.0, 3.0]) * self._site.load.ttl_s)
            self._site.faults.wake(worker, fault)
            self._busy.discard(worker.slot)

    async def _restart(self, chance: random.Random) -> None:
        if worker := self._choose(chance, sorted(self._site.workers.running)):
            self._busy.add(worker.slot)
            await self._site.faults.terminate(worker)
            self.start(worker.slot)
            self._busy.discard(worker.slot)

    async def _cut(self, chance: random.Random) -> None:
        if worker := self._choose(chance, range(len(self._proxies))):
            self._busy.add(worker.slot)
            proxy = self._proxies[worker.slot]
            long = chance.random() < 0.5
            fault = self._site.faults.note("long cut" if long else "cut", worker.name, interrupts=long)
            if long:
                proxy.refuse()
                await asyncio.sleep(2 * self._site.load.ttl_s)
                proxy.refuse(False)
            else:
                proxy.cut()
            fault.undone()
            self._busy.discard(worker.slot)

    async def _join(self, chance: random.Random) -> None:
        if len(self._site.workers.running) < self._site.load.workers + 2:
            slots = range(self._site.load.workers + 4)
            free = [s for s in slots if s not in self._site.workers.running and s not in self._busy]
            self._site.faults.note("join", str(free[0])).undone()
            self.start(free[0])

    async def _leave(self, chance: random.Random) -> None:
        if len(self._site.workers.running) > max(2, self._site.load.workers - 2):
            worker = self._choose(chance, sorted(self._site.workers.running))
            if worker:
                self._busy.add(worker.slot)
                await self._site.faults.terminate(worker)
                self._busy.discard(worker.slot)

    # ── servers and orders ────────────────────────────────────────────────────────────────────────────────────

    async def _lose_server(self, chance: random.Random) -> None:
        server = self._site.server
        assert isinstance(server, Server)
        outage = self._site.faults.outage("server kill", server.name)
        await server.kill()
        await asyncio.sleep(chance.choice([0.0, 0.5, 1.5]) * self._site.load.ttl_s)
        await server.restart()
        outage.undone()

    async def _lose_node(self, chance: random.Random) -> None:
        stream = chance.choice(streams(self._site))
        outage = self._site.faults.outage("node kill", stream, leases=True)
        node = await kill_leader(self._site, stream)
        await asyncio.sleep(chance.uniform(0.0, 3.0))
        await self._site.cluster.restart(node)
        await healed(self._site)
        outage.undone()

    async def _step_down(self, chance: random.Random) -> None:
        await step_down(self._site, chance.choice(streams(self._site)))

    async def _move(self, chance: random.Random) -> None:
        members = self._site.observer.records.members
        if len(members) < 2 or not self._site.observer.owners:
            return
        placements = choose_placements(self._site, chance, chance.randint(1, 5))
        try:
            await place(self._site.bucket, placements, timeout_s=5.0)
        except PartiError:
            return  # The server is away.
        self._site.faults.note("order", ",".join(placements)).undone()


async def run(options: argparse.Namespace) -> Outcome:
    """Do it."""
    chance = random.Random(options.seed)
    line = LiveLine()
    async with open_site(load_of(options, nodes=options.nodes, drain_s=120.0)) as site, AsyncExitStack() as stack:
        proxies = []
        if options.nodes == 1:
            port = int(site.server.url.rpartition(":")[2])
            proxies = [await stack.enter_async_context(proxy_to(port)) for _ in range(min(2, options.workers))]
        storm = Storm(site, chance, proxies)
        await site.start(start=storm.start)
        raging = asyncio.create_task(storm.run(options.seconds))
        while not raging.done():
            await site.rest(0.5)
            line.show(f"{sum(site.faults.counts().values())} faults, {site.notes.finished:,} handled")
        raging.result()
        line.end()
        began_s = time.monotonic()
        calm = await site.until(lambda: _handled_lately(site, time.time_ns()), _CALM_S)
        calm_s = time.monotonic() - began_s
        rests = pauses(site.notes, site.began_ns)
        ending = await site.finish()
        return conclude(
            f"chaos_storm_{options.retention}" + ("_cluster" if options.nodes > 1 else ""),
            options,
            site,
            ending,
            repeats_allowed=True,
            verdicts=[Verdict("all partitions are handled after the storm", f"after {calm_s:.1f} s", calm)],
            figures={"pause at changes of owner": Spread.of(rests.at_moves)},
        )


def _handled_lately(site: Site, now_ns: int) -> bool:
    """Whether every partition was handled within the last seconds, as it is when all is well."""
    longest_ns = 1e9 * max(1.0, 5 * site.load.partitions / site.load.rate)
    return all(now_ns - site.notes.latest.get(p, (0, 0))[0] < longest_ns for p in site.load.names)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--nodes", type=int, choices=(1, 3), default=1)
    add_load_options(parser, workers=5)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run_program(parse(), run))
