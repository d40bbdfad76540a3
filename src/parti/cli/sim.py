"""`parti sim`: whole fleets in virtual time, one for each seed, until one of them breaks a promise."""

from __future__ import annotations

import os
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from parti.cli.control import count, open_console
from parti.errors import ConfigError
from parti.sim.bugs import BUGS
from parti.sim.history import Outcome
from parti.sim.runs import Failure, Tally, run_in_processes, run_one_in_process
from parti.sim.scenario import RETENTIONS

_SHOWN = 3
"""Complaints printed for each failing seed."""
_LISTED = 20
"""Failing seeds printed in full, as they are found."""


def sim(
    seeds: Annotated[int, typer.Option(metavar="N", min=1, help="How many seeds to run.")] = 200,
    seed: Annotated[int | None, typer.Option(metavar="S", min=0, help="Run this one seed only.")] = None,
    first: Annotated[int, typer.Option(metavar="S", min=0, help="The first seed.")] = 1,
    bug: Annotated[
        str | None, typer.Option(metavar="BUG", help=f"Plant a bug that must be found: {', '.join(BUGS)}.")
    ] = None,
    retention: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"Only streams with this retention: {', '.join(RETENTIONS)}.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Processes to run in; one for each core if left out.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="With --seed: print all that happens.")] = False,
) -> None:
    """Run seeded simulations of whole fleets and check what parti promises.

    Each seed decides a fleet, its traffic and its faults (crashes, pauses, cut and slow links, lost messages, server
    restarts, leader changes, clock jumps, workers that join and leave); parti's own code runs against a model of
    nats-server. The same seed always gives the same run. Exit codes: 0 all promises kept, 1 some were broken, 2 bad
    input.
    """
    if bug is not None and bug not in BUGS:
        raise ConfigError(f"--bug is {bug!r}: expected one of {', '.join(BUGS)}")
    if retention is not None and retention not in RETENTIONS:
        raise ConfigError(f"--retention is {retention!r}: expected one of {', '.join(RETENTIONS)}")
    if verbose and seed is None:
        raise ConfigError("--verbose prints one run: name it with --seed")
    console = open_console()
    if verbose:
        assert seed is not None
        outcome = run_one_in_process(seed, bug=bug, retention=retention)
        _print_timeline(console, outcome)
        raise typer.Exit(0 if outcome.good else 1)
    wanted = [seed] if seed is not None else range(first, first + seeds)
    began_s = time.perf_counter()
    tally = _run(console, wanted, processes or os.cpu_count() or 1, bug, retention)
    _print_tally(console, tally, time.perf_counter() - began_s)
    raise typer.Exit(1 if tally.failures else 0)


def _run(console: Console, seeds: list[int] | range, processes: int, bug: str | None, retention: str | None) -> Tally:
    tally, began_s = Tally(), time.perf_counter()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("simulating", total=len(seeds), rate="")
        for part in run_in_processes(seeds, min(processes, len(seeds)), bug=bug, retention=retention):
            # At once: a long run may be broken off, and what it has found must not be lost.
            for failure in part.failures[: max(0, _LISTED - len(tally.failures))]:
                _print_failure(console, failure, _options(bug, retention))
            tally.add(part)
            rate = tally.seeds / (time.perf_counter() - began_s)
            found = f", {count(len(tally.failures), 'failing seed')}" if tally.failures else ""
            progress.update(task, completed=tally.seeds, rate=f"{rate:.1f} seeds/s{found}")
    return tally


def _options(bug: str | None, retention: str | None) -> str:
    given = {"--bug": bug, "--retention": retention}
    return "".join(f" {option} {value}" for option, value in given.items() if value)


def _print_tally(console: Console, tally: Tally, elapsed_s: float) -> None:
    if len(tally.failures) > _LISTED:
        console.print(f"Further failing seeds: {', '.join(str(f.seed) for f in tally.failures[_LISTED:])}")
    rate, cpu_ms = tally.seeds / elapsed_s, 1000 * tally.cpu_s / tally.seeds
    console.print(
        f"{count(tally.seeds, 'seed')} in {elapsed_s:.1f} s ({rate:.1f} seeds/s, {cpu_ms:.0f} ms of CPU each): "
        f"{tally.messages:,} messages, {tally.calls:,} handler calls, {tally.holdings:,} holdings of partitions, "
        f"{tally.virtual_s / 3600:.1f} h of virtual time."
    )
    console.print(f"{count(len(tally.failures), 'failing seed')}.", style="red" if tally.failures else "green")


def _print_failure(console: Console, failure: Failure, options: str) -> None:
    console.print(f"seed {failure.seed}: parti sim --seed {failure.seed}{options} --verbose", style="red")
    for complaint in failure.complaints[:_SHOWN]:
        console.print(f"  {complaint}")
    if len(failure.complaints) > _SHOWN:
        console.print(f"  and {len(failure.complaints) - _SHOWN} more")


def _print_timeline(console: Console, outcome: Outcome) -> None:
    for at_s, who, what in outcome.timeline:
        console.print(f"{at_s:9.4f}  {who:8}  {what}")
    for complaint in outcome.complaints:
        console.print(complaint, style="red")
    console.print(f"seed {outcome.seed}, digest {outcome.digest}")
