"""Several processes on one worker id: kill or stop the one that works, and see that another takes over.

    python -m chaos.standby --kills 50
    python -m chaos.standby --stops 10 --retention workqueue --ttl 1

All processes are started with `--worker-id both --standby`; one holds the lease and handles, the others stand by. A
kill (SIGKILL) is followed by a replacement, which stands by then; a stop (SIGSTOP) lasts for three leases. Must hold,
besides the rules of all runs: another process handles within the lease and one second; one that was stopped has lost
its pin (on streams with limits retention, the only ones with a pin) and starts nothing when it wakes; and what was
finished, that is handled and acknowledged, is not started again by anybody. A witness from outside tells what was
acknowledged. A call that had ended, and whose process was cut off before its acknowledgement left, is counted on its
own: nobody can tell it from one that was running. Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from benchmarks.report import LiveLine
from benchmarks.verdicts import Verdict

from chaos.faults import Fault
from chaos.notes import Call
from chaos.outcome import Outcome, conclude, run_program
from chaos.site import STREAM, Site, add_load_options, load_of, open_site
from chaos.timings import Spread, held_by, takeover_s
from chaos.witness import Witness, witnessing
from chaos.workers import WorkerProcess

LATE_S = 1.0
"""What is allowed on top of the lease."""
LEASES = 3
SHARED = ("--worker-id", "both", "--standby")
_SETTLED_LEASES = 2.5
"""When somebody has held the id for so long, a pull of those who stand by waits at the server."""
_SETTLED_SHARE = 0.1
_READY_S = 60.0
_SENT_S = 0.1
"""How long after the end of a handler its acknowledgement may take to get to the server, on a busy machine."""

CONSUMER = "chaos-both"
AGAIN = "finished and started again"
UNACKNOWLEDGED = "ended just before, acknowledgement not sent, and started again"
RUNNING = "running then, and started again"


@dataclass(slots=True)
class Seen:
    """What was seen of the faults."""

    first: list[float] = field(default_factory=list)
    """From each fault to the first message that another process handled."""
    each: list[float] = field(default_factory=list)
    """The same for each partition."""
    kept_pins: int = 0
    """Stops after which the process that was stopped was still pinned."""


async def run(options: argparse.Namespace) -> Outcome:
    """Do it."""
    chance, line, seen = random.Random(options.seed), LiveLine(), Seen()
    async with open_site(load_of(options, ids=1)) as site, witnessing(site.server.url, STREAM, CONSUMER) as witness:
        await site.start(lambda slot: site.workers.start(slot, arguments=SHARED))
        for number in range(options.kills + options.stops):
            kills = number < options.kills
            victim = await _choose(site, chance)
            taken = await (_kill(site, victim) if kills else _stop(site, victim, seen))
            seen.first.append(min(taken, default=_READY_S))
            seen.each += taken
            word = f"kill {number + 1} of {options.kills}" if kills else f"stop {number + 1 - options.kills}"
            line.show(f"{word}: {seen.first[-1]:.2f} s, {site.notes.finished:,} handled")
        line.end()
        ending = await site.finish()
        spread, again = Spread.of(seen.first), classify(site, witness)
        return conclude(
            f"chaos_standby_{'stops' if options.stops else 'kills'}_{options.retention}_{options.ttl_s:g}s",
            options,
            site,
            ending,
            repeats_allowed=True,
            verdicts=_verdicts(site, seen, spread, again, witness),
            figures={
                "lease and priority_timeout, s": options.ttl_s,
                "from the fault to the first message": spread,
                "p50 and p99 in leases": [round(s / options.ttl_s, 2) for s in (spread.p50_s, spread.p99_s)],
                "from the fault to the first message of each partition": Spread.of(seen.each),
                UNACKNOWLEDGED: again[UNACKNOWLEDGED],
                RUNNING: again[RUNNING],
            },
        )


def _verdicts(site: Site, seen: Seen, spread: Spread, again: Counter[str], witness: Witness) -> list[Verdict]:
    due_s = site.load.ttl_s + LATE_S
    stops = [fault for fault in site.faults.all if fault.kind == "stop"]
    late = f"{spread}; {sum(taken > due_s for taken in seen.first)} later"
    finished = f"{again[AGAIN]:,} of {len(witness.at_ns):,} acknowledged"
    found = [
        Verdict(f"handled by others within {due_s:g} s", late, bool(seen.first) and spread.p99_s <= due_s),
        Verdict(AGAIN, finished, not again[AGAIN] and bool(witness.at_ns)),
    ]
    if stops:
        stale = sum(_started_when_woken(site, fault) for fault in stops)
        found.append(Verdict("started by one that was stopped, when it woke", f"{stale:,}", not stale))
        if site.load.retention == "limits":
            pins = f"{seen.kept_pins} of {len(stops)}"
            found.append(Verdict("kept their pin while they were stopped", pins, not seen.kept_pins))
    return found


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


async def _stop(site: Site, victim: WorkerProcess, seen: Seen) -> list[float]:
    """Stop for three leases, and wake; returns how long each partition rested."""
    rows = site.notes.rows()
    pinned = await _pinned(site)
    fault = site.faults.stop(victim)
    site.notes.poll()
    theirs = held_by(site.notes, victim.name)
    await site.rest(LEASES * site.load.ttl_s)
    seen.kept_pins += await _pinned(site) == pinned
    site.faults.wake(victim, fault)
    await site.until(lambda: None not in _rested(site, theirs, victim, fault, rows), _READY_S)
    return [_READY_S if s is None else s for s in _rested(site, theirs, victim, fault, rows)]


async def _pinned(site: Site) -> list[str]:
    """The server's name for the client that is pinned; none on streams without a pin."""
    info = await site.observer.api.consumer_info(STREAM, CONSUMER)
    return [state.pinned_id for state in info.groups]


