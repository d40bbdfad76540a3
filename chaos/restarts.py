"""SIGKILL the server again and again under load, with an immediate restart, and see that every worker goes on.

    python -m chaos.restarts
    python -m chaos.restarts --retention workqueue --loop asyncio --runs 10 --seed 7
    python -m chaos.restarts --all --kills 4 --worker-kills 2 --odd-messages

`--worker-kills` kills workers in between, `--odd-messages` publishes messages that handlers refuse, with content that
is hard to log, to store or to read. Must hold: nothing lost, order kept, one owner at a time, repeats no more than
what was in flight, every worker handles all of its partitions until the end, streams that remove what is
acknowledged are empty 15 s after the last message, each refused message is a dead letter, and no worker logged an
error that is not about the outage itself. Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import copy
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

from benchmarks.report import RESULTS, LiveLine, write_result
from benchmarks.verdicts import Verdict
from rich.console import Console
from rich.table import Table

from chaos.handler_options import LOOP
from chaos.log_rules import Circumstances, LogLine, judge_logs
from chaos.notes import Notes
from chaos.odd_messages import ODD_TEMPLATE
from chaos.odd_publisher import OddPublisher
from chaos.outcome import Outcome, conclude, printable, run_program
from chaos.site import RETENTIONS, Ending, Load, Site, add_load_options, load_of, open_site
from chaos.timings import Spread, held_by, pauses
from chaos.workers import WorkerProcess
from parti.core.dead_letter import is_original
from parti.embedded import Server
from parti.errors import PartiError
from parti.telemetry.logs import configure_logging

LOOPS = {"uvloop": "auto", "asyncio": "asyncio"}
"""The setting `event_loop` for each; `auto` is uvloop where it is installed, and a verdict says if it was."""
EMPTY_S = 15.0
_CALM_S = 20.0
"""Longest wait, after the last kill and the time of `--after`, until every partition is handled."""
_DRAIN_S = 30.0
_GONE_S = 30.0
"""Longest wait until the lease of a killed worker has ended."""
_ODD_RATE = 10.0
_ODD_SHARE = 10
"""One in so many partitions gets odd messages."""
_DEAD_LETTERS = "parti-dlq"


async def run(options: argparse.Namespace) -> Outcome:
    """Do it once."""
    chance = random.Random(options.seed)
    line = LiveLine() if options.runs == 1 and not options.all else None
    async with open_site(_load(options)) as site:
        await site.start()
        odd = _start_odd(site) if options.odd_messages else None
        took = await _kill_servers(site, options, chance, line)
        await site.rest(options.after_s)
        silent = await _silent_after(site)
        rests = pauses(site.notes, site.began_ns)
        if odd:
            await odd.stop()
        ending = await site.finish(empty_within_s=EMPTY_S)
        return conclude(
            f"chaos_restarts_{options.retention}_{options.loop}",
            options,
            site,
            ending,
            repeats_allowed=True,
            dead_letters_allowed=options.odd_messages,
            verdicts=[
                Verdict("every worker handles all of its partitions until the end", silent or "all do", not silent),
                *_emptied(options.retention, ending),
                await _buried(site),
                _logged(site),
                _looped(site, options.loop),
            ],
            figures={
                "from the kill of the server until it is back": Spread.of(took),
                "rest of a partition between two messages that were there": Spread.of(
                    [*rests.at_moves, *rests.otherwise]
                ),
                "odd messages stored": dict(odd.stored) if odd else {},
                "odd messages that the server refused": dict(odd.refused) if odd else {},
                "dead letters": ending.dead_letters,
                "consumers when messages were left": ending.waiting,
            },
        )


def _load(options: argparse.Namespace) -> Load:
    further: dict[str, Any] = {"event_loop": LOOPS[options.loop]}
    if not options.odd_messages:
        return load_of(options, further=further, drain_s=_DRAIN_S)
    # A repeated attempt would count as a repeat.
    return load_of(options, further={**further, "attempts": 1}, template=ODD_TEMPLATE, drain_s=_DRAIN_S)


def _start_odd(site: Site) -> OddPublisher:
    assert isinstance(site.server, Server)
    chosen = site.load.names[::_ODD_SHARE]
    return OddPublisher(site.server.port, site.directory, chosen, rate=_ODD_RATE, seed=site.load.seed)


async def _kill_servers(
    site: Site, options: argparse.Namespace, chance: random.Random, line: LiveLine | None
) -> list[float]:
    """Kill the server, and workers in between; returns how long each restart took."""
    victims = Counter(chance.randrange(max(1, options.kills - 1)) for _ in range(options.worker_kills))
    took = []
    replacing: list[asyncio.Task[None]] = []
    await site.rest(options.every_s)
    for number in range(options.kills):
        began_s = time.monotonic()
        await _restart_server(site)
        took.append(time.monotonic() - began_s)
        for _ in range(victims[number]):
            await site.rest(chance.uniform(0.0, options.every_s / 2))
            if site.workers.running:
                victim = site.workers.running[chance.choice(sorted(site.workers.running))]
                replacing.append(asyncio.create_task(_replace(site, victim)))
        if line:
            line.show(f"kill {number + 1} of {options.kills}: {site.notes.finished:,} handled")
        if number + 1 < options.kills:
            await site.rest(began_s + options.every_s - time.monotonic())
    await asyncio.gather(*replacing)
    if line:
        line.end()
    return took


async def _replace(site: Site, victim: WorkerProcess) -> None:
    """Kill a worker and start another one in its place.

    At once, except on an interest stream: there it waits until the worker id is free, and takes it with its consumer.
    Under a new id the consumer of the dead would hold back messages until it is removed, once a minute.
    """
    await site.faults.kill(victim)
    index = site.notes.process_index(victim.name)
    if site.load.retention == "interest" and index >= 0:
        theirs = site.notes.processes[index].workers[-1]
        await site.until(lambda: theirs not in site.observer.records.members, _GONE_S)
    site.workers.start(victim.slot)


async def _restart_server(site: Site) -> None:
    server = site.server
    assert isinstance(server, Server)
    outage = site.faults.outage("server kill", server.name)
    await server.kill()
    await server.restart()
    outage.undone()


# ── what must hold ────────────────────────────────────────────────────────────────────────────────────────────────


async def _silent_after(site: Site) -> str:
    """Which workers and partitions are silent although messages come; empty when none is."""
    longest_s = max(2.0, 10 * site.load.partitions / site.load.rate)

    def found() -> list[str]:
        workers = [worker.name for _, worker in sorted(site.workers.running.items())]
        return find_silent(site.notes, workers, site.load.names, time.time_ns() - round(longest_s * 1e9))

    await site.until(lambda: not found(), _CALM_S)
    return "; ".join(found())


def find_silent(notes: Notes, workers: Sequence[str], partitions: Collection[str], since_ns: int) -> list[str]:
    """Workers that have handled nothing, or nothing of some of their partitions, since then; in words."""
    quiet = {p for p in partitions if notes.latest.get(p, (0, 0))[0] < since_ns}
    found = []
    for worker in workers:
        theirs = held_by(notes, worker)
        mute = sorted(quiet.intersection(theirs))
        if mute or not theirs:
            found.append(f"{worker} is silent on {len(mute)} of its {len(theirs)} partitions {mute[:3]}")
        quiet.difference_update(mute)
    return [*found, *([f"{len(quiet)} partitions of nobody that runs {sorted(quiet)[:3]}"] if quiet else [])]


def _emptied(retention: str, ending: Ending) -> list[Verdict]:
    if retention == "limits":
        return []
    return [
        Verdict(f"the stream is empty {EMPTY_S:g} s after the last message", f"{ending.left} left", not ending.left)
    ]


async def _buried(site: Site) -> Verdict:
    """Whether exactly those messages are dead letters that a handler refused."""
    refused, buried = site.notes.raised, await _dead_letters(site)
    missing, beyond = sorted(refused - buried.keys()), sorted(buried.keys() - refused)
    twice = sum(number - 1 for number in buried.values())
    figure = f"{len(refused)} refused, {len(missing)} missing {missing[:3]}, {len(beyond)} not refused, {twice} twice"
    return Verdict("each refused message is a dead letter", figure, not missing and not beyond and not twice)


async def _dead_letters(site: Site) -> Counter[int]:
    """The sequences of the messages that became dead letters, read by hand: their headers are odd, too."""
    api = site.observer.api
    found: Counter[int] = Counter()
    if _DEAD_LETTERS not in await api.stream_names():
        return found
    for seq in range(1, (await api.stream_info(_DEAD_LETTERS)).last_seq + 1):
        answer = await api.call(f"STREAM.MSG.GET.{_DEAD_LETTERS}", {"seq": seq})
        if is_original(answer["message"]["subject"]):
            continue  # what did not fit into a letter
        header = base64.b64decode(answer["message"].get("hdrs", ""))
        origins = re.findall(rb"^Parti-Sequence: *(\d+)", header, re.MULTILINE)
        found[int(origins[-1]) if origins else 0] += 1
    return found


def _logged(site: Site) -> Verdict:
    about = Circumstances([(f.at_ns, f.until_ns) for f in site.faults.all if f.outage], site.notes.raised)
    found = judge_logs(site.directory.glob("w*.log"), about)
    number = sum(map(len, found.values()))
    kinds = Counter(_short(line) for lines in found.values() for line in lines)
    told = "; ".join(f"{count} x {text}" for text, count in kinds.most_common(5))
    return Verdict("errors logged that are not about the outage", f"{number} {told}".strip(), not number)


def _short(line: LogLine) -> str:
    event = line.event.partition("\n")[0]
    text = f"{event}: {line.detail}" if line.detail else event
    return printable(re.sub(r"\b0x[0-9a-f]+", "0x..", text), 160)


def _looped(site: Site, loop: str) -> Verdict:
    found = Counter(path.read_text() for path in site.directory.glob(f"*{LOOP}"))
    right = bool(found) and all(("uvloop" in module) == (loop == "uvloop") for module in found)
    return Verdict(f"workers run on {loop}", f"{dict(found)}", right)


# ── many runs ─────────────────────────────────────────────────────────────────────────────────────────────────────


def run_series(options: argparse.Namespace) -> int:
    """Run several times, one line for each, and a table at the end; returns the exit code."""
    configure_logging("error", "console")
    console = Console(width=None if sys.stdout.isatty() else 150)
    began_s = time.monotonic()
    outcomes = []
    cases = product(RETENTIONS, LOOPS) if options.all else [(options.retention, options.loop)]
    for (retention, loop), number in product(list(cases), range(options.runs)):
        single = copy.copy(options)
        single.retention, single.loop, single.seed = retention, loop, options.seed + number
        single.keep = options.keep / f"{retention}-{loop}-{single.seed}" if options.keep else None
        outcomes.append(_run_one(single, console))
    console.print(_table(outcomes))
    name = "chaos_restarts" if options.all else f"chaos_restarts_{options.retention}_{options.loop}"
    data = {"passed": all(o.passed for o in outcomes), "runs": [_as_data(outcome) for outcome in outcomes]}
    console.print(f"written to {write_result(name, data, options.results or RESULTS)}", soft_wrap=True)
    failed = sum(not outcome.passed for outcome in outcomes)
    word = f"{failed} of {len(outcomes)} runs NOT PASSED" if failed else f"all {len(outcomes)} runs passed"
    console.print(f"{name}: {word}, {time.monotonic() - began_s:.0f} s")
    return 1 if failed else 0


def _run_one(options: argparse.Namespace, console: Console) -> Outcome:
    began_s = time.monotonic()
    try:
        outcome = asyncio.run(run(options))
    except (PartiError, RuntimeError, OSError) as error:
        settings = {"retention": options.retention, "loop": options.loop, "seed": options.seed}
        outcome = Outcome("", settings, [Verdict("the run itself", repr(error), False)], {"messages": 0})
    outcome.figures["seconds"] = round(time.monotonic() - began_s, 1)
    told = f"{'passed' if outcome.passed else 'NOT PASSED'}, {outcome.figures['messages']:,} messages"
    told += f", faults {outcome.figures.get('faults')}, {outcome.figures['seconds']:.0f} s"
    console.print(f"{_title(outcome)}: {told}", highlight=False, markup=False)
    for verdict in outcome.verdicts:
        if not verdict.passed:
            console.print(f"    {verdict.what}: {verdict.figure}", style="red", highlight=False, markup=False)
    if not outcome.passed:
        for notice in outcome.notices:
            console.print(f"    {notice}", style="dim", highlight=False, markup=False)
        console.print(f"    notes and logs are in {outcome.evidence}", soft_wrap=True)
    return outcome


def _title(outcome: Outcome) -> str:
    return f"{outcome.settings['retention']} {outcome.settings['loop']} seed {outcome.settings['seed']}"


def _table(outcomes: list[Outcome]) -> Table:
    table = Table("run", "messages", "repeated", "left", "dead letters", "worst rest", "NOT MET")
    for outcome in outcomes:
        figures = outcome.figures
        rest = figures.get("rest of a partition between two messages that were there")
        shown = [figures.get(name, "") for name in ("messages", "repeated", "left in the stream", "dead letters")]
        broken = "; ".join(verdict.what for verdict in outcome.verdicts if not verdict.passed)
        table.add_row(_title(outcome), *map(str, shown), f"{rest.max_s:.2f} s" if rest else "", broken)
    return table


def _as_data(outcome: Outcome) -> dict[str, Any]:
    figures = {name: asdict(value) if isinstance(value, Spread) else value for name, value in outcome.figures.items()}
    verdicts = [asdict(verdict) for verdict in outcome.verdicts]
    return {"settings": dict(outcome.settings), "passed": outcome.passed, "verdicts": verdicts, "figures": figures}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="of the server")
    parser.add_argument("--every", dest="every_s", type=float, default=4.0, help="seconds from one kill to the next")
    parser.add_argument(
        "--after", dest="after_s", type=float, default=6.0, help="seconds of load after the last kill"
    )
    parser.add_argument("--worker-kills", type=int, default=0, help="SIGKILL of workers in between")
    parser.add_argument("--odd-messages", action="store_true", help="publish messages that are hard to handle, too")
    parser.add_argument("--loop", choices=tuple(LOOPS), default="uvloop", help="event loop of the workers")
    parser.add_argument("--runs", type=int, default=1, help="in a row, each with the next seed")
    parser.add_argument("--all", action="store_true", help="runs on every retention and both event loops")
    add_load_options(parser, workers=4, partitions=200, rate=1500.0, ttl_s=5.0)
    return parser.parse_args(arguments)


def main() -> int:
    """Run once or several times; returns the exit code."""
    options = parse()
    return run_program(options, run) if options.runs == 1 and not options.all else run_series(options)


if __name__ == "__main__":
    sys.exit(main())
