"""Has anything become slower? Ratios of now against the committed ones.

    python -m benchmarks.check             # compare with benchmarks/results/check.json
    python -m benchmarks.check --accept    # measure, and make that what later runs are compared with

Only ratios within one run are compared, never times: the machine may be another one, or busy. A ratio that seems to
have lost more than a quarter is measured again, with twice the rounds, and only the second result counts.
`benchmarks.ratios` says what each of them guards.

Exit code 1 when a ratio has lost more than a quarter, or is no longer measured; 2 for wrong usage and when there is
nothing to compare with.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import enum
import json
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.ratios import GROUPS, Found, Size
from benchmarks.report import RESULTS, machine, write_result
from rich.console import Console
from rich.table import Table

from parti.telemetry.logs import configure_logging

MOST_LOSS = 0.25
NAME = "check"
_GROUP_LIMIT_S = 170.0
_HINT = "make bench-check BENCH_ARGS=--accept"


class Verdict(enum.StrEnum):
    """What became of a ratio."""

    OK = "ok"
    LOST = "LOST"
    MISSING = "MISSING"
    """It was accepted once and is not measured any more."""
    NEW = "new"


@dataclass(frozen=True, slots=True)
class Row:
    """One ratio, then and now."""

    name: str
    then: float | None
    now: float | None
    verdict: Verdict

    @property
    def change(self) -> float | None:
        """0.1 for ten percent more."""
        return None if self.then is None or self.now is None else self.now / self.then - 1.0


def compare(then: Mapping[str, float], now: Mapping[str, float], most_loss: float = MOST_LOSS) -> list[Row]:
    """Every ratio that was accepted, then those that are new; a loss of exactly `most_loss` passes."""
    rows = []
    for name in (*then, *(name for name in now if name not in then)):
        if name not in now:
            verdict = Verdict.MISSING
        elif name not in then:
            verdict = Verdict.NEW
        else:
            verdict = Verdict.LOST if now[name] < then[name] * (1.0 - most_loss) else Verdict.OK
        rows.append(Row(name, then.get(name), now.get(name), verdict))
    return rows


def passed(rows: list[Row]) -> bool:
    """Whether nothing is lost or missing."""
    return not any(row.verdict in {Verdict.LOST, Verdict.MISSING} for row in rows)


class BaselineError(Exception):
    """There is nothing, or nothing comparable, to compare with."""


def load_baseline(directory: Path, size: Size) -> dict[str, float]:
    """The accepted ratios; raises BaselineError with the reason and what to do."""
    path = directory / f"{NAME}.json"
    try:
        data = json.loads(path.read_text())
        ratios = {str(name): float(ratio) for name, ratio in data["ratios"].items()}
        messages = int(data["settings"]["messages"])
    except FileNotFoundError as error:
        raise BaselineError(f"{path} is missing; make it with: {_HINT}") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise BaselineError(f"{path} is damaged ({error!r}); restore it or run: {_HINT}") from error
    if not ratios or not all(ratio > 0 for ratio in ratios.values()):
        raise BaselineError(f"{path} has no ratios above zero; restore it or run: {_HINT}")
    if messages != size.messages:
        raise BaselineError(f"{path} was measured with --messages {messages}, not {size.messages}: not comparable")
    return ratios


async def measure(size: Size, groups: Mapping[str, Any] = GROUPS) -> dict[str, Found]:
    """The ratios of all rounds, by group."""
    found: dict[str, Found] = {}
    for name, group in groups.items():
        print(f"measuring {name}, {size.rounds} rounds", flush=True)
        async with asyncio.timeout(_GROUP_LIMIT_S):
            found[name] = await group(size)
    return found


async def measure_losses_again(found: dict[str, Found], then: Mapping[str, float], size: Size) -> dict[str, float]:
    """Replace what seems lost by a second, longer look; returns the first results of what was looked at again."""
    doubted: dict[str, float] = {}
    for row in compare(then, medians(found)):
        if row.verdict is Verdict.LOST and row.now is not None:
            doubted[row.name] = row.now
            print(f"{row.name}: {row.now:.2f} after {row.then:.2f} seems lost; measuring it again")
    groups = {name: GROUPS[name] for name, ratios in found.items() if doubted.keys() & ratios.keys()}
    for name, ratios in (await measure(size, groups)).items():
        found[name] |= {ratio: rounds for ratio, rounds in ratios.items() if ratio in doubted}
    return doubted


def longer(size: Size) -> Size:
    """Twice the rounds."""
    return dataclasses.replace(size, rounds=size.rounds * 2)


def by_name(found: Mapping[str, Found]) -> Found:
    """The rounds of every ratio, whatever its group."""
    return {name: rounds for ratios in found.values() for name, rounds in ratios.items()}


def medians(found: Mapping[str, Found]) -> dict[str, float]:
    """One number for each ratio."""
    return {name: round(statistics.median(rounds), 3) for name, rounds in by_name(found).items()}


def show(rows: list[Row], found: Mapping[str, Found], doubted: Mapping[str, float]) -> None:
    """The verdicts as a table."""
    rounds = by_name(found)
    table = Table(title="ratios, more is better", title_justify="left")
    for column in ("ratio", "then", "now", "change", "rounds", "verdict"):
        table.add_column(column, justify="left" if column in {"ratio", "verdict"} else "right", no_wrap=True)
    for row in rows:
        values = rounds.get(row.name, [])
        again = f", second look; first {doubted[row.name]:.2f}" if row.name in doubted else ""
        table.add_row(
            row.name,
            "-" if row.then is None else f"{row.then:.2f}",
            "-" if row.now is None else f"{row.now:.2f}",
            "-" if row.change is None else f"{row.change:+.0%}",
            f"{min(values):.2f}..{max(values):.2f}" if values else "-",
            f"{row.verdict}{again}",
        )
    # A fixed width: what goes to a file or a log must not be cut at 80 columns.
    Console(width=None if sys.stdout.isatty() else 140).print(table)


async def run(args: argparse.Namespace) -> int:
    """Measure, compare and say it."""
    size = Size(args.messages, args.rounds, args.consumers)
    try:
        then = load_baseline(args.results, size)
    except BaselineError as error:
        if not args.accept:
            print(f"bench-check: {error}", file=sys.stderr)
            return 2
        then = {}
    described, started_s = machine(), time.monotonic()
    # What all later runs are held against is worth a longer look, too.
    found = await measure(longer(size) if args.accept else size)
    doubted = {} if args.accept else await measure_losses_again(found, then, longer(size))
    rows = compare(then, medians(found))
    show(rows, found, doubted)
    print(f"took {time.monotonic() - started_s:.0f} s")
    if args.accept:
        rounds = {name: [round(value, 3) for value in values] for name, values in by_name(found).items()}
        accepted = {"settings": dataclasses.asdict(longer(size)), "ratios": medians(found), "rounds": rounds}
        print(f"accepted: {write_result(NAME, {'machine': described, **accepted}, args.results)}")
        return 0
    for row in rows:
        if row.verdict is Verdict.MISSING:
            print(f"{row.name} is not measured any more; if that is meant: {_HINT}")
    print("bench-check: ok" if passed(rows) else f"bench-check: lost more than {MOST_LOSS:.0%}, or missing")
    return 0 if passed(rows) else 1


class Parser(argparse.ArgumentParser):
    """Wrong usage is one line."""

    def error(self, message: str) -> NoReturn:
        """Say it and leave with 2."""
        self.exit(2, f"bench-check: {message}\n")


def positive(text: str) -> int:
    """A whole number above zero."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above zero, not {text!r}")
    return number


def main() -> int:
    """Run what the command line asks for."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accept", action="store_true", help="make the result what later runs are compared with")
    parser.add_argument("--messages", type=positive, default=100_000, help="in each stream, at least 2000")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--consumers", type=positive, default=4, help="that drain the mirror one after the other")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of check.json")
    args = parser.parse_args()
    if args.messages < 2_000:
        parser.error(f"--messages {args.messages} is too few: expected at least 2000, one for each subject")
    configure_logging("error")
    return asyncio.run(run(args))


if __name__ == "__main__":
    sys.exit(main())
