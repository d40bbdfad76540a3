"""What must be shown, and whether it was: one line for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console


@dataclass(frozen=True, slots=True)
class Verdict:
    """One thing that must be shown."""

    what: str
    figure: str
    passed: bool


def announce(verdicts: Sequence[Verdict], console: Console) -> bool:
    """Print a line for each; returns whether all of them passed."""
    for verdict in verdicts:
        word = "ok" if verdict.passed else "NOT MET"
        console.print(f"{verdict.what}: {verdict.figure}: {word}", style="green" if verdict.passed else "red")
    return all(verdict.passed for verdict in verdicts)
