"""What must be shown, and whether it was: one line for each."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.report import write_result
from rich.console import Console


@dataclass(frozen=True, slots=True)
class Verdict:
    """One thing that must be shown."""

    what: str
    figure: str
    passed: bool


def announce(verdicts: Sequence[Verdict], console: Console) -> bool:
    """Print a line for each verdict; whether all was shown."""
    for verdict in verdicts:
        word = "ok" if verdict.passed else "NOT MET"
        console.print(f"{verdict.what}: {verdict.figure}: {word}", style="green" if verdict.passed else "red")
    return all(verdict.passed for verdict in verdicts)


def conclude(
    name: str, options: argparse.Namespace, verdicts: Sequence[Verdict], figures: Mapping[str, Any], console: Console
) -> int:
    """Print a line for each verdict and write the result with its figures; returns the exit code."""
    passed = announce(verdicts, console)
    result = {
        "settings": {k: v for k, v in vars(options).items() if k != "results"},
        "passed": passed,
        "verdicts": [asdict(verdict) for verdict in verdicts],
        **figures,
    }
    console.print(f"written to {write_result(name, result, options.results)}", soft_wrap=True)
    return 0 if passed else 1