def _started_when_woken(site: Site, stop: Fault) -> int:
    """Calls that a process began when it had been woken, under what it had owned before it was stopped."""
    index, stale = site.notes.process_index(stop.target), 0
    for calls in site.notes.calls.values():
        own = [call for call in calls.since(0) if call.process == index]
        before = max((call.fence for call in own if call.start_ns < stop.until_ns), default=-1)
        stale += sum(call.start_ns >= stop.until_ns and call.fence <= before for call in own)
    return stale


def _rested(
    site: Site, partitions: Iterable[str], victim: WorkerProcess, fault: Fault, rows: dict[str, int]
) -> list[float | None]:
    return [takeover_s(site.notes, p, victim.name, fault.at_ns, rows.get(p, 0)) for p in partitions]


# ── what was handled again ────────────────────────────────────────────────────────────────────────────────────────


def classify(site: Site, witness: Witness) -> Counter[str]:
    """Tell the messages that were started again by what their first call had come to when its process was cut off."""
    found: Counter[str] = Counter()
    notes = site.notes
    for calls in notes.calls.values():
        for before, after in _repeats(calls.by_start()):
            process = notes.processes[before.process].name
            faults = [f for f in site.faults.all if f.target == process and f.at_ns <= after.start_ns]
            acknowledged = witness.before(before.seq, after.start_ns)
            found[_what(before, faults, acknowledged=acknowledged)] += 1
    return found


def _repeats(calls: Iterable[Call]) -> Iterator[tuple[Call, Call]]:
    """Each call of a message that had been started before, with the call before it."""
    latest: dict[int, Call] = {}
    for call in calls:
        if before := latest.get(call.seq):
            yield before, call
        latest[call.seq] = call


def _what(before: Call, faults: Iterable[Fault], *, acknowledged: bool) -> str:
    """What a call that was repeated had come to; only one that was cut off may be repeated, and not acknowledged."""
    if acknowledged:
        return AGAIN
    if not before.end_ns:
        return RUNNING
    for fault in faults:
        # A kill is noted before the signal is sent, so the last calls may be a little younger than the note. A stop
        # is noted before and after, and works a moment later.
        killed = math.isinf(fault.until_ns)
        if not killed and before.start_ns < fault.until_ns <= before.end_ns:
            return RUNNING  # it ended when its process had woken
        cut_off_ns = fault.sent_ns or fault.at_ns
        if before.end_ns >= cut_off_ns - _SENT_S * 1e9 and (killed or before.end_ns < fault.until_ns):
            return UNACKNOWLEDGED
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
