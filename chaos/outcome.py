"""The report of a run: what must be shown and whether it was, figures, and the seed."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, write_result
from benchmarks.verdicts import Verdict, announce
from rich.console import Console

from chaos.checker import RULES
from chaos.site import Ending, Site
from parti.telemetry.logs import configure_logging

_CLOCK_LIMIT_S = 0.001


@dataclass(slots=True)
class Outcome:
    """What came of a run."""

    name: str
    settings: Mapping[str, Any]
    verdicts: list[Verdict]
    figures: dict[str, Any]
    """Further results, by what they are called in the report."""
    notices: list[str] = field(default_factory=list)
    """Examples of what was broken, and what workers complained about."""
    evidence: Path | None = None
    """Where notes and logs are, if they were kept."""

    @property
    def passed(self) -> bool:
        """Whether all was shown."""
        return all(verdict.passed for verdict in self.verdicts)


def conclude(
    name: str,
    options: argparse.Namespace,
    site: Site,
    ending: Ending,
    *,
    verdicts: Sequence[Verdict] = (),
    figures: Mapping[str, Any] | None = None,
    repeats_allowed: bool = False,
    dead_letters_allowed: bool = False,
) -> Outcome:
    """Put together what every run reports; further verdicts and figures are the program's own."""
    found = ending.findings
    counts = {str(rule): found.counts[rule] for rule in RULES}
    outcome = Outcome(
        name,
        {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items() if k not in {"results", "keep"}},
        [*_rules(ending, repeats_allowed, dead_letters_allowed), *verdicts],
        {
            "messages": found.messages,
            "handler calls": found.calls,
            "repeated": found.repeated,
            "oldest repeat, s before the fault": found.oldest_repeat_s,
            "handled but not confirmed to the publisher": found.unconfirmed,
            "violations": {rule: count for rule, count in counts.items() if count},
            "left in the stream": ending.left,
            "faults": dict(site.faults.counts()),
            "worker processes": site.workers.started,
            **(figures or {}),
        },
        [f"{broken.rule} in {broken.partition}: {broken.text}" for broken in found.examples],
    )
    site.evidence = site.evidence or not outcome.passed
    outcome.evidence = site.directory if site.evidence else None
    outcome.notices += [f"logged {n} x: {printable(text)}" for text, n in site.workers.complaints().most_common(10)]
    return outcome


def printable(text: str, limit: int = 300) -> str:
    """One bounded line for a terminal: a log may quote whatever was in a message."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))[:limit]


def _rules(ending: Ending, repeats_allowed: bool, dead_letters_allowed: bool) -> list[Verdict]:
    found, counts = ending.findings, ending.findings.counts
    dead_letters = 0 if dead_letters_allowed else ending.dead_letters
    verdicts = [
        Verdict(
            "lost",
            f"{counts['NoLoss']:,} of {found.messages:,} messages",
            not counts["NoLoss"] and found.messages > 0,
        ),
        Verdict("out of order", f"{counts['Order']:,}", not counts["Order"]),
        Verdict("two owners at once, or a stale one", f"{counts['OneOwner']:,}", not counts["OneOwner"]),
        Verdict("fence tokens that did not grow", f"{counts['EpochGrows']:,}", not counts["EpochGrows"]),
        Verdict("calls cut short", f"{counts['CutShort']:,}", not counts["CutShort"]),
    ]
    beyond = counts["NoRepeatOnPlannedMove"] + counts["BoundedRepeatOnCrash"]
    if repeats_allowed:
        verdicts.append(Verdict("repeated beyond in flight", f"{beyond:,} of {found.repeated:,} repeats", not beyond))
    else:
        verdicts.append(Verdict("repeated", f"{found.repeated:,}", not found.repeated))
    codes = sorted(set(ending.exit_codes))
    dead = f"{len(ending.crashed)} crashed {'; '.join(ending.crashed)[:300]}, exit codes {codes}"
    verdicts.append(Verdict("workers run until told to leave, and leave in order", dead, _left_well(ending)))
    if not ending.all_published or dead_letters or counts["Unnoted"] or ending.clock_jump_s > _CLOCK_LIMIT_S:
        text = (
            f"published all {ending.all_published}, dead letters {dead_letters}, notes missing "
            f"{counts['Unnoted']}, clock set by {ending.clock_jump_s:.4f} s"
        )
        verdicts.append(Verdict("the run itself", text, False))
    return verdicts


def _left_well(ending: Ending) -> bool:
    return not ending.crashed and not any(ending.exit_codes)


def report(outcome: Outcome, results: Path | None = None) -> int:
    """Print and write the result; returns the exit code."""
    console = Console(width=None if sys.stdout.isatty() else 150)
    for notice in outcome.notices:
        console.print(notice, style="dim", highlight=False, markup=False)
    for name, figure in outcome.figures.items():
        if figure not in ({}, [], None, ""):
            console.print(f"{name}: {figure}", highlight=False, markup=False)
    passed = announce(outcome.verdicts, console)
    if outcome.evidence:
        console.print(f"notes and logs are in {outcome.evidence}", soft_wrap=True)
    console.print(f"{outcome.name}, seed {outcome.settings['seed']}: {'passed' if passed else 'NOT PASSED'}")
    data = {
        "settings": dict(outcome.settings),
        "passed": passed,
        "verdicts": [asdict(verdict) for verdict in outcome.verdicts],
        "figures": {
            k: asdict(v) if is_dataclass(v) and not isinstance(v, type) else v for k, v in outcome.figures.items()
        },
        "notices": outcome.notices,
    }
    console.print(f"written to {write_result(outcome.name, data, results or RESULTS)}", soft_wrap=True)
    return 0 if passed else 1


Run = Callable[[argparse.Namespace], Coroutine[Any, Any, Outcome]]


def run_program(options: argparse.Namespace, run: Run) -> int:
    """Run and report; returns the exit code."""
    configure_logging("error", "console")
    return report(asyncio.run(run(options)), options.results)
