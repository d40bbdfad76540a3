"""Several processes on one worker id: kill or stop the one that works, and see that another takes over.

    python -m chaos.standby --kills 50
    python -m chaos.standby --stops 10 --retention workqueue --ttl 1

All processes are started with `--worker-id both --standby`; one holds the lease and handles, the others stand by. A
kill (SIGKILL) is followed by a replacement, which stands by then; a stop (SIGSTOP) lasts for three leases. Must hold,
besides the rules of all runs: another process handles within the lease and one second of a kill; one that was stopped
starts nothing when it wakes; and what was finished is not started again by anybody, except, as after any crash, what
had been finished so shortly before that its position was not stored. Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator

from benchmarks.report import LiveLine
from benchmarks.verdicts import Verdict

from chaos.faults import Fault
from chaos.notes import Call
from chaos.outcome import Outcome, conclude, run_program
from chaos.site import Site, add_load_options, load_of, open_site
from chaos.timings import Spread, held_by, takeover_s
from chaos.workers import WorkerProcess

LATE_S = 1.0
"""What is allowed on top of the lease."""
LEASES = 3
SHARED = ("--worker-id", "both", "--standby")
_SETTLED_LEASES = 2.5
"""When somebody has held the id for so long, a pull of those who stand by waits at the server."""
_SETTLED_SHARE = 0.1
_READY_S = 60.0

AGAIN = "finished before and started again"
UNSTORED = "finished just before, position not stored yet"
RUNNING = "running then, and started again"


async def run(options: argparse.Namespace) -> Outcome:
    """Do it."""
    chance = random.Random(options.seed)
    line = LiveLine()
    first: list[float] = []
    each: list[float] = []
    async with open_site(load_of(options, ids=1)) as site:
        await site.start(lambda slot: site.workers.start(slot, arguments=SHARED))
        for number in range(options.kills + options.stops):
            kills = number < options.kills
            victim = await _choose(site, chance)
            taken = await (_kill if kills else _stop)(site, victim)
            first.append(min(taken, default=_READY_S))
            each += taken
            word = f"kill {number + 1} of {options.kills}" if kills else f"stop {number + 1 - options.kills}"
            line.show(f"{word}: {first[-1]:.2f} s, {site.notes.finished:,} handled")
        line.end()
        ending = await site.finish()
        spread, again = Spread.of(first), classify(site)
        due_s = options.ttl_s + LATE_S
        return conclude(
            f"chaos_standby_{'stops' if options.stops else 'kills'}_{options.retention}_{options.ttl_s:g}s",
            options,
            site,
            ending,
            repeats_allowed=True,
            verdicts=[
                Verdict(
                    f"handled by others within {due_s:g} s",
                    f"{spread}; {sum(taken > due_s for taken in first)} later",
                    bool(first) and spread.p99_s <= due_s,
                ),
                Verdict(AGAIN, f"{again[AGAIN]:,}", not again[AGAIN]),
            ],
            figures={
                "lease and priority_timeout, s": options.ttl_s,
                "from the fault to the first message": spread,
                "p50 and p99 in leases": [round(s / options.ttl_s, 2) for s in (spread.p50_s, spread.p99_s)],
                "from the fault to the first message of each partition": Spread.of(each),
                UNSTORED: again[UNSTORED],
                RUNNING: again[RUNNING],
            },
        )


def _at_work(site: Site) -> WorkerProcess | None:
    """The process that started the last handler, if it still runs."""
    if not site.notes.latest:
        return None
    name = site.notes.processes[max(site.notes.latest.values())[1]].name
    return next((worker for worker in site.workers.running.values() if worker.name == name), None)


def _standing_by(site: Site) -> set[int]:
    """Process ids of those that say that they stand by."""
    pids = {record.pid for record in site.observer.records.standbys.values()}
    return pids & {worker.pid for worker in site.workers.running.values()}


async def _choose(site: Site, chance: random.Random) -> WorkerProcess:
    """Wait until somebody works and all others stand by; returns who works."""

    def ready() -> bool:
        worker = _at_work(site)
        return worker is not None and len(_standing_by(site) - {worker.pid}) == site.load.workers - 1

    if not await site.until(ready, _READY_S):
        raise RuntimeError(f"nobody stands by: {'; '.join(site.workers.crashed()) or 'all processes run'}")
    settled = chance.random() < _SETTLED_SHARE
    await site.rest(_SETTLED_LEASES * site.load.ttl_s if settled else chance.uniform(0.0, 0.5))
    worker = _at_work(site)
    assert worker
    return worker


async def _kill(site: Site, victim: WorkerProcess) -> list[float]:
    """Kill, start a replacement, and wait for the others; returns how long each partition rested."""
    rows = site.notes.rows()
    fault = await site.faults.kill(victim)
    site.notes.poll()
    theirs = held_by(site.notes, victim.name)
    site.workers.start(victim.slot, arguments=SHARED)
    await site.until(lambda: None not in _rested(site, theirs, victim, fault, rows), _READY_S)
    return [_READY_S if s is None else s for s in _rested(site, theirs, victim, fault, rows)]


async def _stop(site: Site, victim: WorkerProcess) -> list[float]:
    """Stop for three leases, and wake; returns how long each partition rested."""
    rows = site.notes.rows()
    fault = site.faults.stop(victim)
    site.notes.poll()
    theirs = held_by(site.notes, victim.name)
    await site.rest(LEASES * site.load.ttl_s)
    site.faults.wake(victim, fault)
    await site.until(lambda: None not in _rested(site, theirs, victim, fault, rows), _READY_S)
    return [_READY_S if s is None else s for s in _rested(site, theirs, victim, fault, rows)]


def _rested(
    site: Site, partitions: Iterable[str], victim: WorkerProcess, fault: Fault, rows: dict[str, int]
) -> list[float | None]:
    return [takeover_s(site.notes, p, victim.name, fault.at_ns, rows.get(p, 0)) for p in partitions]


# ── what was handled again ────────────────────────────────────────────────────────────────────────────────────────


def classify(site: Site) -> Counter[str]:
    """Tell the messages that were started again by what their first call was doing when its process was cut off."""
    found: Counter[str] = Counter()
    notes = site.notes
    for calls in notes.calls.values():
        for before, after in _repeats(calls.by_start()):
            process = notes.processes[before.process].name
            faults = [f for f in site.faults.all if f.target == process and f.at_ns <= after.start_ns]
            found[_what(before, faults, site.load.in_flight_s)] += 1
    return found


def _repeats(calls: Iterable[Call]) -> Iterator[tuple[Call, Call]]:
    """Each call of a message that had been started before, with the call before it."""
    latest: dict[int, Call] = {}
    for call in calls:
        if before := latest.get(call.seq):
            yield before, call
        latest[call.seq] = call


def _what(before: Call, faults: Iterable[Fault], in_flight_s: float) -> str:
    if not before.end_ns:
        return RUNNING
    for fault in faults:
        # A kill is noted before the signal is sent, so the last calls may be a little younger than the note.
        killed = math.isinf(fault.until_ns)
        if not killed and before.start_ns <= fault.at_ns < before.end_ns:
            return RUNNING  # it ended when its process had woken
        if before.end_ns >= fault.at_ns - in_flight_s * 1e9 and (killed or before.end_ns <= fault.at_ns):
            return UNSTORED
    return AGAIN


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, help="how often the one that works is killed (50 without --stops)")
    parser.add_argument("--stops", type=int, default=0, help="how often it is stopped, after the kills")
    add_load_options(parser, workers=2)
    options = parser.parse_args(arguments)
    if options.kills is None:
        options.kills = 0 if options.stops else 50
    if options.workers < 2 or options.kills + options.stops < 1:
        parser.error("expected two workers at least, and a kill or a stop")
    return options


if __name__ == "__main__":
    sys.exit(run_program(parse(), run))
